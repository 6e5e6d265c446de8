"""The device that Inductor compiles a program for, and why it does not compile for another.

A program is compiled for one device. Where torch has no code generator for it, or the machine has no such
device, or tensors lie on two, a PassError says so before anything is compiled or read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from penstock.passes.graph.nodes import tensors_of
from penstock.passes.graph.retarget import indexed, nested_modules
from penstock.schedule.facts.errors import PassError

AHEAD = ("cpu", "cuda", "xpu", "mps")
"""Where code of AOTInductor runs: `parse_device_str` of torch's aoti_runtime/model_base.h knows no other."""

_INSTEAD = "penstock.compile it with lowering='eager', which runs on every device that torch knows"

Placed = Iterable[tuple[str, torch.device]]
"""Tensors by what they are called in messages, and where they lie."""


def values_of(graph_module: fx.GraphModule) -> Placed:
    """Yields the tensors of an exported graph, and of the bodies of its control flow."""
    for module in nested_modules(graph_module):
        for node in module.graph.nodes:
            for tensor in tensors_of(node.meta.get("val")):
                yield f"value {node.name!r}", tensor.device


def only_device(placed: Placed, title: str) -> torch.device:
    """Returns the device of all tensors of `what`; the CPU where there are none.

    Raises PassError, which names a tensor on each, if they lie on two.
    """
    devices: dict[torch.device, str] = {}
    for name, device in placed:
        devices.setdefault(indexed(device), name)
    if len(devices) > 1:
        (here, first), (there, second) = list(devices.items())[:2]
        raise PassError(
            f"{title} has tensors on two devices, {first} on {here} and {second} on {there}, and Inductor "
            f"compiles for one: make all of them on {there if here.type == 'cpu' else here}, or {_INSTEAD}"
        )
    return next(iter(devices), torch.device("cpu"))


def check_ahead(device: torch.device, title: str) -> None:
    """Raises PassError unless AOTInductor compiles for the device on this machine."""
    if device.type not in AHEAD:
        raise PassError(
            f"{title} is for {device}, and code of AOTInductor runs on {', '.join(AHEAD)} only: {_INSTEAD}"
        )
    if device.type != "cpu":
        _check_here(device, title)
    check_generator(device, title)


def check_generator(device: torch.device, title: str) -> None:
    """Raises PassError where this torch has no code generator of Inductor for a device."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    if get_scheduling_for_device(device.type) is None:
        raise PassError(
            f"{title} is for {device}, for which Inductor has no code generator in torch "
            f"{torch.__version__}: {_INSTEAD}"
        )


def _check_here(device: torch.device, title: str) -> None:
    """Raises PassError without the device: its kernels are chosen and compiled on it."""
    here = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if here and here.type == device.type else 0
    if (device.index or 0) >= count:
        raise PassError(
            f"{title} is for {device}, whose kernels Inductor compiles where that device is, and this "
            f"machine has {count or 'none'} of that kind: compile it on a machine that has it, or {_INSTEAD}"
        )
