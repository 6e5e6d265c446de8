"""The code of a region for ExecuTorch's own kernels: a program whose weights and states are inputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch import fx
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
from torch.utils import _pytree as pytree

from penstock.schedule.facts.errors import PassError

METHOD = "forward"
"""The method of a region's program."""


def region_program(exported: ExportedProgram) -> bytes:
    """The `.pte` of a region in the edge dialect, in which no input and no output has memory of its own."""
    opened = _with_weights_as_inputs(exported)
    manager = EdgeProgramManager({METHOD: opened}, None, EdgeCompileConfig(_check_ir_validity=False))
    planning = MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)
    config = ExecutorchBackendConfig(memory_planning_pass=planning, run_reinplace_pass=True)
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


def text_of(exported: ExportedProgram) -> str:
    """A text that is equal for programs of equal code, whatever their nodes and weights are called."""
    names: dict[str, str] = {}
    lines = []
    for position, node in enumerate(exported.graph.nodes):
        names[node.name] = f"%{position}"
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda one: _Name(names[one.name]))
        lines.append(
            f"{names[node.name]} = {node.op} {_target(node)} {args} -> {_described(node.meta.get('val'))}"
        )
    signature = exported.graph_signature
    inputs = [(spec.kind.name, names.get(spec.arg.name)) for spec in signature.input_specs]
    held = {str(spec.target): names.get(spec.arg.name) for spec in signature.input_specs if spec.target}
    outputs = [
        (spec.kind.name, names.get(getattr(spec.arg, "name", "")), held.get(str(spec.target)))
        for spec in signature.output_specs
    ]
    ranges = sorted(f"{symbol}: {found}" for symbol, found in exported.range_constraints.items())
    return "\n".join([*lines, str(inputs), str(outputs), str(ranges)])


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _target(node: fx.Node) -> str:
    return "" if node.op in ("placeholder", "output") else str(node.target)


def _described(value: object) -> str:
    return str(pytree.tree_map_only(torch.Tensor, lambda t: (t.dtype, tuple(t.shape), t.stride()), value))


def _with_weights_as_inputs(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program whose own inputs come first, then its weights; it writes its states in place."""
    signature = exported.graph_signature
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    own = [name for name, spec in specs.items() if spec.kind is InputKind.USER_INPUT]
    order = [*own, *(name for name in specs if name not in own)]
    graph_module = _with_inputs_in_order(exported.graph_module, order)
    held = {str(spec.target): name for name, spec in specs.items() if spec.target is not None}
    outputs = [
        OutputSpec(OutputKind.USER_INPUT_MUTATION, spec.arg, held[str(spec.target)])
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
    """Returns a copy of a graph module whose placeholders stand in another order."""
    nodes: Mapping[str, fx.Node] = {node.name: node for node in graph_module.graph.nodes}
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in [*(nodes[name] for name in order), *graph_module.graph.nodes]:
        if node not in made:
            made[node] = graph.node_copy(node, lambda one: made[one])
            made[node].name = node.name
    return fx.GraphModule(graph_module, graph)
