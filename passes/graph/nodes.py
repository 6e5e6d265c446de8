"""Work on the nodes of `torch.fx` graphs: uses, copies, devices, and regions of another grad mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError

CALLS = ("call_function", "call_method")
"""The kinds of nodes that call an operator, a function or a method of a tensor."""


_OBSERVED = ("_operator", "builtins", "executorch", "math", "torch")
"""The packages of functions without a schema whose run on fakes shows all that they write."""


def is_opaque(node: fx.Node) -> bool:
    """Tell whether a node calls a function without a schema whose run on fakes may hide what it writes."""
    if node.op != "call_function" or isinstance(node.target, OpOverload | HigherOrderOperator):
        return False
    owner = getattr(node.target, "__self__", None)  # the class of torch.autograd.Function, for its `apply`
    home = getattr(owner if isinstance(owner, type) else node.target, "__module__", "")
    return str(home).partition(".")[0] not in _OBSERVED


def writes(node: fx.Node) -> bool:
    """Tell whether a node calls an operator whose schema says that it writes."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def called(node: fx.Node) -> str:
    """Return what a node calls, in the words of a message."""
    name = getattr(node.target, "__name__", None) or str(node.target)
    if isinstance(node.target, HigherOrderOperator):
        return f"the higher-order operator {name!r}"
    return f"the Python function {getattr(node.target, '__module__', '')}.{name}"


def copy_graph_module(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graphs, nested ones included, may be changed; it shares the tensors."""
    copied = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    copied.meta.update(graph_module.meta)
    for before, node in zip(graph_module.graph.nodes, copied.graph.nodes, strict=True):
        node.name = before.name  # fx renames a copied node called like a builtin of Python, such as `input`
    for name, child in graph_module.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copied, name):
            setattr(copied, name, copy_graph_module(child))
    return copied


def copy_program(exported: ExportedProgram) -> ExportedProgram:
    """A copy whose graphs may be changed; it shares the tensors and the signature."""
    copied = copy.copy(exported)
    copied._graph_module = copy_graph_module(exported.graph_module)
    return copied


def use_aten_operators(graph_module: fx.GraphModule) -> None:
    """Replace operators of other dialects by the operators of ATen that they wrap, in nested graphs too.

    ExecuTorch's edge dialect wraps each operator in an object with a schema of its own, which computes the
    same and has the operator as `_op`. Nodes keep their names.
    """
    for node in _wrapping(graph_module):
        node.target = node.target._op  # type: ignore[union-attr]


def with_aten_operators(exported: ExportedProgram) -> ExportedProgram:
    """The program on a copy of its graph with ATen's operators only, or itself; nodes keep their names."""
    if not _wrapping(exported.graph_module):
        return exported
    result = copy_program(exported)
    use_aten_operators(result._graph_module)
    for module in result._graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return result


def _wrapping(graph_module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that call an operator which wraps one of ATen's."""
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    nodes = (node for graph in graphs for node in graph.nodes)
    return [node for node in nodes if isinstance(getattr(node.target, "_op", None), OpOverload)]


def written_values(
    operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[Any]:
    """Yield what is passed to the arguments that an operator writes: tensors, or the nodes that compute them.

    These are the arguments that its schema marks, and running statistics, which batch and instance norm
    write in training although their schemas do not say so. The flag may be a number, or a node.
    """
    passed = passed_by_name(operator, args, kwargs)
    trains = any(passed.get(flag) for flag in ("training", "use_input_stats"))
    for argument in operator._schema.arguments:
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (trains and argument.name in {"running_mean", "running_var"}):
            yield from pytree.tree_leaves(passed.get(argument.name))


def passed_by_name(
    operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return what a call passes to each argument of an operator."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def tensors_of(value: object) -> Sequence[torch.Tensor]:
    """Returns the tensors of a nested value."""
    if isinstance(value, torch.Tensor):  # as nearly all values are: to walk a tree takes ten times as long
        return (value,)
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def placeholders_of(graph: fx.Graph) -> list[fx.Node]:
    """Returns the inputs of a graph in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def needed(results: Iterable[fx.Node], allowed: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """Returns the nodes that values depend on, these included, as far as they are allowed."""
    return _reached(filter(allowed, results), lambda node: filter(allowed, node.all_input_nodes))


def dependent(sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that depend on values, these included."""
    return _reached(sources, lambda node: node.users)


def _reached(starts: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += neighbours(node)
    return reached


def subgraphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graph modules that a control-flow operator is given, or the one that a node calls."""
    owner = node.graph.owning_module
    operands = [node] if node.op == "call_module" else node.all_input_nodes
    modules = [
        getattr(owner, str(operand.target), None)
        for operand in operands
        if operand.op in ("get_attr", "call_module")
    ]
    return [module for module in modules if isinstance(module, fx.GraphModule)]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype without its prefix: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def size_hint(size: int | torch.SymInt) -> int:
    """Returns a size as a number: for a symbolic size, the one that it was exported with (1 if unknown)."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


TRANSFER = "penstock_transfer"
"""The key in `node.meta` that marks a conversion to another device, in a graph without values."""

_CPU_KERNELS = ("_for_cpu", "mkldnn", "onednn", "penstock.random_state")
"""Parts of the names of operators that exist on a CPU only."""


def exported_device(graph_module: fx.GraphModule) -> torch.device:
    """The device of a program: the accelerator if it names one. Raises PassError for several."""
    devices: set[torch.device] = set()
    for module in nested_modules(graph_module):
        for node in module.graph.nodes:
            devices |= {tensor.device for tensor in tensors_of(node.meta.get("val"))}
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            devices |= {leaf for leaf in leaves if isinstance(leaf, torch.device)}
    accelerators = sorted({indexed(device) for device in devices if device.type != "cpu"}, key=str)
    if len(accelerators) > 1:
        raise PassError(
            f"the program uses the devices {[str(device) for device in accelerators]}, expected one besides "
            "the CPU: export it for one device"
        )
    return accelerators[0] if accelerators else torch.device("cpu")


def move_graph(
    graph: fx.Graph, bodies: Iterable[fx.GraphModule], source: torch.device, target: torch.device | str
) -> bool:
    """Replaces the device `source`, for which a graph was exported, by `target`, in the graph itself.

    Constants made in the graph, conversions, assertions and autocast regions change, and so do those in the
    bodies of control flow, which are recompiled. In a program exported for an accelerator, nodes that name
    the CPU stay on the CPU, and the transfers between the two are kept. `meta["val"]` still has the exported
    device. Returns False if the two devices are the same, so that nothing changes.

    Raises PassError for operators that exist on a CPU only, if `target` is another device.
    """
    target = torch.device(target)
    if indexed(source) == indexed(target):
        return False
    for node in graph.nodes:
        _retarget_node(node, source, target)
    for body in bodies:
        for node in body.graph.nodes:
            _retarget_node(node, source, target)
        body.recompile()
    return True


def _retarget_node(node: fx.Node, source: torch.device, target: torch.device) -> None:
    name = str(node.target)
    if (
        isinstance(node.target, OpOverload)
        and target.type != "cpu"
        and any(part in name for part in _CPU_KERNELS)
    ):
        raise PassError(
            f"node {node.name!r} calls {name}, which exists on a CPU only, and cannot move to {target}: "
            "export the program without decomposing it, or for that device"
        )

    def move(leaf: object) -> object:
        if isinstance(leaf, torch.device) and indexed(leaf) == indexed(source):
            return target
        return leaf

    if node.op != "call_function":
        return
    args, kwargs = pytree.tree_map(move, (node.args, node.kwargs))
    if isinstance(node.target, HigherOrderOperator) and "autocast" in name and args[0] == source.type:
        args = (target.type, *args[1:])
    node.args, node.kwargs = args, kwargs
    if isinstance(node.target, OpOverload) and is_transfer(node):
        # A conversion between devices makes a copy. On a single device it would return its input instead.
        position = [argument.name for argument in node.target._schema.arguments].index("copy")
        if position < len(args):
            node.args = (*args[:position], True, *args[position + 1 :])
        else:
            node.kwargs = kwargs | {"copy": True}


def is_transfer(node: fx.Node) -> bool:
    """Tells whether a node is a conversion that took its tensor to another device when it was exported."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket is not torch.ops.aten.to:
        return False
    devices = {tensor.device for tensor in tensors_of(node.meta.get("val"))}
    source_devices = {tensor.device for tensor in tensors_of(node.all_input_nodes[0].meta.get("val"))}
    return TRANSFER in node.meta or not source_devices <= devices


def indexed(device: torch.device) -> torch.device:
    """Returns the device with its index: `cuda` means `cuda:0` in an exported program."""
    if device.type in {"cpu", "meta"}:
        return torch.device(device.type)
    return torch.device(device.type, device.index or 0)


def device_named(value: object) -> torch.device | None:
    """Returns the device that an argument of a call names or is, and None where it is neither."""
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError:
            return None
    return value if isinstance(value, torch.device) else None


def is_accelerator(device: torch.device) -> bool:
    """Tells whether a device is one that a program may be placed on besides the CPU."""
    return device.type not in ("cpu", "meta")


def nested_modules(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns the module itself, then the bodies of its control flow, however deep."""
    return [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]


def inline_grad_regions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph without regions of another grad mode, or the graph itself if it has none.

    Nodes of a region keep their names unless another node has that name; equal graphs give equal names.
    The bodies of control flow stay as they are.
    """
    inlined = graph_module
    while regions := _regions(inlined):  # a region may contain regions
        inlined = _without(regions, copy_graph_module(inlined))
    return inlined


@declare(requires=("plain parts",), ensures=("one grad mode",))
def without_grad_regions(exported: ExportedProgram) -> ExportedProgram:
    """Returns a copy of the program without regions of another grad mode, or the program if it has none."""
    inlined = inline_grad_regions(exported.graph_module)
    return exported if inlined is exported.graph_module else with_graph(exported, inlined)


def with_graph(exported: ExportedProgram, graph_module: fx.GraphModule) -> ExportedProgram:
    """Return the program with another graph, which has the same inputs, and the same outputs in order."""
    result = copy.copy(exported)
    result._graph_module = graph_module
    result._graph_signature = copy.deepcopy(exported.graph_signature)
    outputs: Any = graph_module.graph.output_node().args[0]
    for spec, node in zip(result._graph_signature.output_specs, outputs, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    return result


def _regions(graph_module: fx.GraphModule) -> list[str]:
    operator = torch.ops.higher_order.wrap_with_set_grad_enabled
    return [node.name for node in graph_module.graph.nodes if node.target is operator]


def _without(regions: Collection[str], module: fx.GraphModule) -> fx.GraphModule:
    """Write the graph of `module` anew, with bodies for operators of regions, so that all names are free."""
    graph = fx.Graph()
    here: dict[fx.Node, Any] = {}
    operators = [node for node in module.graph.nodes if node.name in regions]
    replaced = {node for operator in operators for node in (operator, *operator.users)}
    taken = {node.name for node in module.graph.nodes if node not in replaced}
    for node in module.graph.nodes:
        if node.name in regions:
            results = _copy_body(node, graph, here, taken)
            here |= {user: results[user.args[1]] for user in node.users}
        elif node not in here and not (node.op == "get_attr" and replaced.issuperset(node.users)):
            here[node] = graph.node_copy(node, here.__getitem__)
    graph.set_codegen(module.graph._codegen)
    result = fx.GraphModule(module, graph)
    result.meta.update(module.meta)
    return result


def _copy_body(region: fx.Node, graph: fx.Graph, here: dict[fx.Node, Any], taken: Collection[str]) -> Any:
    """Copy the body of a region to the end of `graph`, add its nodes to `here`, and return its results."""
    (body,) = subgraphs_of(region)
    owner: Any = region.graph.owning_module
    here.update(zip(placeholders_of(body.graph), map_arg(region.args[2:], here.__getitem__), strict=True))
    for node in body.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], here.__getitem__)
        if node in here:
            continue
        name = node.name if node.name not in taken else f"{region.name}_{node.name}"
        target = node.target
        if node.op == "get_attr":
            target = f"{region.name}_{target}"
            owner.add_module(target, body.get_submodule(str(node.target)))
        args, kwargs = map_arg((node.args, node.kwargs), here.__getitem__)
        here[node] = graph.create_node(node.op, target, args, kwargs, name, node.type)
        here[node].meta = copy.copy(node.meta)
    raise AssertionError("a graph ends with its output")
