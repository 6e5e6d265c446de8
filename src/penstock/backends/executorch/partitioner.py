"""The partitioner: tags the nodes that read weights, and tells the backend what only the method shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram

from penstock.backends.executorch.backend import PenstockBackend
from penstock.backends.executorch.facts import compiled_late, operators_of, with_own_uses
from penstock.backends.executorch.options import (
    Alias,
    Kernels,
    MethodFacts,
    PartName,
    RegionFacts,
    Settings,
    to_spec,
)
from penstock.backends.executorch.regions import (
    Regions,
    Worth,
    find_regions,
    other_backends,
    tag,
    whole_method,
)
from penstock.passes.building.fake_export import with_computed_buffers
from penstock.passes.calls.inputs import describe_method, guards_of, refuse_shared_inputs
from penstock.passes.graph.nodes import with_aten_operators
from penstock.passes.trace import PRESET_CPU
from penstock.passes.weights.lifted import Catalog, Weights, has_values, part_of, storage_identity
from penstock.passes.weights.subclasses import parts_of, with_plain_parts
from penstock.passes.weights.usage import find_usage
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Hardware, Input, Symbol
from penstock.schedule.facts.sizes import parse_size

_log = logging.getLogger(__name__)

LEAST = 64 << 10
"""Bytes from which on a storage is worth a region: what the disk brings while a delegate is called."""

_KEPT_WHOLE = [torch.ops.aten.linear.default]
"""Operators that read weights as they lie, and would be decomposed into a copy and another operator."""


class PenstockPartitioner(Partitioner):  # type: ignore[misc]
    """Tags what reads weights for `PenstockBackend`, which lets them stream; it changes nothing else.

    Give one partitioner for all methods of a program; it may then be given for another program.

    Args:
        budget: What a program runs with that is loaded without a budget: bytes, `"32MiB"`, or `"50%"` of the
            weights. Default: all weights stay in memory then.
        keep: FQN patterns of weights that stay in memory.
        kernels: `"executorch"`: its own kernels, around single reads of weights. `"aotinductor"`: code that
            AOTInductor compiles of whole methods, for this torch and this processor.
        hardware: The machine that times are modelled for: a preset or a `Hardware`.
        data_file: The name of the `.ptd`.
        least: Storages of fewer bytes are not worth a delegate.

    Raises:
        BudgetError: `budget` is no size.
        PlanError: `keep` is a text, or there are no such kernels or hardware.
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
        if budget is not None:
            parse_size(budget, total=100)
        if isinstance(keep, str):
            raise PlanError(f"keep= takes a list of patterns, got {keep!r}: give [{keep!r}]")
        if kernels not in ("executorch", "aotinductor"):
            raise PlanError(
                f"kernels= is 'executorch', whose own run what is delegated, or 'aotinductor', got "
                f"{kernels!r}"
            )
        self._asked = Settings(
            hardware=find_hardware(hardware),
            budget="" if budget is None else str(budget),
            keep=tuple(keep),
            kernels=kernels,
            data_file=data_file if data_file.endswith(".ptd") else f"{data_file}.ptd",
            least=least,
        )
        self._begin()

    def _begin(self) -> None:
        """Forgets the program before, of which names and settings would be taken for those of the next."""
        self._settings = self._asked
        self._aliases: list[Alias] = []
        self._parts: dict[str, tuple[str, str]] = {}
        self._written: set[str] = set()
        self._lowest: dict[object, int] = {}
        self._partitioned = False

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Opens quantised weights, gives each use its own input, and remembers names that will be lost.

        Weights without values all go to regions: ExecuTorch cannot store what it does not have.
        """
        if self._partitioned:
            self._begin()
        refuse_shared_inputs(exported_program)
        opened = with_plain_parts(with_computed_buffers(exported_program))
        self._parts |= parts_of(opened)
        self._parts |= {name: pair for name in opened.state_dict if (pair := _unwrapped(name))}
        if not all(map(has_values, opened.state_dict.values())):
            self._settings = replace(self._settings, least=1)
        self._aliases.extend(_aliases(opened, len(self._aliases)))
        self._remember_ranges(opened)
        return opened if self._compiles else with_own_uses(opened, self._asked.least)

    def _remember_ranges(self, exported: ExportedProgram) -> None:
        """Remembers the smallest sizes, which torch raises from 1 to 2 where it decomposes a program."""
        method = describe_method(exported, "method", 0)
        for symbol in method.symbols:
            key = _place(method.inputs, symbol)
            self._lowest[key] = max(symbol.lower, self._lowest.get(key, 0))

    @property
    def _compiles(self) -> bool:
        return self._settings.kernels == "aotinductor"

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[torch.fx.Node], bool] | None]:
        """Operators that stay whole, so that weights are read where they lie.

        ExecuTorch asks this of every method before any is partitioned, when the signature says what is
        written. It asks again in the end, and refuses such an operator outside of delegates, although it
        has a kernel for it: a weight that is not worth a region is read there. AOTInductor decomposes what it
        is given by itself.
        """
        if self._partitioned:
            return _KEPT_WHOLE, lambda node: False
        if self._compiles:
            return operators_of(ep), None
        self._written |= set(ep.graph_signature.buffers_to_mutate.values())
        return _KEPT_WHOLE, None

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Returns the program, tagged, and what to make of each tag.

        Raises PassError for a program with weights that are no inputs, or have no values.
        """
        self._partitioned = True
        regions = whole_method(exported_program) if self._compiles else self._regions(exported_program)
        backends = other_backends(exported_program)
        if backends and not regions.regions:
            _log.warning(
                "penstock streams nothing of a program: %s took what reads weights before; name "
                "PenstockPartitioner first to have them streamed",
                " and ".join(backends),
            )
        tags = tag(exported_program, regions.regions, "penstock")
        specs = self._specs(exported_program, regions)
        return PartitionResult(
            tagged_exported_program=compiled_late(exported_program),
            partition_tags={
                tag: DelegationSpec(PenstockBackend.__name__, spec)
                for tag, spec in zip(tags, specs, strict=True)
            },
        )

    def _regions(self, exported: ExportedProgram) -> Regions:
        plain = with_aten_operators(exported)
        catalog = Catalog()
        weights_of = catalog.add(plain)
        usage = find_usage(plain, Weights(weights_of, catalog.storages))
        wholes = {name: weight for name, (weight, _) in self._parts.items()}
        worth = Worth(self._settings.least, frozenset(self._written), wholes)
        return find_regions(plain, usage, weights_of, worth)

    def _specs(self, exported: ExportedProgram, regions: Regions) -> list[list[Any]]:
        specs = []
        for number, region in enumerate(regions.regions):
            last = number == len(regions.regions) - 1
            spec = [
                to_spec(self._settings),
                to_spec(RegionFacts(region.lead, regions.tail if last else RegionFacts().tail)),
            ]
            if number == 0:
                spec.append(to_spec(self._method_facts(exported)))
            specs.append(spec)
        return specs

    def _method_facts(self, exported: ExportedProgram) -> MethodFacts:
        method = describe_method(exported, "method", 0)
        parts = tuple(PartName(name, *pair) for name, pair in self._parts.items())
        symbols = [
            replace(
                known, lower=min(known.lower, self._lowest.get(_place(method.inputs, known), known.lower))
            )
            for known in method.symbols
        ]
        guards = tuple(text for text, _ in guards_of(exported)) if self._compiles else ()
        return MethodFacts(method.inputs, tuple(symbols), tuple(self._aliases), parts, guards)


def _place(inputs: Sequence[Input], symbol: Symbol) -> object:
    """Where a symbol stands among the inputs, by types: ExecuTorch renames an input called `input`."""
    types = tuple(
        (described.dtype, *(size if isinstance(size, int) else None for size in described.shape))
        for described in inputs
    )
    places = tuple(
        (k, d)
        for k, described in enumerate(inputs)
        for d, size in enumerate(described.shape)
        if size == symbol.name
    )
    return types, places


def _unwrapped(name: str) -> tuple[str, str] | None:
    """The weight and the part of a tensor that torchao's `unwrap_tensor_subclass` has named."""
    module, _, original = name.partition("parametrizations.")
    attribute, _, part = original.rpartition(".")
    return (f"{module}{attribute}", part) if part.startswith("original") else None


def _aliases(exported: ExportedProgram, first: int) -> list[Alias]:
    """The names of memory that has several; memory is numbered from `first`."""
    values: Mapping[str, Any] = {**exported.state_dict, **exported.constants}
    by_memory: dict[tuple[str, int], list[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            by_memory.setdefault(storage_identity(value), []).append(name)
    roles = {str(s.target): s.kind.name.lower() for s in exported.graph_signature.input_specs}
    aliases: list[Alias] = []
    for number, names in enumerate((names for names in by_memory.values() if len(names) > 1), first):
        for name in names:
            buffer = roles.get(name, roles.get(names[0])) == "buffer"
            role: Literal["buffer", "parameter"] = "buffer" if buffer else "parameter"
            aliases.append(Alias(name, role, part_of(values[name], number)))
    return aliases
