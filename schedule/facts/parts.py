"""Weights that have several parts, as quantised ones do: their names, and reads of all parts together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.schedule.facts.model import Part, Trace, Weight


def tensor_of(weight: Weight, part: Part) -> str:
    """The name of a part among all tensors: the FQN of its weight, or `FQN.PART` where it has several."""
    return f"{weight.fqn}.{part.name}" if part.name else weight.fqn


def plain_weights(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Each part as a weight of its own, which has one part without a name."""
    return tuple(
        replace(weight, fqn=tensor_of(weight, part), parts=(replace(part, name=""),)) if part.name else weight
        for weight in weights
        for part in weight.parts
    )


def join_parts(plain: Iterable[Weight], parts: Mapping[str, tuple[str, str]]) -> tuple[Weight, ...]:
    """Undo `plain_weights`: `parts` maps the name of a tensor to its weight's FQN and its part's name."""
    joined: dict[str, Weight] = {}
    for weight in plain:
        fqn, name = parts.get(weight.fqn, (weight.fqn, ""))
        part = replace(weight.parts[0], name=name)
        first = joined.get(fqn)
        joined[fqn] = replace(weight, fqn=fqn, parts=(*(first.parts if first else ()), part))
    return tuple(joined.values())


def storages_together(weights: Sequence[Weight]) -> dict[int, tuple[int, ...]]:
    """Groups of storages that belong to exactly the same weights, for all weights of several parts.

    Maps each storage to its group, which contains it. A storage that further weights use, such as a scale
    that many weights share, is not in the group of the other parts.
    """
    holders: dict[int, list[str]] = {}
    for weight in weights:
        for part in weight.parts:
            holders.setdefault(part.storage, []).append(weight.fqn)
    groups: dict[frozenset[str], list[int]] = {}
    for storage in dict.fromkeys(p.storage for w in weights if len(w.parts) > 1 for p in w.parts):
        groups.setdefault(frozenset(holders[storage]), []).append(storage)
    return {storage: tuple(group) for group in groups.values() for storage in group}


def read_together(trace: Trace, weights: Sequence[Weight]) -> Trace:
    """The trace in which a step that reads one part of a weight reads all parts that any step reads.

    All parts of a weight are then on the device during the same steps, and leave it together. A part that any
    step reads by units is by itself: brought whole with another part, it would take what units save.
    """
    together = storages_together(weights)
    by_units = {read.storage for step in trace.steps for read in step.sparse}
    together = {s: (s,) if s in by_units else group for s, group in together.items()}
    read = {s for step in trace.steps for s in step.reads} - by_units
    steps = []
    for step in trace.steps:
        joined = {other for s in step.reads for other in together.get(s, (s,))} & read
        steps.append(replace(step, reads=tuple(sorted(joined.union(step.reads)))))
    return replace(trace, steps=tuple(steps))
