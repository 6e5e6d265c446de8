"""The partitioner: it tags the nodes that read weights, and tells the backend what only the whole method shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram

from penstock.backends.executorch.backend import PenstockBackend
from penstock.backends.executorch.options import (
    Alias,
    Kernels,
    MethodFacts,
    PartName,
    RegionFacts,
    Settings,
    to_spec,
)
from penstock.backends.executorch.plain import with_plain_operators
from penstock.backends.executorch.regions import Regions, find_regions, tag
from penstock.passes.calls.inputs import describe_method
from penstock.passes.trace import PRESET_CPU
from penstock.passes.weights.lifted import Catalog, Weights
from penstock.passes.weights.subclasses import parts_of, with_plain_parts
from penstock.passes.weights.usage import find_usage
from penstock.passes.weights.values import part_of, storage_identity
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Hardware
from penstock.schedule.facts.sizes import parse_size

LEAST = 64 << 10
"""Bytes from which on a storage is worth a region: what the disk brings while a delegate is called."""

_KEPT_WHOLE = [torch.ops.aten.linear.default]
"""Operators that read weights as they are, and would be decomposed into a copy of the weight and another read."""


class PenstockPartitioner(Partitioner):  # type: ignore[misc]
    """Tags what reads weights for `PenstockBackend`, which lets them stream; it changes nothing else.

    `budget` (bytes, `"32MiB"` or `"50%"` of the weights) is what a program runs with that is loaded without one;
    None keeps all weights in memory then. `keep` has patterns of FQNs that stay in memory. `kernels` are those that
    run what is tagged: `"executorch"`, whose own run everything else too, or `"aotinductor"`. `hardware` is what
    times are modelled for, a preset's name or a Hardware. `data_file` is the name of the `.ptd`. Storages of fewer
    than `least` bytes are not worth a delegate. Give one partitioner for all methods of a program.
    """

    def __init__(
        self,
        *,
        budget: int | str | None = None,
        keep: Sequence[str] = (),
        kernels: Kernels = "executorch",
        hardware: Hardware | str = PRESET_CPU,
        data_file: str = "weights.ptd",
        least: int = LEAST,
    ) -> None:
        super().__init__()
        self._settings = _checked(budget, keep, kernels, hardware, data_file, least)
        self._aliases: list[Alias] = []
        self._parts: dict[str, tuple[str, str]] = {}

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Opens quantised weights, and remembers names that ExecuTorch is about to drop."""
        opened = with_plain_parts(exported_program)
        self._parts |= parts_of(opened)
        self._aliases.extend(_aliases(opened, len(self._aliases)))
        return opened

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[torch.fx.Node], bool] | None]:
        """Operators that stay whole, so that weights are read where they lie."""
        return _KEPT_WHOLE, None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Returns the program, tagged, and what to make of each tag.

        Raises PassError for a program with weights that are no inputs, or have no values.
        """
        plain = with_plain_operators(exported_program)
        catalog = Catalog()
        held = catalog.add(plain)
        usage = find_usage(plain, Weights(held, catalog.storages))
        found = find_regions(plain, usage, held, least=self._settings.least)
        tags = tag(exported_program, found.regions, "penstock")
        specs = self._specs(exported_program, found)
        return PartitionResult(
            tagged_exported_program=exported_program,
            partition_tags={
                tag: DelegationSpec(PenstockBackend.__name__, spec) for tag, spec in zip(tags, specs, strict=True)
            },
        )

    def _specs(self, exported: ExportedProgram, found: Regions) -> list[list[Any]]:
        """The compile specs of every region."""
        specs = []
        for number, region in enumerate(found.regions):
            last = number == len(found.regions) - 1
            one = [to_spec(self._settings), to_spec(RegionFacts(region.lead, found.tail if last else RegionFacts().tail))]
            if number == 0:
                one.append(to_spec(self._method_facts(exported)))
            specs.append(one)
        return specs

    def _method_facts(self, exported: ExportedProgram) -> MethodFacts:
        method = describe_method(exported, "method", 0)
        parts = tuple(PartName(name, *pair) for name, pair in self._parts.items())
        return MethodFacts(method.inputs, method.symbols, tuple(self._aliases), parts)


def _checked(
    budget: int | str | None,
    keep: Sequence[str],
    kernels: Kernels,
    hardware: Hardware | str,
    data_file: str,
    least: int,
) -> Settings:
    if budget is not None:
        parse_size(budget, total=100)
    if isinstance(keep, str):
        raise PlanError(f"keep= takes a list of patterns, got {keep!r}: give [{keep!r}]")
    if kernels not in ("executorch", "aotinductor"):
        raise PlanError(f"kernels= is 'executorch' or 'aotinductor', got {kernels!r}")
    return Settings(
        hardware=find_hardware(hardware),
        budget="" if budget is None else str(budget),
        keep=tuple(keep),
        kernels=kernels,
        data_file=data_file if data_file.endswith(".ptd") else f"{data_file}.ptd",
        least=least,
    )


def _aliases(exported: ExportedProgram, first: int) -> list[Alias]:
    """The names of memory that has several; memory is numbered from `first`."""
    values: Mapping[str, Any] = {**exported.state_dict, **exported.constants}
    by_memory: dict[tuple[str, int], list[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            by_memory.setdefault(storage_identity(value), []).append(name)
    roles = {str(s.target): s.kind.name.lower() for s in exported.graph_signature.input_specs}
    found: list[Alias] = []
    for number, names in enumerate((names for names in by_memory.values() if len(names) > 1), first):
        for name in names:
            buffer = roles.get(name, roles.get(names[0])) == "buffer"
            role: Literal["buffer", "parameter"] = "buffer" if buffer else "parameter"
            found.append(Alias(name, role, part_of(values[name], number)))
    return found
