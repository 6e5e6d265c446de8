"""Devices in a graph: export writes the device that it ran on into constants and assertions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import tensors_of
from penstock.schedule.facts.errors import PassError

TRANSFER = "penstock_transfer"
"""The key in `node.meta` that marks a conversion to another device, in a graph without values."""

_CPU_KERNELS = ("_for_cpu", "mkldnn", "onednn", "penstock.random_state")
"""Parts of the names of operators that exist on a CPU only."""


def exported_device(graph_module: fx.GraphModule) -> torch.device:
    """Returns the device that a program was exported for: the accelerator if it names one.

    Raises PassError when it names several accelerators, since an arena is on one device.
    """
    devices: set[torch.device] = set()
    for module in nested_modules(graph_module):
        for node in module.graph.nodes:
            devices |= {tensor.device for tensor in tensors_of(node.meta.get("val"))}
            devices |= {leaf for leaf in _leaves(node) if isinstance(leaf, torch.device)}
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


def _leaves(node: fx.Node) -> list[object]:
    return pytree.tree_leaves((node.args, node.kwargs))
