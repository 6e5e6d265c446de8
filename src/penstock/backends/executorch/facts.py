"""One catalog for all regions, and the trace of each method: a step for each region that streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.export import ExportedProgram

from penstock.backends.executorch.options import MethodFacts, RegionFacts, Settings
from penstock.backends.executorch.uses import named_without_use
from penstock.passes.annotate import annotate_with_values
from penstock.passes.trace import sum_of
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import (
    Method,
    Step,
    Storage,
    Trace,
    Weight,
    Work,
    join_parts,
    read_together,
)
from penstock.schedule.payload.codec import Payload

SMALL = 4096
"""Bytes below which a storage stays in memory: the disk would read a whole block for it."""


@dataclass(frozen=True)
class RegionProgram:
    """A region as a program with ATen's operators, of a method, and what the partitioner said about it."""

    method: str
    number: int
    program: ExportedProgram
    facts: RegionFacts

    @property
    def name(self) -> str:
        """A name among all regions."""
        return f"{self.method}_{self.number}"


@dataclass(frozen=True)
class Facts:
    """The payload without files and plans, a tensor in each storage, and the steps of regions by name.

    `tensors` are the weights of the payload by the names that their tensors have in the regions, and `takes`
    has, by name, the inputs of those whose code does not check them by itself.
    """

    payload: Payload
    values: tuple[torch.Tensor, ...]
    steps: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, Weight]
    takes: Mapping[str, Method] = field(default_factory=dict)


def find_facts(
    regions: Sequence[RegionProgram], methods: Mapping[str, MethodFacts], settings: Settings
) -> Facts:
    """Annotates all regions as one program, and joins what belongs to one method.

    Raises PassError for a region without weights.
    """
    refuse_without_weights(regions)
    found = annotate_with_values({one.name: one.program for one in regions}, hardware=settings.hardware)
    storages = tuple(_kind(storage) for storage in found.payload.storages)
    tensors = {weight.fqn: weight for weight in found.payload.tensors}
    parts = {part.name: (part.fqn, part.part) for one in methods.values() for part in one.parts}
    named = _named(tensors, regions)
    weights = join_parts([*named.values(), *aliases_of(named, methods)], parts)
    traces: list[Trace] = []
    steps: dict[str, tuple[int, int]] = {}
    of_region = {trace.method: trace for trace in found.payload.traces}
    for graph, name in enumerate(methods):
        own = [one for one in regions if one.method == name]
        trace, ranges = _joined(graph, name, [(one, of_region[one.name]) for one in own], storages)
        traces.append(read_together(with_times(trace, settings.hardware), weights))
        steps |= ranges
    payload = Payload(
        lowering="executorch",
        torch=found.payload.torch,
        storages=storages,
        weights=weights,
        methods=tuple(
            Method(name, graph, facts.inputs, facts.symbols)
            for graph, (name, facts) in enumerate(methods.items())
        ),
        traces=tuple(traces),
        hardware=settings.hardware,
    )
    return Facts(payload, found.values, steps, tensors)


def refuse_without_weights(regions: Sequence[RegionProgram]) -> None:
    """Raises PassError for a region that reads no weights."""
    for region in regions:
        if not (region.program.state_dict or region.program.constants):
            raise PassError(
                f"region {region.number} of method {region.method!r} reads no weights, so there is nothing "
                "to stream in it: tag only nodes that read weights, as PenstockPartitioner does"
            )


def _kind(storage: Storage) -> Storage:
    small = storage.kind == "streamable" and storage.nbytes < SMALL
    return replace(storage, kind="small") if small else storage


def _named(tensors: Mapping[str, Weight], regions: Sequence[RegionProgram]) -> dict[str, Weight]:
    """The weights by their own names: several inputs may be for one, and a constant has its method's name."""
    methods = {region.name: region.method for region in regions}
    named: dict[str, Weight] = {}
    for name, weight in tensors.items():
        region, _, rest = name.partition(".")
        constant = weight.role == "constant" and region in methods
        fqn = f"{methods[region]}.{rest}" if constant else named_without_use(name)
        known = named.setdefault(fqn, replace(weight, fqn=fqn))
        if known.parts != weight.parts:
            named[name] = weight
    return named


def aliases_of(known: Mapping[str, Weight], methods: Mapping[str, MethodFacts]) -> list[Weight]:
    """The weights that are other names of known ones."""
    found: dict[str, Weight] = {}
    for facts in methods.values():
        memory: dict[int, Weight] = {}
        for alias in facts.aliases:
            if alias.fqn in known:
                memory.setdefault(alias.part.storage, known[alias.fqn])
        for alias in facts.aliases:
            weight = memory.get(alias.part.storage)
            if weight is not None and alias.fqn not in known:
                part = replace(alias.part, storage=weight.parts[0].storage)
                found[alias.fqn] = Weight(alias.fqn, alias.role, weight.device, (part,))
    return list(found.values())


def _joined(
    graph: int, name: str, regions: Sequence[tuple[RegionProgram, Trace]], storages: Sequence[Storage]
) -> tuple[Trace, dict[str, tuple[int, int]]]:
    """The trace of a method, in which each region that reads a streamable storage is one step."""
    steps: list[Step] = []
    ranges: dict[str, tuple[int, int]] = {}
    lead, shape = Work(), ""
    for region, trace in regions:
        reads = {s for step in trace.steps for s in step.reads if storages[s].kind == "streamable"}
        lead = sum_of(lead, region.facts.lead)
        work = sum_of(*(sum_of(step.lead_work, step.read_work) for step in trace.steps), trace.tail_work)
        ranges[region.name] = (len(steps), len(steps) + bool(reads))
        shape = shape or trace.shape
        if reads:
            readers = [step.name for step in trace.steps if reads.intersection(step.reads)]
            steps.append(Step(readers[0], tuple(sorted(reads)), 0, 0, lead, work))
            lead = Work()
        else:
            lead = sum_of(lead, work)
        lead = sum_of(lead, region.facts.tail)
    return Trace(name, graph, shape, tuple(steps), 0, 0, "modelled", lead), ranges
