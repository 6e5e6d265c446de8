"""The code of regions, for the kernels of ExecuTorch, and of whole methods, compiled by AOTInductor."""

from __future__ import annotations

import copy
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.reinplace import reinplace_pass
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from penstock.backends.executorch.facts import SMALL, Facts, RegionProgram, aliases_of, refuse_without_weights
from penstock.backends.executorch.files import COMPILED
from penstock.backends.executorch.options import MethodFacts, Settings
from penstock.passes.annotate import annotate_with_values
from penstock.passes.lowering.archive import PACKAGE
from penstock.passes.lowering.inductor import Compiled, lower, write_package
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Method
from penstock.schedule.facts.parts import join_parts, read_together
from penstock.schedule.payload.codec import ProgramFile

_log = logging.getLogger(__name__)


def compile_methods(
    regions: Sequence[RegionProgram], methods: Mapping[str, MethodFacts], settings: Settings
) -> tuple[Facts, bytes]:
    """Compiles methods of one region each; returns their facts, and the package with all of their code.

    The steps of a trace are those of the compiled code, in the order in which it reads weights. Raises
    PassError for a method without weights, and for one that AOTInductor cannot compile.
    """
    refuse_without_weights(regions)
    programs = {region.method: region.program for region in regions}
    annotated = annotate_with_values(programs, hardware=settings.hardware)
    compiled = lower(annotated.payload, annotated.programs, resident_below=max(SMALL, settings.least))
    code = _package(compiled)
    digest = sha256(code).hexdigest()
    tensors = {weight.fqn: weight for weight in compiled.payload.tensors}
    parts = {part.name: (part.fqn, part.part) for facts in methods.values() for part in facts.parts}
    weights = join_parts([*tensors.values(), *aliases_of(tensors, methods)], parts)
    payload = replace(
        compiled.payload,
        lowering="executorch",
        program=ProgramFile(COMPILED + digest, digest, compiled.machine),
        weights=weights,
        methods=tuple(
            replace(method, inputs=methods[method.name].inputs, symbols=methods[method.name].symbols)
            for method in compiled.payload.methods
        ),
        traces=tuple(
            read_together(with_times(trace, settings.hardware), weights) for trace in compiled.payload.traces
        ),
        hardware=settings.hardware,
    )
    steps = {trace.method: (0, len(trace.steps)) for trace in payload.traces}
    of_regions = {region.name: steps[region.method] for region in regions}
    methods_by_name = {method.name: method for method in annotated.payload.methods}
    takes = {
        region.name: checked_inputs(methods_by_name[region.method], methods[region.method])
        for region in regions
    }
    return Facts(payload, annotated.values, of_regions, tensors, takes), code


def checked_inputs(region: Method, method: MethodFacts) -> Method:
    """Returns the inputs of a region as the delegate checks them before the code runs.

    It knows sizes and symbols, no expressions of symbols (`2*batch`) and no guards: where there are any, only
    the sizes of the export are taken, and the log says so.
    """
    known = {input_facts.name: input_facts for input_facts in method.inputs}
    inputs = tuple(known.get(input_facts.name, input_facts) for input_facts in region.inputs)
    names = {size for input_facts in inputs for size in input_facts.shape}
    symbols = tuple(symbol for symbol in method.symbols if symbol.name in names)
    expressions = [symbol.name for symbol in symbols if not re.fullmatch(r"[\w.]+(\[\d+\])?", symbol.name)]
    if not (method.guards or expressions):
        return replace(region, inputs=inputs, symbols=symbols)
    _log.warning(
        "method %r runs with the sizes of its export only: the delegate cannot check %s of other sizes",
        region.name,
        [*method.guards, *expressions][0],
    )
    examples = {symbol.name: symbol.example for symbol in symbols}
    shapes = (tuple(examples.get(str(size), size) for size in input_facts.shape) for input_facts in inputs)
    sized = (replace(facts, shape=shape) for facts, shape in zip(inputs, shapes, strict=True))
    return replace(region, inputs=tuple(sized), symbols=())


def _package(compiled: Compiled) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PACKAGE
        write_package(compiled, path)
        return path.read_bytes()


edge = exir_ops.edge

_PUT, _PUT_IN_PLACE = edge.aten.index_put.default, edge.aten.index_put_.default

METHOD = "forward"
"""The method of a region's program."""


def region_program(exported: ExportedProgram) -> bytes:
    """The `.pte` of a region in the edge dialect, in which no input and no output has memory of its own."""
    opened = _with_weights_as_inputs(exported)
    _write_in_place(opened)
    manager = EdgeProgramManager({METHOD: opened}, None, EdgeCompileConfig(_check_ir_validity=False))
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    config = ExecutorchBackendConfig(memory_planning_pass=planning)
    try:
        with torch.no_grad():  # the fake values of parameters require gradients
            return bytes(manager.to_executorch(config).buffer)
    except RuntimeError as error:
        operators = re.findall(r"\w+::\w+(?:\.\w+)?", str(error))
        if "out variant" not in str(error) or not operators:
            raise
        raise PassError(
            f"a weight is read by {', '.join(operators)}, for which ExecuTorch has no kernel: import the "
            "library that registers one with ExecuTorch, or export the weight in another form"
        ) from error


def _write_in_place(exported: ExportedProgram) -> None:
    """Have the program write rows of its states in place where ExecuTorch's kernel can, without a copy.

    The kernel takes one index of one dimension and no negative numbers, and values of the size of the rows.
    It fails for all others, which the kernel with a result of its own takes, or ends the process. A state
    has memory of its own, unlike other values: ExecuTorch gives theirs away behind such a write.
    """
    graph, outputs = exported.graph, exported.graph_signature.output_specs
    returned = {spec.arg.name for spec in outputs if spec.kind is OutputKind.USER_OUTPUT}
    puts = [node for node in graph.nodes if node.target is _PUT]
    hidden = torch.ops.aten.index_put.default  # which ExecuTorch's pass does not look for
    for node in puts:
        node.target = hidden
    for node in puts:
        (written, *_) = node.all_input_nodes
        is_state = written.op == "placeholder" or written.target is _PUT_IN_PLACE
        if is_state and node.name not in returned and _rows_of(node) is not None:
            node.target = _PUT
            reinplace_pass(exported, ops_to_inplace=[_PUT])
            node.target = hidden
    for node in puts:
        node.target = _PUT
    for node in [node for node in graph.nodes if node.target is _PUT_IN_PLACE]:
        _fit_to_kernel(node)


def _fit_to_kernel(put: fx.Node) -> None:
    """Give an `index_put_` values of the size of the rows, and an index that counts from the start."""
    graph, written = put.graph, _rows_of(put)
    assert written is not None  # as it was written in place
    number, index, rows = written
    state, indices, values, *more = list[Any](put.args)
    with graph.inserting_before(put):
        from_end = _call(graph, edge.aten.add.Scalar, index, state.meta["val"].shape[number])
        is_negative = _call(graph, edge.aten.lt.Scalar, index, 0)
        counted = _call(graph, edge.aten.where.self, is_negative, from_end, index)
        if not all(isinstance(size, int) for size in rows):
            for _ in range(len(rows) - values.meta["val"].dim()):
                values = _call(graph, edge.aten.unsqueeze_copy.default, values, 0)
        elif list(values.meta["val"].shape) != rows:
            values = _call(graph, edge.aten.expand_copy.default, values, rows)
    put.args = (state, [counted if operand is index else operand for operand in indices], values, *more)


def _rows_of(put: fx.Node) -> tuple[int, fx.Node, list[Any]] | None:
    """Return the dimension that an `index_put` indexes, the index, and the sizes of the rows that it writes.

    None stands for one that cannot write in place. Values of static sizes can be expanded to the rows. With
    dynamic sizes they must be of that size already, except for leading dimensions of size 1, which PyTorch
    drops: ExecuTorch cannot expand them.
    """
    state, indices, values, *accumulates = list[Any](put.args)
    used = [(number, index) for number, index in enumerate(indices) if index is not None]
    if len(used) != 1 or any(accumulates) or put.kwargs.get("accumulate"):
        return None
    ((number, index),) = used
    if index.meta["val"].dim() != 1 or index.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    rows: list[Any] = list(state.meta["val"].shape)
    rows[number] = index.meta["val"].shape[0]
    sizes = list(values.meta["val"].shape)
    if not all(isinstance(size, int) for size in (*sizes, *rows)):
        sizes = [1] * (len(rows) - len(sizes)) + sizes
        if not all(statically_known_true(size == row) for size, row in zip(sizes, rows, strict=True)):
            return None
    return number, index, rows


def _call(graph: fx.Graph, operator: Any, *args: Any) -> fx.Node:
    """Add a call of an operator of the edge dialect, with the value that it has on fakes."""
    node = graph.call_function(operator, args)
    values = fx.map_arg(args, lambda operand: operand.meta["val"])
    (fake, *_) = (value for value in values if isinstance(value, FakeTensor))
    with fake.fake_mode:
        node.meta["val"] = operator(*values)
    return node


def text_of(exported: ExportedProgram) -> str:
    """A text that is equal for programs of equal code, whatever their nodes and weights are called."""
    names: dict[str, str] = {}
    lines = []
    for position, node in enumerate(exported.graph.nodes):
        names[node.name] = f"%{position}"
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda operand: _Name(names[operand.name]))
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        value = pytree.tree_map_only(torch.Tensor, _geometry, node.meta.get("val"))
        lines.append(f"{names[node.name]} = {node.op} {target} {args} -> {value}")
    signature = exported.graph_signature
    inputs = [(spec.kind.name, names.get(spec.arg.name)) for spec in signature.input_specs]
    name_of = {str(spec.target): names.get(spec.arg.name) for spec in signature.input_specs if spec.target}
    outputs = [
        (spec.kind.name, names.get(getattr(spec.arg, "name", "")), name_of.get(str(spec.target)))
        for spec in signature.output_specs
    ]
    ranges = sorted(f"{symbol}: {limits}" for symbol, limits in exported.range_constraints.items())
    return "\n".join([*lines, str(inputs), str(outputs), str(ranges)])


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _with_weights_as_inputs(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program whose own inputs come first, then its weights; it writes its states in place."""
    signature = copy.deepcopy(exported.graph_signature)  # ExecuTorch writes names into its parts
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    user_inputs = [name for name, spec in specs.items() if spec.kind is InputKind.USER_INPUT]
    order = [*user_inputs, *(name for name in specs if name not in user_inputs)]
    graph_module = _with_inputs_in_order(exported.graph_module, order)
    input_of = {str(spec.target): name for name, spec in specs.items() if spec.target is not None}
    outputs = [
        OutputSpec(OutputKind.USER_INPUT_MUTATION, spec.arg, input_of[str(spec.target)])
        if spec.kind is OutputKind.BUFFER_MUTATION
        else spec
        for spec in signature.output_specs
    ]
    inputs = [InputSpec(InputKind.USER_INPUT, TensorArgument(name=name), None) for name in order]
    new = ExportGraphSignature(inputs, outputs)
    in_spec = pytree.tree_flatten((tuple(order), {}))[1]
    out_spec = pytree.tree_flatten(tuple(new.user_outputs))[1]
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=new,
        state_dict={},
        range_constraints=copy.copy(exported.range_constraints),
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
        constants={},
        verifiers=[exported.verifier],
    )


def _with_inputs_in_order(graph_module: fx.GraphModule, order: list[str]) -> fx.GraphModule:
    nodes: Mapping[str, fx.Node] = {node.name: node for node in graph_module.graph.nodes}
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    for node in [*(nodes[name] for name in order), *graph_module.graph.nodes]:
        if node not in copied:
            copied[node] = graph.node_copy(node, lambda operand: copied[operand])
            copied[node].name = node.name
    return fx.GraphModule(graph_module, graph)
