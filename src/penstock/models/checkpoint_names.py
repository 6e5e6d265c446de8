"""The names that the weights of a transformers model have in its checkpoints, by the rules of its loader."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

_STACKED = [("MergeModulelist", 0)]
_STACKED_SIDE_BY_SIDE = [("MergeModulelist", 0), ("Concatenate", 1)]
_ONE_AFTER_ANOTHER = [("Concatenate", 0)]


def names_in_checkpoint(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of a checkpoint that make up each weight of another name, in the form that `rename=` takes.

    `names` are the names of the checkpoint's tensors. `model` may be on the meta device. The library renames
    tensors while it loads them, and stacks those of experts: the rows of a stacked weight are the rows of its
    tensors, one after another. Weights that it makes in another way are left out. The result is empty for a
    model that is not of transformers.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return {}
    if not isinstance(model, PreTrainedModel):
        return {}
    conversions: dict[str, list[tuple[str, Any, str | None]]] = {}
    for name, fqn, converter, pattern in _conversions(model, names):
        conversions.setdefault(fqn, []).append((name, converter, pattern))
    result = {fqn: _in_order(sources) for fqn, sources in conversions.items()}
    return {fqn: order for fqn, order in result.items() if order and order != (fqn,)}


def _conversions(model: Any, names: Iterable[str]) -> Iterable[tuple[str, str, Any, str | None]]:
    """Yields each tensor's name, the weight that it becomes part of, its conversion, and its pattern."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    weights = model.state_dict()
    for name in names:
        fqn, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, weights)
        if fqn in weights:
            yield name, fqn, by_pattern.get(pattern), pattern


def _in_order(sources: Sequence[tuple[str, Any, str | None]]) -> tuple[str, ...]:
    """The tensors whose rows, one after another, are a weight's rows; () if there is no such order."""
    converter = sources[0][1]
    if converter is None:
        return (sources[0][0],) if len(sources) == 1 else ()
    operations = [
        (type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations
    ]
    by_pattern: dict[str | None, list[str]] = {pattern: [] for pattern in converter.source_patterns}
    for name, _, pattern in sources:
        by_pattern[pattern].append(name)
    lists = [sorted(matching, key=_numbers) for matching in by_pattern.values()]
    if operations == _STACKED:
        return tuple(lists[0]) if len(lists) == 1 else ()
    if operations == _ONE_AFTER_ANOTHER:
        return tuple(name for matching in lists for name in matching)
    if operations == _STACKED_SIDE_BY_SIDE and len({len(matching) for matching in lists}) == 1:
        return tuple(name for together in zip(*lists, strict=True) for name in together)
    return ()


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name))
