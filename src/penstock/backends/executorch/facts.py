"""Programs as ExecuTorch makes them, as facts: one catalog for all regions, a trace for each method."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch._export.verifier import SpecViolationError
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx._lazy_graph_module import _LazyGraphModule

from penstock.backends.executorch.options import MethodFacts, RegionFacts, Settings
from penstock.passes.annotate import annotate_with_values
from penstock.passes.graph.nodes import copy_program, needed, placeholders_of, tensors_of, writes
from penstock.passes.graph.propagation import fake_inputs, propagate
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.trace import sum_of
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Method, Step, Storage, Trace, Weight, Work
from penstock.schedule.facts.parts import join_parts, read_together
from penstock.schedule.payload.codec import Payload


def operators_of(exported: ExportedProgram) -> list[OpOverload]:
    """The operators that a program calls, in the bodies of control flow too."""
    modules = [module for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    targets = {node.target: None for module in modules for node in module.graph.nodes}
    return [target for target in targets if isinstance(target, OpOverload)]


def as_torch_exports(exported: ExportedProgram) -> ExportedProgram:
    """Returns a program with ATen's operators as `torch.export` makes them: with views, and with numbers.

    ExecuTorch has made copies of views, and tensors of numbers. The graph is changed in place. It writes
    nothing but its buffers, in the end, so a view and a copy have the same values. Orders of dimensions are
    memory formats again, which compilers know. A copy has other strides than the view that it was made of, so
    formats are found after views are back, and a `view` becomes a `reshape`, which takes any strides.
    Inductor takes the scale of an attention for a number.
    """
    numbers = _numbers(exported)
    for node in _operators(exported.graph_module):
        _restore_view(node)
        _restore_number(node, numbers)
    graph_module = exported.graph_module
    _take_values(graph_module, propagate(graph_module, fake_inputs(graph_module)))
    for node in _operators(graph_module):
        _restore_format(node)
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return exported


def _operators(graph_module: fx.GraphModule) -> list[fx.Node]:
    modules = [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return [node for module in modules for node in module.graph.nodes if isinstance(node.target, OpOverload)]


def _restore_view(node: fx.Node) -> None:
    namespace, _, name = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    if node.target is torch.ops.aten.view_copy.default:
        node.target = torch.ops.aten.reshape.default
    elif namespace == "aten" and name.endswith("_copy"):
        overload = node.target._overloadname  # type: ignore[union-attr]
        view = getattr(getattr(torch.ops.aten, name.removesuffix("_copy"), None), overload, None)
        if view is not None and any(returned.alias_info is not None for returned in view._schema.returns):
            node.target = view


def _numbers(exported: ExportedProgram) -> dict[str, torch.Tensor]:
    """What ExecuTorch has made of numbers, by the names of inputs."""
    values = exported.state_dict
    named = exported.graph_signature.inputs_to_buffers.items()
    constants = {name: values[fqn] for name, fqn in named if fqn.startswith(_MADE) and fqn in values}
    return {name: value for name, value in constants.items() if value.dim() == 0}


def _restore_number(node: fx.Node, numbers: Mapping[str, torch.Tensor]) -> None:
    """Put a number where arithmetic with a tensor has a constant that leaves the dtype as it is."""
    if node.target not in _ARITHMETIC:
        return
    value, other = node.args
    if isinstance(value, fx.Node) and isinstance(other, fx.Node) and other.name in numbers:
        number, known = numbers[other.name], value.meta["val"]
        wider = known.dim() > 0 and known.is_floating_point() and number.is_floating_point()
        if number.dtype == known.dtype or wider:
            node.args = value, number.item()


_MADE = "_lifted_tensor_constant"
"""How ExecuTorch names the constants that it makes."""

_ARITHMETIC = tuple(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))


def _take_values(graph_module: fx.GraphModule, propagated: fx.GraphModule) -> None:
    for node, known in zip(graph_module.graph.nodes, propagated.graph.nodes, strict=True):
        if "val" in known.meta:
            node.meta["val"] = known.meta["val"]


def _restore_format(node: fx.Node) -> None:
    namespace, _, name = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    if namespace != "dim_order_ops":
        return
    order = node.kwargs.get("dim_order")
    node.target = _FORMATTED[name]
    other_options = {key: value for key, value in node.kwargs.items() if key != "dim_order"}
    node.kwargs = {**other_options, "memory_format": _memory_format(node, order)}


_FORMATTED = {
    "_to_dim_order_copy": torch.ops.aten._to_copy.default,
    "_clone_dim_order": torch.ops.aten.clone.default,
    "_empty_dim_order": torch.ops.aten.empty.memory_format,
}

_FORMATS = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}


def _memory_format(node: fx.Node, order: object) -> torch.memory_format:
    """The memory format of an order of dimensions; the input's, if torch has no format for the order."""
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(order, list | tuple):
        return torch.preserve_format
    if isinstance(value, torch.Tensor) and value.dim_order() == tuple(order):
        return torch.preserve_format
    if list(order) == sorted(order):
        return torch.contiguous_format
    return _FORMATS.get(tuple(order), torch.preserve_format)


class _Uncompiled(_LazyGraphModule):
    """A graph module whose Python code is generated when it is called, and not to be printed."""

    def __str__(self) -> str:
        return f"a graph module of {len(self.graph.nodes)} nodes"


def compiled_late(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program with the same graph, whose Python code is not generated at every change.

    ExecuTorch changes the graph of a method for each delegate, and torch keeps the code of every version:
    1.5 GB for the 900 delegates of a model of 80 layers.
    """
    graph_module = exported.graph_module
    late = _Uncompiled(graph_module, graph_module.graph)
    late.meta.update(graph_module.meta)
    result = copy.copy(exported)
    result._graph_module = late
    return result


_USE = "_penstock_use_"


def with_own_uses(exported: ExportedProgram, least: int) -> ExportedProgram:
    """Returns the program without operators that write, in which each use has values of its own.

    Copies of fewer than `least` bytes are computed once, and passed on.
    """
    if any(writes(node) for node in exported.graph.nodes):
        exported = _without_writes(exported)
    result = copy_program(exported)
    result._graph_signature = copy.copy(exported.graph_signature)
    _give_own_updates(result)
    _give_own_copies(result, least)
    _give_own_inputs(result)
    result.graph_module.recompile()
    return result


def takes_part(node: fx.Node) -> bool:
    """Tells whether a node can be in a region: it computes tensors from tensors, always alike."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
        return False
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    values = [node.meta.get("val"), *(operand.meta.get("val") for operand in node.all_input_nodes)]
    return all(_is_tensors(value) for value in values)


def _is_tensors(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(element is None or isinstance(element, torch.Tensor) for element in value)
    return isinstance(value, torch.Tensor)


@kept_torch_state()
def _without_writes(exported: ExportedProgram) -> ExportedProgram:
    """What ExecuTorch does next. Raises PassError where torch cannot."""
    try:
        functional: ExportedProgram = exported.run_decompositions({})
    except SpecViolationError as error:
        raise PassError(
            f"torch cannot write this program without operators that write ({str(error).splitlines()[0]}): "
            "where a program writes one value to two buffers, or returns it too, give each a clone() of it"
        ) from error
    return functional


def _give_own_updates(exported: ExportedProgram) -> None:
    """Copies the new value of a buffer where it is an input, or an output for something else as well."""
    graph = exported.graph
    output = graph.output_node()
    values, specs = list(output.args[0]), list(exported.graph_signature.output_specs)
    for position, (value, spec) in enumerate(zip(values, specs, strict=True)):
        if spec.kind is OutputKind.BUFFER_MUTATION and (value.op == "placeholder" or values.count(value) > 1):
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (value,))
            copied.meta = dict(value.meta)
            values[position] = copied
            specs[position] = OutputSpec(spec.kind, TensorArgument(name=copied.name), spec.target)
    output.args = (tuple(values),)
    exported.graph_signature.output_specs = specs


def _give_own_copies(exported: ExportedProgram, least: int) -> None:
    """Computes what is computed from weights alone anew for each node that reads `least` bytes of it."""
    signature = exported.graph_signature
    written = set(signature.buffers_to_mutate.values())
    unwritten = {
        spec.arg.name for spec in signature.input_specs if spec.target and spec.target not in written
    }
    computed = {node for node in placeholders_of(exported.graph) if node.name in unwritten}
    owned: set[fx.Node] = set()
    for node in list(exported.graph.nodes):
        inputs = node.all_input_nodes
        if not inputs or not takes_part(node):
            continue
        if computed.issuperset(inputs):
            computed.add(node)
            continue
        copies = [operand for operand in inputs if operand in computed and operand.op != "placeholder"]
        if sum(tensor.nbytes for operand in copies for tensor in tensors_of(operand.meta["val"])) < least:
            continue
        computing = needed(copies, lambda node: node.op != "placeholder")
        if owned.isdisjoint(computing):
            owned.update(computing)
            continue
        _compute_again(exported.graph, computing, node)
    for node in reversed(list(exported.graph.nodes)):
        if node in computed and node.op != "placeholder" and not node.users:
            exported.graph.erase_node(node)


def _compute_again(graph: fx.Graph, nodes: set[fx.Node], reader: fx.Node) -> None:
    """Copies nodes for one that reads some of them."""
    copies_of: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(reader):
        for node in [node for node in graph.nodes if node in nodes]:
            copies_of[node] = graph.node_copy(node, lambda operand: copies_of.get(operand, operand))
    for node in set(reader.all_input_nodes) & nodes:
        reader.replace_input_with(node, copies_of[node])


def _give_own_inputs(exported: ExportedProgram) -> None:
    graph = exported.graph
    nodes = {node.name: node for node in placeholders_of(graph)}
    specs: list[InputSpec] = []
    values: dict[str, Any] = dict(exported.state_dict)
    for spec in exported.graph_signature.input_specs:
        specs.append(spec)
        if spec.kind is not InputKind.PARAMETER or spec.target not in values:
            continue
        node = nodes[spec.arg.name]
        for number, user in enumerate(list(node.users)[1:], 1):
            if not isinstance(user.target, OpOverload):
                continue
            name = f"{spec.target}{_USE}{number}"
            with graph.inserting_after(node):
                placeholder = graph.placeholder(f"{node.name}{_USE}{number}")
            placeholder.meta = {**node.meta, "val": _shared(node.meta["val"])}
            user.replace_input_with(node, placeholder)
            values[name] = _shared(values[spec.target])
            specs.append(InputSpec(spec.kind, TensorArgument(name=placeholder.name), name, spec.persistent))
    _sort_inputs(graph, {spec.arg.name: position for position, spec in enumerate(specs)})
    exported.graph_signature.input_specs = specs
    exported._state_dict = values


def named_without_use(name: str) -> str:
    """The FQN of the parameter that an input is for."""
    return name.partition(_USE)[0]


def _shared(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        shared = value.detach()
    return nn.Parameter(shared, requires_grad=False) if isinstance(value, nn.Parameter) else shared


def _sort_inputs(graph: fx.Graph, order: Mapping[str, int]) -> None:
    inputs = sorted((node for node in graph.nodes if node.op == "placeholder"), key=lambda n: order[n.name])
    for before, node in pairwise(inputs):
        before.append(node)


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
    """Annotate all regions as one program, and join methods. Raises PassError for one without weights."""
    refuse_without_weights(regions)
    annotated = annotate_with_values(
        {region.name: region.program for region in regions}, hardware=settings.hardware
    )
    storages = tuple(_kind(storage) for storage in annotated.payload.storages)
    tensors = {weight.fqn: weight for weight in annotated.payload.tensors}
    parts = {part.name: (part.fqn, part.part) for facts in methods.values() for part in facts.parts}
    named = _named(tensors, regions)
    weights = join_parts([*named.values(), *aliases_of(named, methods)], parts)
    traces: list[Trace] = []
    steps: dict[str, tuple[int, int]] = {}
    of_region = {trace.method: trace for trace in annotated.payload.traces}
    for graph, name in enumerate(methods):
        of_method = [region for region in regions if region.method == name]
        trace, ranges = _joined(
            graph, name, [(region, of_region[region.name]) for region in of_method], storages
        )
        traces.append(read_together(with_times(trace, settings.hardware), weights))
        steps |= ranges
    payload = Payload(
        lowering="executorch",
        torch=annotated.payload.torch,
        storages=storages,
        weights=weights,
        methods=tuple(
            Method(name, graph, facts.inputs, facts.symbols)
            for graph, (name, facts) in enumerate(methods.items())
        ),
        traces=tuple(traces),
        hardware=settings.hardware,
    )
    return Facts(payload, annotated.values, steps, tensors)


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
        region, _, own_name = name.partition(".")
        constant = weight.role == "constant" and region in methods
        fqn = f"{methods[region]}.{own_name}" if constant else named_without_use(name)
        known = named.setdefault(fqn, replace(weight, fqn=fqn))
        if known.parts != weight.parts:
            named[name] = weight
    return named


def aliases_of(by_fqn: Mapping[str, Weight], methods: Mapping[str, MethodFacts]) -> list[Weight]:
    """The weights that are other names of known ones."""
    aliases: dict[str, Weight] = {}
    for facts in methods.values():
        memory: dict[int, Weight] = {}
        for alias in facts.aliases:
            if alias.fqn in by_fqn:
                memory.setdefault(alias.part.storage, by_fqn[alias.fqn])
        for alias in facts.aliases:
            weight = memory.get(alias.part.storage)
            if weight is not None and alias.fqn not in by_fqn:
                part = replace(alias.part, storage=weight.parts[0].storage)
                aliases[alias.fqn] = Weight(alias.fqn, alias.role, weight.device, (part,))
    return list(aliases.values())


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
