"""Makes the graph plain: what `vmap` and `jvp` compute, without tokens, and without fakes that compute.

torch.export records such a transform as calls that push a level, wrap tensors for it, and pop it again. What
lies between runs on wrapped tensors, which have no memory that could be followed, and none of which a weight
could be acquired for. Run once on fake tensors, each such region becomes the operators that it calls on plain
ones, which are those of eager PyTorch.

`run_decompositions` hands a token from each operator with an effect to the next, though a graph runs its
nodes in order anyway. `draft_export` gives fake tensors real values, which they compute with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export._remove_effect_tokens_pass import _remove_effect_tokens
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from penstock.passes.building.refusals import sentence
from penstock.passes.graph.nodes import (
    copy_graph_module,
    copy_program,
    placeholders_of,
    tensors_of,
    with_graph,
)
from penstock.passes.graph.propagation import fake_mode_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError

_PUSH, _POP = "_increment_nesting", "_decrement_nesting"
"""Ends of the names of torch's functions that begin and end a transform."""

_PLACE = ("nn_module_stack", "stack_trace")
"""The keys in `node.meta` of where in the model a node comes from."""


def inline_transforms(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph without transforms of functions, or the graph itself if it has none.

    Equal graphs give equal names. Raises PassError for a transform that cannot be run on fake tensors.
    """
    if not any(_is_transform(node) for graph in _graphs(graph_module) for node in graph.nodes):
        return graph_module
    copied = copy_graph_module(graph_module)
    for graph in _graphs(copied):
        for region in _regions(graph):
            _replace(graph, region)
    for part in copied.modules():
        if isinstance(part, fx.GraphModule):
            part.recompile()
    return copied


@declare(requires=("plain parts",), ensures=("plain functions",))
def without_transforms(exported: ExportedProgram) -> ExportedProgram:
    """Return a copy of the program without transforms of functions, or the program itself if it has none."""
    inlined = inline_transforms(exported.graph_module)
    return exported if inlined is exported.graph_module else with_graph(exported, inlined)


def _graphs(graph_module: fx.GraphModule) -> list[fx.Graph]:
    return [part.graph for part in graph_module.modules() if isinstance(part, fx.GraphModule)]


def _is_transform(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", None) == predispatch.__name__


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each transform that is within no other one, from what pushes its level to what pops it."""
    regions: list[list[fx.Node]] = []
    depth = 0
    for node in list(graph.nodes):
        if not _is_transform(node):
            if depth:
                regions[-1].append(node)
            continue
        name = _name(node)
        if name.endswith(_PUSH):
            if not depth:
                regions.append([])
            depth += 1
        if depth:
            regions[-1].append(node)
        elif not node.users:
            graph.erase_node(node)  # it loads something for what follows
        else:
            raise PassError(
                f"the program has a value ({node.name}) inside of torch.func.grad, or of vmap in a body of "
                "torch.cond, whose beginning torch.export leaves out: compute it by hand"
            )
        depth -= name.endswith(_POP)
    return regions


def _replace(graph: fx.Graph, region: Sequence[fx.Node]) -> None:
    """Put what a region calls in its place."""
    inside = set(region)
    operands = dict.fromkeys(
        operand for node in region for operand in node.all_input_nodes if operand not in inside
    )
    bodies, inputs = [
        [operand for operand in operands if (operand.op == "get_attr") is body] for body in (True, False)
    ]
    outputs = [node for node in region if not inside.issuperset(node.users)]
    traced = _traced(graph.owning_module, [*bodies, *region], inputs, outputs)
    here: dict[fx.Node, Any] = dict(zip(placeholders_of(traced.graph), inputs, strict=True))
    place = {key: region[0].meta[key] for key in _PLACE if key in region[0].meta}
    results: Any = ()
    with graph.inserting_before(region[0]):
        for node in traced.graph.nodes:
            if node.op == "output":
                results = map_arg(node.args[0], here.__getitem__)
            elif node.op != "placeholder":
                here[node] = graph.node_copy(node, here.__getitem__)
                here[node].meta |= place
            if node.op == "get_attr":
                here[node].target = _given(graph.owning_module, region[0].name, str(node.target), traced)
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(result, lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)


def _given(owner: Any, region: str, name: str, traced: fx.GraphModule) -> str:
    """The name under which the module of a graph has a body that a region's trace calls."""
    attribute = f"{region}_{name}"
    setattr(owner, attribute, getattr(traced, name))
    return attribute


def _traced(
    owner: Any, region: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """The operators that a region of the owner's graph calls on plain tensors, as a graph of its inputs."""
    alone = fx.Graph()
    here = {node: alone.placeholder(node.name) for node in inputs}
    for node in region:
        here[node] = alone.node_copy(node, here.__getitem__)
    alone.output([here[node] for node in outputs])
    values = [_seen(node.meta.get("val")) for node in inputs]
    mode = fake_mode_of(values)
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
    run = fx.Interpreter(fx.GraphModule(owner, alone)).run
    try:
        with kept_torch_state(), unguarded, mode, torch.no_grad():
            traced = make_fx(run)(*values)
    except Exception as error:
        kind = _name(region[0]).split("_")[1]
        raise PassError(
            f"the program calls torch.func.{kind} on what it cannot be "
            f"followed on ({type(error).__name__}: {sentence(error)}): compute it without that transform"
        ) from error
    traced.graph.eliminate_dead_code()
    return traced


def _seen(value: Any) -> Any:
    """A value without a past: kernels are chosen by whether tensors require grad, which this one keeps."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


@declare(ensures=("no tokens",))
def without_tokens(exported: ExportedProgram) -> ExportedProgram:
    """Return a copy of the program without tokens, or the program if it has none."""
    if all(spec.kind is not OutputKind.TOKEN for spec in exported.graph_signature.output_specs):
        return exported
    result = copy_program(exported)
    result._graph_signature = copy.deepcopy(exported.graph_signature)
    return _remove_effect_tokens(result)


@declare(ensures=("plain fakes",))
def with_plain_fakes(exported: ExportedProgram) -> ExportedProgram:
    """Return a copy of the program whose fake tensors have no values, or the program if none has."""
    recorded = tensors_of([node.meta.get("val") for node in placeholders_of(exported.graph)])
    mode = next((tensor.fake_mode for tensor in recorded if isinstance(tensor, FakeTensor)), None)
    if mode is None or not mode.propagate_real_tensors:
        return exported
    plain = _plain_in(FakeTensorMode(shape_env=mode.shape_env))
    result = copy_program(exported)
    for module in result._graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if "val" in node.meta:
                node.meta = {**node.meta, "val": pytree.tree_map(plain, node.meta["val"])}
    return result


def _plain_in(mode: FakeTensorMode) -> Callable[[Any], Any]:
    def plain(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with mode:
            memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return memory.requires_grad_(value.requires_grad)

    return plain
