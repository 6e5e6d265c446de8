"""Exported program in, payload out: the catalog of weights and a modelled trace of every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps

import torch
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.building.fake_export import with_computed_buffers
from penstock.passes.building.refusals import refuse_scripted
from penstock.passes.calls.inputs import describe_method
from penstock.passes.calls.signature import check_signature
from penstock.passes.graph.grad_regions import without_grad_regions
from penstock.passes.graph.retarget import exported_device
from penstock.passes.pipeline import Pipeline, declare
from penstock.passes.trace import PRESET_CPU, observe
from penstock.passes.weights.lifted import (
    Weights,
    find_weights,
    refuse_lost_values,
    storage_identity,
    with_own_constants,
)
from penstock.passes.weights.subclasses import parts_of, with_plain_parts
from penstock.passes.weights.usage import Usage, find_usage
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Hardware, Kind, Method, Storage, Trace, Weight
from penstock.schedule.facts.parts import join_parts, read_together
from penstock.schedule.payload.codec import Payload


@dataclass(frozen=True)
class Annotated:
    """A payload, and the torch objects behind it.

    `values[s]` is a tensor whose untyped storage is storage s; `programs` are the programs by method,
    without regions of another grad mode, and `propagated` are copies of their graphs, with fake values.
    """

    payload: Payload
    values: tuple[torch.Tensor, ...]
    programs: dict[str, ExportedProgram]
    propagated: dict[str, fx.GraphModule]


def annotate(
    exported: ExportedProgram | Mapping[str, ExportedProgram], *, hardware: Hardware = PRESET_CPU
) -> Payload:
    """Returns catalog and modelled traces of a program, or of several methods {name: program}.

    Nothing is written and nothing copied. Methods are numbered in order; they share the weights of
    equal names, which must be the same memory. `hardware` gives the rates of the model.
    Raises PassError for a program that cannot be streamed.
    """
    return annotate_with_values(exported, hardware=hardware).payload


def annotate_with_values(
    exported: ExportedProgram | Mapping[str, ExportedProgram], *, hardware: Hardware = PRESET_CPU
) -> Annotated:
    """Does what `annotate` does, and keeps the tensors, for whoever writes them to files."""
    found = Pipeline(PASSES)(Programs(_by_method(exported), hardware))
    payload = Payload(
        lowering="none",
        torch=torch.__version__.split("+", maxsplit=1)[0],
        storages=found.catalog.storages,
        weights=found.catalog.weights,
        methods=found.methods,
        traces=found.traces,
    )
    propagated = {name: usage.graph_module for name, usage in found.usage.items()}
    return Annotated(payload, found.catalog.values, dict(found.programs), propagated)


def _by_method(exported: object) -> dict[str, ExportedProgram]:
    """Returns the programs by method; raises PassError for what is no exported program, or no name."""
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
    if not exported:
        raise PassError("there is no method to annotate: give an exported program, or {name: program}")
    return dict(exported)


@dataclass(frozen=True)
class Catalog:
    """The weights and storages of all methods.

    `values[s]` is a tensor whose untyped storage is storage s. `numbers` has by method the number here of
    each storage that the method has.
    """

    weights: tuple[Weight, ...] = ()
    storages: tuple[Storage, ...] = ()
    values: tuple[torch.Tensor, ...] = ()
    numbers: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Programs:
    """Exported programs by method, and what the passes have found out about them so far."""

    programs: Mapping[str, ExportedProgram]
    hardware: Hardware
    methods: tuple[Method, ...] = ()
    weights: Mapping[str, Weights] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    catalog: Catalog = Catalog()
    traces: tuple[Trace, ...] = ()


def each(change: Callable[[ExportedProgram], ExportedProgram]) -> Callable[[Programs], Programs]:
    """Returns the pass that applies a pass over one program to every method, with the same declarations."""

    @wraps(change)
    def change_each(found: Programs) -> Programs:
        return replace(found, programs={name: change(one) for name, one in found.programs.items()})

    return change_each


@declare(requires=("plain parts",), ensures=("own constants",))
def own_constants(found: Programs) -> Programs:
    """Gives every method constants of its own, by name."""
    return replace(found, programs=with_own_constants(found.programs))


@declare(requires=("known signature",), ensures=("methods",))
def number_methods(found: Programs) -> Programs:
    """Numbers the methods in order, and says what each of them takes."""
    named = enumerate(found.programs.items())
    return replace(found, methods=tuple(describe_method(one, name, graph) for graph, (name, one) in named))


@declare(requires=("own constants", "one grad mode"), ensures=("usage",))
def follow_weights(found: Programs) -> Programs:
    """Finds the weights of every method, and which nodes read or write them through any alias."""
    weights = {name: find_weights(one) for name, one in found.programs.items()}
    usage = {name: find_usage(one, weights[name]) for name, one in found.programs.items()}
    return replace(found, weights=weights, usage=usage)


@declare(requires=("usage",), ensures=("catalog",))
def join_methods(found: Programs) -> Programs:
    """Makes one catalog of the weights of all methods, and joins the parts of each weight."""
    joined = _Joined()
    numbers = {
        name: joined.add(one, found.weights[name], found.usage[name].kinds)
        for name, one in found.programs.items()
    }
    joined.check()
    weights = join_parts(joined.weights.values(), _parts(found.programs))
    storages = tuple(map(Storage, joined.nbytes, joined.kinds))
    return replace(found, catalog=Catalog(weights, storages, tuple(joined.values), numbers))


@declare(requires=("catalog", "methods"), ensures=("traces",))
def observe_methods(found: Programs) -> Programs:
    """Models the trace of every method, once it is known what any method writes."""
    traces = []
    for method in found.methods:
        usage = _in_catalog(found.usage[method.name], found.catalog.numbers[method.name], found.catalog)
        trace = observe(usage, method=method, hardware=found.hardware)
        traces.append(read_together(trace, found.catalog.weights))
    return replace(found, traces=tuple(traces))


PASSES: tuple[Callable[[Programs], Programs], ...] = (
    each(refuse_lost_values),
    each(with_computed_buffers),
    each(with_plain_parts),
    each(without_grad_regions),
    each(check_signature),
    own_constants,
    number_methods,
    follow_weights,
    join_methods,
    observe_methods,
)
"""What `annotate` does."""


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


class _Joined:
    """Weights and storages of all methods; grows while they are added."""

    def __init__(self) -> None:
        self.weights: dict[str, Weight] = {}
        self.values: list[torch.Tensor] = []
        self.nbytes: list[int] = []
        self.kinds: list[Kind] = []
        self._numbers: dict[tuple[str, int], int] = {}
        # Where one method has two storages, equal, of what is one elsewhere.
        self._joined: dict[int, str] = {}

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


def _in_catalog(usage: Usage, numbers: Mapping[int, int], catalog: Catalog) -> Usage:
    """Returns the usage in the catalog's numbers; reads of storages without bytes are none."""
    reads = {
        node: tuple(sorted({n for read in read_here if catalog.storages[n := numbers[read]].nbytes}))
        for node, read_here in usage.reads.items()
    }
    return replace(usage, reads=reads, kinds=tuple(storage.kind for storage in catalog.storages))
