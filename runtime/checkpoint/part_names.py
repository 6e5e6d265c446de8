"""What the parts of quantised weights are called in a checkpoint."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from penstock.runtime.checkpoint.binding import Names, Rename, tensor_names
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Weight
from penstock.schedule.facts.parts import tensor_of


def part_names(weights: Sequence[Weight], rename: Rename, known: Container[str]) -> dict[str, Names]:
    """Names in the files of every weight, and of every part of a quantised one, by `FQN` or `FQN.PART`.

    Where `rename` says nothing about a part it is looked for as the weight's name in the files and `.PART`,
    then as torchao's safetensors files have it (`layer._weight_PART`). SourceError for a table that renames
    what is no weight.
    """
    names: dict[str, Names] = {}
    fqns = {
        name for weight in weights for part in weight.parts for name in (weight.fqn, tensor_of(weight, part))
    }
    unknown = [name for name in rename if name not in fqns] if isinstance(rename, Mapping) else ()
    if unknown:
        raise SourceError(f"rename= has {unknown[0]!r}, which is no weight of the program: correct it")
    for weight in weights:
        for part in weight.parts:
            candidates = list(_candidates(weight.fqn, part.name, rename))
            there = (c for c in candidates if all(name in known for name in c))
            names[tensor_of(weight, part)] = next(there, candidates[0])
    return names


def _candidates(fqn: str, part: str, rename: Rename) -> Iterator[tuple[str, ...]]:
    if not part:
        yield tensor_names(fqn, rename)
        return
    yield tensor_names(f"{fqn}.{part}", rename)
    wholes = tensor_names(fqn, rename)
    yield tuple(f"{whole}.{part}" for whole in wholes)
    split = [whole.rpartition(".") for whole in wholes]
    yield tuple(f"{module}{dot}_{attribute}_{part}" for module, dot, attribute in split)


def check_parts(weights: Sequence[Weight], found: Mapping[int, object]) -> None:
    """SourceError for a weight of which the files, with the storages `found`, have only some parts."""
    for weight in weights:
        missing = [part for part in weight.parts if part.storage not in found]
        if missing and len(missing) < len(weight.parts):
            names = ", ".join(tensor_of(weight, part) for part in missing)
            raise SourceError(
                f"the files have only some parts of weight {weight.fqn}: {names} is missing; values of two "
                "checkpoints do not belong together: give the missing shards, or name them with rename="
            )
