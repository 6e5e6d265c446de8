"""Exported program in, payload out: the catalog of weights and a modelled trace of every method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram

from penstock.passes.building.fake_export import with_computed_buffers
from penstock.passes.building.refusals import refuse_scripted
from penstock.passes.calls.inputs import describe_method
from penstock.passes.calls.signature import check_signature
from penstock.passes.graph.grad_regions import without_grad_regions
from penstock.passes.graph.retarget import exported_device
from penstock.passes.trace import PRESET_CPU, observe
from penstock.passes.weights.constants import with_own_constants
from penstock.passes.weights.lifted import Weights, find_weights, storage_identity
from penstock.passes.weights.lost_values import refuse_lost_values
from penstock.passes.weights.subclasses import parts_of, with_plain_parts
from penstock.passes.weights.usage import Usage, find_usage
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Hardware, Kind, Method, Storage, Weight
from penstock.schedule.facts.parts import join_parts, read_together
from penstock.schedule.payload.codec import Payload


@dataclass(frozen=True)
class Annotated:
    """A payload, and the torch objects behind it.

    `values[s]` is a tensor whose untyped storage is storage s; `programs` are the programs by method,
    without regions of another grad mode.
    """

    payload: Payload
    values: tuple[torch.Tensor, ...]
    programs: dict[str, ExportedProgram]


def annotate(
    exported: ExportedProgram | Mapping[str, ExportedProgram], *, hardware: Hardware = PRESET_CPU
) -> Payload:
    """Returns catalog and modelled traces of a program, or of several methods {name: program}.

    Nothing is written and nothing copied. Methods are numbered in order; they share the weights of
    equal names, which must be the same memory. `hardware` gives the rates of the model.
    Raises PassError for a program that cannot be streamed.
    """
    return annotate_with_values(exported, hardware=hardware).payload


def _programs(exported: object) -> dict[str, ExportedProgram]:
    """By method; PassError for what is no exported program, or no name."""
    if isinstance(exported, ExportedProgram):
        return {"forward": exported}
    if not isinstance(exported, Mapping):
        refuse_scripted(exported)
        raise PassError(
            f"expected an exported program, or one for each method, got {type(exported).__name__}: "
            "export the model first, torch.export.export(model, example_inputs)"
        )
    for name, program in exported.items():
        refuse_scripted(program, f"method {name!r}")
        if not isinstance(name, str) or not name.isidentifier():
            raise PassError(f"{name!r} cannot be the name of a method: give an identifier, such as 'decode'")
        if not isinstance(program, ExportedProgram):
            raise PassError(
                f"method {name!r} is {type(program).__name__}, expected an exported program: export it first"
            )
    return dict(exported)


def annotate_with_values(
    exported: ExportedProgram | Mapping[str, ExportedProgram], *, hardware: Hardware = PRESET_CPU
) -> Annotated:
    """Does what `annotate` does, and keeps the tensors, for whoever writes them to files."""
    programs = _programs(exported)
    for program in programs.values():
        refuse_lost_values(program)
    programs = {name: with_computed_buffers(program) for name, program in programs.items()}
    programs = {name: with_plain_parts(program) for name, program in programs.items()}
    programs = {name: without_grad_regions(program) for name, program in programs.items()}
    programs = with_own_constants(programs)
    if not programs:
        raise PassError("there is no method to annotate: give an exported program, or {name: program}")
    catalog = _Catalog()
    methods: list[Method] = []
    usages: list[tuple[Usage, dict[int, int]]] = []
    for graph, (name, program) in enumerate(programs.items()):
        check_signature(program)
        methods.append(describe_method(program, name, graph))
        found = find_weights(program)
        usage = find_usage(program, found)
        usages.append((usage, catalog.add(program, found, usage.kinds)))
    catalog.check()
    weights = join_parts(catalog.weights.values(), _parts(programs))
    # Only now, because a method may write what another only reads.
    traces = tuple(
        observe(_in_catalog(usage, numbers, catalog), method=method, hardware=hardware)
        for method, (usage, numbers) in zip(methods, usages, strict=True)
    )
    payload = Payload(
        lowering="none",
        torch=torch.__version__.split("+", maxsplit=1)[0],
        storages=tuple(map(Storage, catalog.nbytes, catalog.kinds)),
        weights=weights,
        methods=tuple(methods),
        traces=tuple(read_together(trace, weights) for trace in traces),
    )
    return Annotated(payload, tuple(catalog.values), programs)


def _parts(programs: Mapping[str, ExportedProgram]) -> dict[str, tuple[str, str]]:
    """FQN and name of each part, by its tensor's name; PassError where methods have other parts."""
    known: dict[str, tuple[str, str]] = {}
    names: dict[str, set[str]] = {}
    for program in programs.values():
        own: dict[str, set[str]] = {}
        for fqn, part in parts_of(program).values():
            own.setdefault(fqn, set()).add(part)
        for fqn, parts in own.items():
            if names.setdefault(fqn, parts) != parts:
                raise PassError(
                    f"weight {fqn!r} has the parts {sorted(names[fqn])} in one method and {sorted(parts)} in "
                    "another: export the methods from one model"
                )
        known |= parts_of(program)
    return known


class _Catalog:
    """Weights and storages of all methods; grows while they are added."""

    def __init__(self) -> None:
        self.weights: dict[str, Weight] = {}
        self.values: list[torch.Tensor] = []
        self.nbytes: list[int] = []
        self.kinds: list[Kind] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._joined: dict[
            int, str
        ] = {}  # where one method has two storages, equal, of what is one elsewhere

    def check(self) -> None:
        """Raises PassError where a method would write two weights at once that it has apart."""
        for number, fqn in self._joined.items():
            if self.kinds[number] == "mutable":
                raise PassError(
                    f"weight {fqn!r} is written, shares its memory with another in one method, and not in "
                    "another: export the methods from one model"
                )

    def add(self, program: ExportedProgram, weights: Weights, kinds: tuple[Kind, ...]) -> dict[int, int]:
        """Adds a method's weights; returns the catalog's number of each of its storages."""
        main = exported_device(program.graph_module)
        numbers: dict[int, int] = {}
        for weight, tensor in zip(weights.weights, weights.tensors, strict=True):
            local = weight.parts[0].storage
            # What lies on another device than the rest stays there whole.
            kind = kinds[local] if torch.device(weight.device).type == main.type else "returned"
            number = self._number(weight, tensor, kind)
            numbers[local] = number
            if sum(other == number for other in numbers.values()) > 1:
                self._joined.setdefault(number, weight.fqn)
            placed = replace(weight, parts=(replace(weight.parts[0], storage=number),))
            if self.weights.setdefault(weight.fqn, placed) != placed:
                raise PassError(
                    f"two methods have weights called {weight.fqn!r} that differ: export them "
                    "from one model, or give the weights different names"
                )
        return numbers

    def _number(self, weight: Weight, tensor: torch.Tensor, kind: Kind) -> int:
        identity = storage_identity(tensor)
        known = self.weights.get(weight.fqn)
        if identity not in self._numbers and known is not None:
            # Programs that were saved and loaded apart hold copies of one weight, or of one cache.
            number = known.parts[0].storage
            if _same_bytes(self.values[number], tensor):
                self._numbers[identity] = number
        number = self._numbers.setdefault(identity, len(self.values))
        size = tensor.untyped_storage().nbytes()
        if number == len(self.values):
            self.values.append(tensor)
            self.nbytes.append(size)
            self.kinds.append(kind)
        elif size > self.nbytes[number]:
            self.values[number], self.nbytes[number] = tensor, size
        if "mutable" in (kind, self.kinds[number]):
            self.kinds[number] = "mutable"
        elif kind != "streamable":
            self.kinds[number] = kind
        return number


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if "meta" in (one.device.type, other.device.type) or type(one) is not type(other):
        return False
    raw = [torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in (one, other)]
    return bool(torch.equal(raw[0], raw[1]))


def _in_catalog(usage: Usage, numbers: Mapping[int, int], catalog: _Catalog) -> Usage:
    """Returns the usage in the catalog's numbers; reads of storages without bytes are none."""
    reads = {
        node: tuple(sorted({numbers[read] for read in read_here if catalog.nbytes[numbers[read]]}))
        for node, read_here in usage.reads.items()
    }
    return replace(usage, reads=reads, kinds=tuple(catalog.kinds))
