"""Exported program in, payload out: the catalog of weights and a modelled trace of every method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps

import torch
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.building.fake_export import computed_buffers, with_computed_buffers
from penstock.passes.building.refusals import refuse_scripted
from penstock.passes.calls.inputs import describe_method, refuse_shared_inputs
from penstock.passes.calls.signature import check_signature
from penstock.passes.graph.nodes import exported_device, without_grad_regions
from penstock.passes.graph.transforms import with_plain_fakes, without_tokens, without_transforms
from penstock.passes.pipeline import Pipeline, declare
from penstock.passes.sparse.calls import numbered_reads, with_operators
from penstock.passes.sparse.chains import Trusts, by_expert
from penstock.passes.sparse.contracts import (
    bytes_of_rounds,
    readers_by_units,
    sparse_reads,
    with_common_units,
)
from penstock.passes.trace import PRESET_CPU, observe
from penstock.passes.training.facts import Training
from penstock.passes.training.rerun import SEGMENT_GRADIENTS
from penstock.passes.weights.lifted import Catalog, Weights, refuse_lost_values, with_own_constants
from penstock.passes.weights.subclasses import parts_of, with_plain_parts
from penstock.passes.weights.usage import Usage, find_usage
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Hardware, Kind, Method, Storage, Trace, Weight
from penstock.schedule.facts.parts import join_parts, read_together
from penstock.schedule.payload.codec import Payload

__all__ = [
    "SEGMENT_GRADIENTS",
    "Training",
    "annotate",
    "bytes_of_rounds",
    "numbered_reads",
    "readers_by_units",
    "with_operators",
]
"""With what other passes take of the rooms of reads by units and of training, which they do not import."""

_KINDS: tuple[Kind, ...] = ("streamable", "returned", "mutable", "produced")
"""The kinds of storages. If methods, or weights of one storage, differ in kind, the last one here counts."""


@dataclass(frozen=True)
class Annotated:
    """A payload, and the torch objects behind it.

    `values[s]` is a tensor whose untyped storage is storage s. `computed` are the FQNs of buffers whose
    values no checkpoint has. `programs` are the programs by method, without regions of another grad mode,
    and `propagated` are their graphs, or copies of these, with fake values. A method that was read from
    storage is in neither of them, but in `codes`: the part of it that runs, as JSON. A program that is
    trained has `training`, and in `trained` the values of its parameters by FQN.
    """

    payload: Payload
    values: tuple[torch.Tensor, ...]
    computed: frozenset[str] = frozenset()
    programs: Mapping[str, ExportedProgram] = field(default_factory=dict)
    propagated: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    codes: Mapping[str, bytes] = field(default_factory=dict)
    training: Training | None = None
    trained: Mapping[str, torch.Tensor] = field(default_factory=dict)


def annotate(
    exported: ExportedProgram | Mapping[str, ExportedProgram], *, hardware: Hardware | str = PRESET_CPU
) -> Payload:
    """Return the weights of a program and modelled traces of its methods. Nothing is written or copied.

    Args:
        exported: A program, or several methods `{name: program}`. Methods are numbered in this order. They
            share weights of equal names, which must be the same memory.
        hardware: The machine that times are modelled for: a preset or a `Hardware`.

    Raises:
        PassError: The program cannot be streamed.
        PlanError: There is no such preset.

    Example:
        >>> [step.name for step in penstock.annotate(exported).traces[0].steps]
        ['linear', 'linear_1', 'linear_2', 'linear_3']
    """
    return annotate_with_values(exported, hardware=hardware).payload


def annotate_with_values(
    exported: ExportedProgram | Mapping[str, ExportedProgram],
    *,
    hardware: Hardware | str = PRESET_CPU,
    propagated: Collection[fx.GraphModule] = (),
    trusts: Trusts | None = None,
) -> Annotated:
    """Does what `annotate` does, and returns the tensors as well, so that they can be written to files.

    `propagated` are those graphs of programs whose values come from `propagate` already. With `trusts`,
    experts that are computed from quantised ones are computed one at a time (`passes/sparse/chains.py`).
    """
    by_name = by_method(exported)
    programs = Pipeline(PASSES)(Programs(by_name, find_hardware(hardware), frozenset(propagated), trusts))
    payload = Payload(
        lowering="none",
        torch=torch.__version__.split("+", maxsplit=1)[0],
        storages=programs.storages,
        weights=programs.weights,
        methods=programs.methods,
        traces=programs.traces,
    )
    graphs = {name: usage.graph_module for name, usage in programs.usage.items()}
    computed = frozenset(computed_buffers(by_name.values()))
    return Annotated(payload, tuple(programs.catalog.values), computed, programs.programs, graphs)


def by_method(exported: object) -> dict[str, ExportedProgram]:
    """Returns the programs by method. Raises PassError for a value that is no program, or no name."""
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
class Programs:
    """Exported programs by method, and what the passes have found out about them so far.

    All methods share one catalog. `storages` are the storages of the catalog with the kinds that their use
    allows. `propagated` are graphs whose values come from `propagate` already: a pass that changes a program
    gives it a graph that is not among them.
    """

    programs: Mapping[str, ExportedProgram]
    hardware: Hardware
    propagated: Collection[fx.GraphModule] = frozenset()
    trusts: Trusts | None = None
    methods: tuple[Method, ...] = ()
    catalog: Catalog = field(default_factory=Catalog)
    held: Mapping[str, Weights] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    storages: tuple[Storage, ...] = ()
    traces: tuple[Trace, ...] = ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights of the catalog, each with all of its parts."""
        return join_parts(self.catalog.weights.values(), _parts(self.programs))


def each(change: Callable[[ExportedProgram], ExportedProgram]) -> Callable[[Programs], Programs]:
    """Returns the pass that applies a pass over one program to every method, with the same declarations."""

    @wraps(change)
    def change_each(programs: Programs) -> Programs:
        return replace(
            programs, programs={name: change(program) for name, program in programs.programs.items()}
        )

    return change_each


@declare(requires=("plain parts", "one grad mode"), ensures=("experts by themselves",))
def compute_experts(programs: Programs) -> Programs:
    """Has experts computed one at a time from quantised ones, by products that are trusted."""
    if programs.trusts is None:
        return programs
    by_name = {name: by_expert(program, programs.trusts) for name, program in programs.programs.items()}
    return replace(programs, programs=by_name)


@declare(requires=("plain parts",), ensures=("own constants",))
def own_constants(programs: Programs) -> Programs:
    """Gives every method constants of its own, by name."""
    return replace(programs, programs=with_own_constants(programs.programs))


@declare(requires=("known signature",), ensures=("methods",))
def number_methods(programs: Programs) -> Programs:
    """Numbers the methods in order, and says what each of them takes."""
    named = enumerate(programs.programs.items())
    return replace(
        programs, methods=tuple(describe_method(program, name, graph) for graph, (name, program) in named)
    )


@declare(requires=("own constants",), ensures=("catalog",))
def collect_weights(programs: Programs) -> Programs:
    """Makes one catalog of the weights of all methods."""
    catalog = Catalog()
    weights_of = {name: catalog.add(program) for name, program in programs.programs.items()}
    weights = {name: Weights(method_weights, catalog.storages) for name, method_weights in weights_of.items()}
    return replace(programs, catalog=catalog, held=weights)


@declare(requires=("catalog", "one grad mode"), ensures=("usage",))
def follow_weights(programs: Programs) -> Programs:
    """Finds which nodes of every method read or write weights through any alias, and what may stream."""
    usage = {
        name: find_usage(program, programs.held[name], propagated=program.graph_module in programs.propagated)
        for name, program in programs.programs.items()
    }
    kinds: list[Kind] = ["streamable"] * len(programs.catalog.values)
    for name, weights in programs.held.items():
        main = exported_device(programs.programs[name].graph_module)
        for weight in weights.held.values():
            s = weight.parts[0].storage
            # A weight on another device than the program's stays there whole.
            kind = usage[name].kinds[s] if torch.device(weight.device).type == main.type else "returned"
            if weight.role == "value":  # which the forward writes, and nothing returns
                kind = "produced"
            kinds[s] = max(kinds[s], kind, key=_KINDS.index)
    for s, fqn in programs.catalog.joined.items():
        if kinds[s] == "mutable":
            raise PassError(
                f"weight {fqn!r} is written, shares its memory with another in one method, and not in "
                "another: export the methods from one model"
            )
    storages = tuple(map(Storage, (storage.nbytes for storage in programs.catalog.storages), kinds))
    return replace(programs, usage=usage, storages=storages)


@declare(requires=("usage", "methods"), ensures=("traces",))
def observe_methods(programs: Programs) -> Programs:
    """Models the trace of every method, which requires that the kinds of all storages are known."""
    modelled = []
    for method in programs.methods:
        usage = programs.usage[method.name]
        sparse = sparse_reads(usage.graph_module, programs.held[method.name], programs.storages)
        modelled.append(observe(usage, programs.storages, method, programs.hardware, sparse))
    traces = tuple(read_together(trace, programs.weights) for trace in modelled)
    return replace(programs, traces=with_common_units(traces))


PASSES: tuple[Callable[[Programs], Programs], ...] = (
    each(refuse_lost_values),
    each(refuse_shared_inputs),
    each(with_plain_fakes),
    each(without_tokens),
    each(with_computed_buffers),
    each(with_plain_parts),
    each(without_transforms),
    each(without_grad_regions),
    each(check_signature),
    compute_experts,
    own_constants,
    number_methods,
    collect_weights,
    follow_weights,
    observe_methods,
)
"""The passes of `annotate`."""


def _parts(programs: Mapping[str, ExportedProgram]) -> dict[str, tuple[str, str]]:
    """The FQN and name of each part, by its tensor's name. Raises PassError if methods differ in them."""
    part_of: dict[str, tuple[str, str]] = {}
    names: dict[str, set[str]] = {}
    for program in programs.values():
        parts_of_weight: dict[str, set[str]] = {}
        for fqn, part in parts_of(program).values():
            parts_of_weight.setdefault(fqn, set()).add(part)
        for fqn, parts in parts_of_weight.items():
            if names.setdefault(fqn, parts) != parts:
                raise PassError(
                    f"weight {fqn!r} has the parts {sorted(names[fqn])} in one method and {sorted(parts)} in "
                    "another: export the methods from one model"
                )
        part_of |= parts_of(program)
    return part_of
