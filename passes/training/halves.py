"""The two programs of training: forward and backward as exported programs, and how values go between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._export.verifier import TrainingIRVerifier
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from penstock.passes.activations import Activations
from penstock.passes.calls.signature import output_names, signature_of
from penstock.passes.graph.nodes import copy_graph_module, placeholders_of, size_hint
from penstock.passes.graph.propagation import is_propagated, storages_of
from penstock.passes.probes import STORE
from penstock.passes.training.facts import (
    BACKWARD,
    FORWARD,
    RUNGS,
    SEGMENTS,
    TRAINABLE,
    Backward,
    Keeping,
    Layout,
    Rung,
    Training,
)
from penstock.passes.training.joint import Joint, codes, is_equal, result_positions, trace_joint
from penstock.passes.training.partition import Partition, keep, layers, partition
from penstock.passes.training.segments import segment_joint
from penstock.passes.weights.lifted import KEPT, Catalog, Weights, part_of, tensor_in
from penstock.passes.weights.subclasses import parts_of
from penstock.schedule.facts.errors import PassError


def alone(exported: ExportedProgram, parameters: Sequence[str]) -> ExportedProgram:
    """Returns a program that computes the same, and takes parameters, by FQN, behind its own inputs.

    Its graph is that of the program, so it calls what the program calls where nothing is differentiated.
    Raises PassError for a parameter that the program does not have.
    """
    graph_module = copy_graph_module(exported.graph_module)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    specs = list(exported.graph_signature.input_specs)
    last = nodes[specs[-1].arg.name]
    for fqn in parameters:
        spec = next((s for s in specs if s.kind is InputKind.PARAMETER and s.target == fqn), None)
        if spec is None:
            raise PassError(f"the program has no parameter {fqn}: export the model in which it is trained")
        specs.remove(spec)
        specs.append(InputSpec(InputKind.USER_INPUT, spec.arg, None))
        if nodes[spec.arg.name] is not last:
            last.append(nodes[spec.arg.name])
            last = nodes[spec.arg.name]
    names, called, result = call_with(exported, [*parameters])
    targets = {str(spec.target) for spec in specs}
    (_, in_spec), (_, out_spec) = pytree.tree_flatten(called), pytree.tree_flatten(result)
    program = ExportedProgram(
        graph_module,
        graph_module.graph,
        ExportGraphSignature(specs, list(exported.graph_signature.output_specs)),
        {name: value for name, value in exported.state_dict.items() if name in targets},
        exported.range_constraints,
        [ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec, names))],
        None,
        {name: value for name, value in exported.constants.items() if name in targets},
        verifiers=exported.verifiers,
    )
    program._guards_code = exported._guards_code
    program.graph_module.meta.update(exported.graph_module.meta)  # parts of weights, and values of buffers
    return program


def call_with(exported: ExportedProgram, trained: Sequence[Any]) -> tuple[list[str] | None, Any, Any]:
    """The names of the arguments of a program that is given parameters, its call, and the program's result.

    The last two are trees, whose leaves mean nothing. Raises PassError for a program that has an argument of
    the name by which they are given.
    """
    spec = exported.call_spec
    args, kwargs = pytree.tree_unflatten(list(range(spec.in_spec.num_leaves)), spec.in_spec)
    if TRAINABLE in kwargs:
        raise PassError(
            f"the program takes an argument {TRAINABLE!r}, by which penstock gives parameters: rename it"
        )
    call = exported.module_call_graph[0].signature
    names = call and call.forward_arg_names
    result = pytree.tree_unflatten(list(range(spec.out_spec.num_leaves)), spec.out_spec)
    return names and [*names, TRAINABLE], (args, {**kwargs, TRAINABLE: [*trained]}), result


def is_same(first: ExportedProgram, other: ExportedProgram) -> bool:
    """Tells whether two exports of a module are one program; it is certain only where it says so."""
    return (
        str(first.graph_signature) == str(other.graph_signature)
        and codes(first.graph_module) == codes(other.graph_module)
        and first.constants.keys() == other.constants.keys()
        and all(is_equal(value, other.constants[name]) for name, value in first.constants.items())
    )


SMALLEST = 4096
"""The bytes from which on a value gets a place: less than a page is not worth a step of its own."""


@dataclass(frozen=True)
class Slots:
    """The places of kept values, by the nodes of a joint graph.

    `stored` has, for each node whose value is the whole of a place, the name of that place's tensor; `read`
    has the names of the tensors by which the backward reads places, by the nodes of the same value.
    `tensors` are all of them by name, without values; those of one place share their memory.
    """

    stored: Mapping[fx.Node, str]
    read: Mapping[fx.Node, str]
    tensors: Mapping[str, torch.Tensor]


NO_SLOTS = Slots({}, {}, {})


def find_slots(joint: Joint, parts: Partition, prefix: str) -> Slots:
    """Gives places to the kept values of static size that share no memory with what a caller sees.

    Names are `prefix` with a number.
    """
    seen = _seen_by_callers(joint)
    whole: dict[int, fx.Node] = {}
    for node in parts.early:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and _is_whole(value) and not seen.intersection(storages_of(value)):
            whole.setdefault(storages_of(value)[0], node)
    stored: dict[fx.Node, str] = {}
    read: dict[fx.Node, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    memory: dict[int, torch.Tensor] = {}

    def add(node: fx.Node, storage: int) -> str:
        value = node.meta["val"]
        if storage not in memory:
            nbytes = value.untyped_storage().nbytes()
            memory[storage] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        name = f"{prefix}{len(tensors)}"
        tensors[name] = tensor_in(memory[storage], part_of(value, 0))
        return name

    for node in parts.kept:
        value = node.meta["val"]
        storage = storages_of(value)[0] if isinstance(value, torch.Tensor) else None
        if storage not in whole or not _is_static(value):
            continue
        assert storage is not None
        read[node] = add(node, storage)
        base = whole[storage]
        if base not in stored:
            same_layout = part_of(node.meta["val"], 0) == part_of(base.meta["val"], 0)
            stored[base] = read[node] if same_layout else add(base, storage)
    return _without_mixed(Slots(stored, read, tensors), parts)


def _seen_by_callers(joint: Joint) -> set[int]:
    """The memory of inputs, results, gradients, and of what the program writes back."""
    inputs = placeholders_of(joint.graph_module.graph)
    results = [node for node in (*joint.results, *joint.written.values()) if node is not None]
    nodes = [*inputs, *results, *joint.gradients.values()]
    return {storage for node in nodes for storage in storages_of(node.meta.get("val"))}


def _is_whole(value: torch.Tensor) -> bool:
    """Tells whether a tensor of static size has each byte of its memory, once."""
    if not _is_static(value) or value.layout is not torch.strided:
        return False
    nbytes = value.untyped_storage().nbytes()
    dense = torch.empty_like(value, device="meta").stride() == value.stride()
    return nbytes >= SMALLEST and dense and not value.storage_offset() and value.nbytes == nbytes


def _is_static(value: torch.Tensor) -> bool:
    sizes = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return all(isinstance(size, int) for size in sizes)


def _without_mixed(slots: Slots, parts: Partition) -> Slots:
    """Leaves out the places of memory of which the backward also needs a tensor that has none."""
    elsewhere = {s for node in parts.kept if node not in slots.read for s in storages_of(node.meta["val"])}

    def allowed(named: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
        return {
            node: name for node, name in named.items() if storages_of(node.meta["val"])[0] not in elsewhere
        }

    stored, read = allowed(slots.stored), allowed(slots.read)
    names = {*stored.values(), *read.values()}
    return Slots(stored, read, {name: tensor for name, tensor in slots.tensors.items() if name in names})


Losses = Collection[str] | Collection[Collection[str]]
"""The names of results that gradients come from together, or several sets of them."""

NOWHERE: Mapping[fx.Node, fx.Node] = MappingProxyType({})


_AGAIN = {"keep": keep, "layers": layers, "segments": keep}
"""What the backward computes again on each rung."""


@dataclass(frozen=True)
class Halves:
    """The forwards and backwards of a program as programs of their own, by method, and what joins them."""

    programs: Mapping[str, ExportedProgram]
    training: Training

    @property
    def propagated(self) -> list[fx.GraphModule]:
        """The graphs of the programs whose values are those that `propagate` would give them."""
        graphs = (program.graph_module for program in self.programs.values())
        return [graph for graph in graphs if is_propagated(graph)]

    @property
    def forward(self) -> ExportedProgram:
        """The forward of the first rung."""
        return self.programs[self.training.rungs[0].forward]

    @property
    def backwards(self) -> tuple[ExportedProgram, ...]:
        """The backwards of the first rung."""
        return tuple(self.programs[backward.method] for backward in self.training.rungs[0].backwards)


def divide(
    exported: ExportedProgram,
    trainable: Collection[str],
    losses: Losses | None = None,
    inputs: Collection[str] | None = None,
    rungs: Sequence[Keeping] = RUNGS[:1],
    *,
    spill: bool = False,
) -> Halves:
    """Returns forward and backward of a program, for the gradients of its parameters `trainable`, by FQN.

    There are methods for each of `rungs`; one that takes no less memory than those before it is left out.
    The rung "segments" stands alone: its backward runs autograd, on one segment of the forward after another.
    Where there are several sets of results, all is kept, and the first of `rungs` stands for that.
    The inputs of the names `inputs` have gradients too; None stands for those that required grad when the
    program was exported. Gradients come from the results `losses`, by name, or from one of several sets of
    them, each of which has a backward. None stands for the floating-point numbers of no dimension among the
    results, or for all floating-point tensors if there is no such number. With `spill`, what the forward
    keeps gets places among the weights where it can. Raises PassError where autograd cannot trace the
    program, if nothing has a gradient, for a parameter that shares its memory, for sets that are equal, and
    for several sets with `spill`.
    """
    catalog = Catalog()
    weights = Weights(catalog.add(exported), catalog.storages)
    specs = exported.graph_signature.input_specs
    trained = [spec for spec in specs if spec.kind is InputKind.PARAMETER and spec.target in trainable]
    leaves = [spec for spec in specs if spec.kind is InputKind.USER_INPUT] + trained
    names = {spec.arg.name for spec in trained}
    names.update(_inputs_with_grad(exported) if inputs is None else inputs)
    _refuse_shared(weights, trained)
    signature = signature_of(exported)
    results, trace = output_names(signature), segment_joint if SEGMENTS in rungs else trace_joint
    joints = trace(exported, weights, names, _chosen(exported, results, losses))
    if not all(joint.gradients for joint in joints):
        raise PassError("no result of the program depends on what is trained: name other parameters")
    leaf_of = [k for k in range(signature.results) if k not in signature.constants]
    named = dict(zip(leaf_of, results, strict=True))
    if spill and len(joints) > 1:
        raise PassError("spill=True is for one set of losses=: leave it out, or compile each set by itself")
    divided = _Divided(exported, joints, leaves, weights.held.keys() - names, leaf_of, spill)
    programs: dict[str, ExportedProgram] = {}
    rungs_made: list[Rung] = []
    least = float("inf")
    for name in rungs if len(joints) == 1 or SEGMENTS in rungs else RUNGS[:1]:
        rung, programs_of_rung = divided.on(name, f"_{name}" if rungs_made else "")
        _refuse_equal([backward.tangents for backward in rung.backwards], named)
        if (peak := _peak(rung, programs_of_rung)) < least:
            least, rungs_made = peak, [*rungs_made, rung]
            programs |= programs_of_rung
    left_out = frozenset.intersection(*(joint.left_out for joint in joints))
    of_calls = (k for k, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT)
    training = Training(
        tuple(str(spec.target) for spec in trained),
        tuple(rungs_made),
        tuple(named.get(k, "") for k in range(signature.results)),
        tuple(leaf_of[k] for k in sorted(left_out)),
        layouts=tuple(_layout(joints[0], k) for k in of_calls),
    )
    return Halves(programs, training)


def _layout(joint: Joint, number: int) -> Layout | None:
    """How an input of the program lies, None for one that has gaps, or is no tensor."""
    node = joint.inputs[number]
    value = None if node is None else node.meta["val"]
    if node is None or not isinstance(value, torch.Tensor):
        return None
    strides = [*map(size_hint, value.stride())]
    order = sorted(range(value.dim()), key=lambda k: -strides[k])
    expected = 1
    for k in reversed(order):
        if size_hint(value.shape[k]) != 1 and strides[k] != expected:
            return None
        expected *= size_hint(value.shape[k])
    inexact = value.is_floating_point() or value.is_complex()
    return Layout(node.name, tuple(order), not inexact and number not in joint.written)


def _free_prefix(exported: ExportedProgram) -> str:
    """What the names of kept values begin with, and no name of the program."""
    prefix = "kept."
    while any(str(spec.target).startswith(prefix) for spec in exported.graph_signature.input_specs):
        prefix = f"_{prefix}"
    return prefix


@dataclass(frozen=True)
class _Divided:
    """A program, its joint graphs, and the leaves of its forward. `leaf_of[k]` is the leaf of result k.

    With `spill` what the forward keeps has places among the weights.
    """

    exported: ExportedProgram
    joints: Sequence[Joint]
    leaves: Sequence[InputSpec]
    frozen: Collection[str]
    leaf_of: Sequence[int]
    spill: bool

    def on(self, name: Keeping, suffix: str) -> tuple[Rung, dict[str, ExportedProgram]]:
        """A rung, whose methods end with a suffix, and its programs."""
        exported, joints, leaves = self.exported, self.joints, self.leaves
        pool: dict[object, fx.Node] = {}
        again = _AGAIN[name]
        parts = [partition(joint, self.frozen, again(joint, self.frozen), pool) for joint in joints]
        slots = find_slots(joints[0], parts[0], _free_prefix(exported)) if self.spill else NO_SLOTS
        returned = tuple(node for node in _returned(joints, parts) if node not in slots.read)
        specs = exported.graph_signature.input_specs
        order = {spec.arg.name: k for k, spec in enumerate(leaves)}
        backwards = []
        for number, (joint, part) in enumerate(zip(joints, parts, strict=True)):
            taken = [order[node.name] for node in part.inputs if node.name in order]
            backwards.append(
                Backward(
                    f"{BACKWARD}_{number}" if number else BACKWARD + suffix,
                    (*taken, *(-1 - returned.index(node) for node in part.kept if node not in slots.read)),
                    tuple(self.leaf_of[k] for k, node in enumerate(joint.tangents) if node is not None),
                    tuple(order[specs[k].arg.name] for k in joint.gradients),
                )
            )
        rung = Rung(name, FORWARD + suffix, tuple(backwards))
        programs = [_forward(exported, joints[0], replace(parts[0], kept=returned), slots, leaves)]
        programs += [_backward(exported, *pair, slots, leaves) for pair in zip(joints, parts, strict=True)]
        return rung, dict(zip(rung.methods, programs, strict=True))


def _peak(rung: Rung, programs: Mapping[str, ExportedProgram]) -> int:
    """The most bytes that the methods of a rung take, at the exported sizes."""
    return max(
        Activations.of(program, program.graph_module, rung.made(method)).peak()
        for method, program in programs.items()
    )


def _returned(joints: Sequence[Joint], parts: Sequence[Partition]) -> tuple[fx.Node, ...]:
    """The values that the forward returns for all backwards."""
    values = tuple(dict.fromkeys(node for part in parts for node in part.kept))
    early = {*parts[0].early, *placeholders_of(joints[0].graph_module.graph)}
    if not early.issuperset(values):
        raise PassError("the sets of losses= need values that one forward does not have: compile them apart")
    return values


def _refuse_equal(sets: Sequence[tuple[int, ...]], named: Mapping[int, str]) -> None:
    """Raises PassError for two equal sets of results that gradients would come from."""
    for names in sets:
        if sets.count(names) > 1:
            results = " and ".join(named[k] for k in names)
            raise PassError(
                f"losses= has two sets whose gradients come from {results}: leave one of them out"
            )


def _refuse_shared(weights: Weights, trained: Sequence[InputSpec]) -> None:
    """Raises PassError for a parameter to train in whose memory another weight lies.

    It would be two memories, of which one would not be trained.
    """
    sharing: dict[int, list[str]] = {}
    for name in weights.held:
        sharing.setdefault(weights.storage_of(name), []).append(name)
    for spec in trained:
        for other in sharing[weights.storage_of(spec.arg.name)]:
            if other != spec.arg.name:
                raise PassError(
                    f"{spec.target} is to be trained and shares its memory with {weights.held[other].fqn}: "
                    "leave it out of trainable=, or give it a copy of its own"
                )


def _chosen(exported: ExportedProgram, names: Sequence[str], losses: Losses | None) -> list[list[int]]:
    """The numbers of the results that gradients come from, for each set."""
    if losses is not None:
        plain = all(isinstance(loss, str) for loss in losses)
        sets: Any = [losses] if plain else losses
        if isinstance(losses, str) or any(isinstance(loss, str) or not {*loss} <= {*names} for loss in sets):
            raise PassError(
                f"losses={losses!r}: expected a list of results, which are {', '.join(names)}, or a list of "
                "such lists"
            )
        return [[k for k, name in enumerate(names) if name in chosen] for chosen in sets]
    returned: Any = exported.graph.output_node().args[0]
    values = [returned[position].meta["val"] for position in result_positions(exported)]
    floats = [
        k for k, value in enumerate(values) if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    return [[k for k in floats if not values[k].dim()] or floats]


def _inputs_with_grad(exported: ExportedProgram) -> list[str]:
    example = pytree.tree_leaves(exported.example_inputs)
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    pairs = zip(specs, example, strict=True)
    return [s.arg.name for s, value in pairs if isinstance(value, torch.Tensor) and value.requires_grad]


def _forward(
    exported: ExportedProgram, joint: Joint, parts: Partition, slots: Slots, leaves: Sequence[InputSpec]
) -> ExportedProgram:
    specs = exported.graph_signature.input_specs
    forward = _Program(exported, joint, slots)
    leaf_names = {spec.arg.name for spec in leaves}
    for spec in specs:
        if spec.arg.name not in leaf_names:
            forward.add_input(spec)
    places = {node: forward.add_slot(node, name) for node, name in slots.stored.items()}
    for spec in leaves:
        forward.add_input(spec, trained=True)
    forward.add_nodes(parts.early, places)
    for number, node in joint.written.items():
        forward.add_written(specs[number], node)
    results = iter(joint.results)
    for result in exported.graph_signature.output_specs:
        if result.kind is OutputKind.USER_OUTPUT:
            forward.add_result(result.arg if isinstance(result.arg, ConstantArgument) else next(results))
    for node in parts.kept:
        forward.add_result(node)
    trained = [spec for spec in leaves if spec.kind is not InputKind.USER_INPUT]
    names, called, result = call_with(exported, trained)
    program = forward.program(names, called, (result, [*parts.kept]))
    program._guards_code = exported._guards_code
    return program


def _backward(
    exported: ExportedProgram, joint: Joint, parts: Partition, slots: Slots, leaves: Sequence[InputSpec]
) -> ExportedProgram:
    program = _Program(exported, joint, slots, parts.same)
    leaf_names = {spec.arg.name for spec in leaves}
    weights = _with_all_parts(exported, {node.name for node in parts.inputs} - leaf_names)
    for spec in exported.graph_signature.input_specs:
        if spec.arg.name in weights:
            program.add_input(spec)
    for node, name in slots.read.items():
        program.add_value(node, name)
    given_again = [node for node in parts.inputs if node.name in leaf_names]
    kept_nodes = [*given_again, *(node for node in parts.kept if node not in slots.read)]
    tangents = [node for node in joint.tangents if node is not None]
    for node in (*kept_nodes, *tangents):
        program.add_value(node)
    program.add_nodes(parts.late)
    for node in joint.gradients.values():
        program.add_result(node)
    return program.program(["kept", "tangents"], ((kept_nodes, tangents), {}), [*joint.gradients])


def _with_all_parts(exported: ExportedProgram, names: set[str]) -> set[str]:
    """The names of inputs, and of those that are parts of the same weights, which are planned together."""
    parts = parts_of(exported)
    owners = {
        spec.arg.name: parts[str(spec.target)][0]
        for spec in exported.graph_signature.input_specs
        if str(spec.target) in parts
    }
    taken = {owners[name] for name in names if name in owners}
    return names | {name for name, owner in owners.items() if owner in taken}


class _Program:
    """An exported program that is made of nodes of a joint graph; `same` has another node of equal value."""

    def __init__(
        self,
        exported: ExportedProgram,
        joint: Joint,
        slots: Slots,
        same: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
    ) -> None:
        self._exported, self._joint, self._slots, self._same = exported, joint, slots, same
        self._graph = fx.Graph()
        self._given = {node.name: node for node in placeholders_of(exported.graph)}
        self._joined = {node.name: node for node in placeholders_of(joint.graph_module.graph)}
        self._here: dict[fx.Node, fx.Node] = {}
        self._inputs: list[InputSpec] = []
        self._outputs: list[OutputSpec] = []
        self._returned: list[Any] = []

    def add_input(self, spec: InputSpec, *, trained: bool = False) -> None:
        """Adds an input of the original program; one that is `trained` is given with each call."""
        name = spec.arg.name
        placeholder = self._graph.placeholder(name)
        placeholder.name = name  # FX itself would rename what is a builtin of Python, such as `input`
        joined = self._joined.get(name, self._given[name])  # it has tensors and sizes only
        placeholder.meta = {"val": joined.meta.get("val")}
        self._here[joined] = placeholder
        self._inputs.append(InputSpec(InputKind.USER_INPUT, spec.arg, None) if trained else spec)

    def add_value(self, node: fx.Node, slot: str | None = None) -> None:
        """Adds an input that is a value of the joint graph, given with each call or in its slot."""
        if slot is not None:
            self._here[node] = self.add_slot(node, slot)
            return
        self._here[node] = self._graph.placeholder(node.name)
        self._here[node].meta = {"val": node.meta["val"]}
        self._inputs.append(InputSpec(InputKind.USER_INPUT, _argument(self._here[node]), None))

    def add_slot(self, node: fx.Node, fqn: str) -> fx.Node:
        """Adds the place of a kept value, which lies among the weights, and returns its node."""
        slot = self._graph.placeholder(fqn.replace(".", "_"))
        slot.meta = {"val": node.meta["val"]}
        spec = InputSpec(InputKind.BUFFER, TensorArgument(slot.name), fqn, persistent=False)
        self._inputs.append(spec)
        return slot

    def add_nodes(self, nodes: Iterable[fx.Node], places: Mapping[fx.Node, fx.Node] = NOWHERE) -> None:
        """Adds nodes, and behind each that has one of the `places` another, which stores its value there."""
        for node in nodes:
            self._here[node] = self._graph.node_copy(node, self._value)
            if node in places:
                self._graph.call_function(STORE, (places[node], self._here[node], -1, -1))

    def add_written(self, spec: InputSpec, node: fx.Node) -> None:
        """Adds the new value of an input that the program writes to."""
        weight = spec.kind is not InputKind.USER_INPUT
        kind = OutputKind.BUFFER_MUTATION if weight else OutputKind.USER_INPUT_MUTATION
        self._add_output(kind, node, str(spec.target) if weight else spec.arg.name)

    def add_result(self, result: Any) -> None:
        """Adds a node's value, or a constant, to what is returned."""
        self._add_output(OutputKind.USER_OUTPUT, result, None)

    def _add_output(self, kind: OutputKind, result: Any, target: str | None) -> None:
        value = self._value(result) if isinstance(result, fx.Node) else result.value
        self._returned.append(value)
        argument = _argument(value) if isinstance(result, fx.Node) else result
        self._outputs.append(OutputSpec(kind, argument, target))

    def _value(self, node: fx.Node) -> fx.Node:
        return self._here[self._same.get(node, node)]

    def program(self, names: list[str] | None, called_with: Any, returning: Any) -> ExportedProgram:
        """The program, given the names of its arguments, and its call and its result as trees."""
        self._graph.output(tuple(self._returned))
        targets = {str(spec.target) for spec in self._inputs}
        old = self._exported
        _, in_spec = pytree.tree_flatten(called_with)
        _, out_spec = pytree.tree_flatten(returning)
        constants = {**old.constants, **self._slots.tensors}
        program = ExportedProgram(
            self._joint.graph_module,
            self._graph,
            ExportGraphSignature(self._inputs, self._outputs),
            {name: _without_grad(value) for name, value in old.state_dict.items() if name in targets},
            old.range_constraints,
            [ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec, names))],
            None,
            {name: value for name, value in constants.items() if name in targets},
            verifiers=[TrainingIRVerifier] if self._slots.stored else None,  # which allows writing to slots
        )
        program._guards_code = []
        program.graph_module.meta.update(old.graph_module.meta)  # parts of weights, and values of buffers
        program.graph_module.meta[KEPT] = frozenset(self._slots.tensors)
        return program


def _without_grad(value: Any) -> Any:
    """The weight as the joint graph was traced with it: autograd records nothing of it."""
    return nn.Parameter(value.detach(), requires_grad=False) if isinstance(value, nn.Parameter) else value


def _argument(node: fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, torch.SymInt):
        return SymIntArgument(node.name)
    return SymFloatArgument(node.name) if isinstance(value, torch.SymFloat) else TensorArgument(node.name)
