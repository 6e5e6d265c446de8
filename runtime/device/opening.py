"""Devices by name (`cpu`, `sim`, `sim:h200`, accelerators such as `cuda:1`), and a plan's weights on one."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from penstock.passes.lowering import compiled, eager
from penstock.runtime.device.accelerator import AcceleratorDevice, CudaDevice, EventClock, find_accelerator
from penstock.runtime.device.protocol import Device
from penstock.runtime.device.simulated import SimDevice, SimStreamer
from penstock.runtime.device.streamer import DeviceStreamer, PassOrder
from penstock.runtime.device.weights import DeviceWeights
from penstock.runtime.files.source import open_source
from penstock.runtime.stream.engine import MemoryUse
from penstock.runtime.stream.loaded import HostClock, LoadedWeights, Resources
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Hardware
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

ACCELERATOR = "accelerator"

_SPECIAL: dict[str, type[AcceleratorDevice]] = {"cuda": CudaDevice}
"""Accelerators for which torch's common interface is not enough."""


_LAST = 127
"""The largest index of a device: torch takes an index modulo 256, so that 256 would be the first device."""


def device_kind(name: str) -> str:
    """Returns `cpu`, `sim` or `accelerator` for a device's name. Raises StreamError for any other name.

    An accelerator is what torch calls a device, whether there is one here or not.
    """
    kind, _, detail = name.partition(":")
    if kind == "sim" or name == "cpu":
        return kind
    try:
        if torch.device(kind).type not in ("cpu", "meta"):
            if ":" in name and not (detail.isascii() and detail.isdecimal() and int(detail) <= _LAST):
                raise StreamError(f"expected a number of at most {_LAST} behind '{kind}:', got {name!r}")
            return ACCELERATOR
    except RuntimeError:
        pass
    raise StreamError(
        f"there is no device {name!r}: choose 'cpu', 'cuda', 'cuda:1' or another accelerator of torch's, "
        "'sim', or 'sim:h200' (any preset)"
    )


def hardware_of(name: str) -> Hardware | None:
    """Returns the preset in a simulated device's name. Raises PlanError, with the nearest, for no preset."""
    kind, _, detail = name.partition(":")
    return find_hardware(detail) if kind == "sim" and detail else None


def target_device(name: str) -> torch.device:
    """Return the device of the tensors of a device's name; those of a simulated device are on the CPU.

    Raises StreamError for an accelerator that is not here, PlanError for an unknown preset.
    """
    hardware_of(name)
    return find_accelerator(name) if device_kind(name) == ACCELERATOR else torch.device("cpu")


def open_accelerator(name: str, *, page_lock: bool = True) -> AcceleratorDevice:
    """Opens the accelerator of that name. Raises StreamError where torch finds none."""
    special = _SPECIAL.get(torch.device(name).type, AcceleratorDevice)
    return special(name, page_lock=page_lock)


def accelerators() -> tuple[str, ...]:
    """Returns the names of all accelerators that this process sees, such as `cuda:0` and `cuda:1`."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return tuple(f"{here.type}:{index}" for index in range(torch.accelerator.device_count())) if here else ()


def open_device(name: str, plan: Plan, *, page_lock: bool = True) -> Device:
    """Opens the device of that name. A simulated one without a preset runs on the hardware of the plan."""
    if device_kind(name) == ACCELERATOR:
        return open_accelerator(name, page_lock=page_lock)
    return SimDevice(hardware_of(name) or plan.hardware, name=name)


def check_compiled_for(payload: Payload, device: str) -> None:
    """Raise StreamError for code that was compiled for another kind of device, before anything is read."""
    if payload.lowering != "inductor":
        return
    there = torch.device(device).type if device_kind(device) == ACCELERATOR else "cpu"
    if compiled.device_of(payload) != there:
        raise StreamError(
            f"the program was compiled for {compiled.device_of(payload)}, not for {device}: export and "
            f"compile it for {there}, or with lowering='eager', which runs on every device"
        )


def index_of(device: str) -> int:
    """The index in the name of an accelerator, and -1 where there is none."""
    index = torch.device(device).index if device_kind(device) == ACCELERATOR else None
    return -1 if index is None else index


def _kept_on_host(lowered: eager.LoweredProgram, device: Device) -> set[int]:
    """Returns the storages of weights that a program for an accelerator has on the CPU, where they stay."""
    exported_for = {code.signature.device.type for code in lowered.methods.values()}
    if device.torch_device.type == "cpu" or exported_for == {"cpu"}:
        return set()
    theirs = {
        fqn
        for code in lowered.methods.values()
        if code.signature.device.type != "cpu"
        for _, fqn in code.weights
    }
    on_cpu = (weight for weight in lowered.payload.tensors if torch.device(weight.device).type == "cpu")
    return {weight.parts[0].storage for weight in on_cpu if weight.fqn in theirs}


def _counts_in_storages(lowered: eager.LoweredProgram) -> bool:
    """Tells whether a method has an operator whose offsets count from where a storage begins."""
    graphs = (code.graph() for code in lowered.methods.values())
    bodies = (body for graph in graphs for body in (graph.graph, *(b.graph for b in graph.bodies.values())))
    return any("as_strided" in str(node.target) for body in bodies for node in body.nodes)


def load_on_device(
    folder: Path,
    payload: Payload,
    plan: Plan,
    device: Device,
    *,
    poison: bool,
    lowered: eager.LoweredProgram | None = None,
    own_storages: bool = False,
) -> LoadedWeights:
    """Returns the weights of a verified plan on a device with streams; on an error all is closed again.

    Each weight has a storage of its own with `own_storages`, and where the eager program `lowered` needs it.
    """
    if plan.arena.kind != "contiguous" and plan.arena_bytes:
        raise StreamError(
            f"a {plan.arena.kind} arena cannot be on {device.name}: plan for that device, or with "
            "arena='contiguous'"
        )
    if plan.pool is not None:
        raise StreamError(
            f"the plan reads weights by units, which {device.name} cannot: make a plan for that device"
        )
    with ExitStack() as opened, torch.inference_mode(False), torch.device("cpu"):
        source = open_source(payload.files, folder, storages=payload.storages)
        opened.callback(source.close)
        opened.callback(device.close)
        weights = DeviceWeights(
            *(plan, payload.storages, device, source),
            on_host=_kept_on_host(lowered, device) if lowered else (),
            own_storages=own_storages or (lowered is not None and _counts_in_storages(lowered)),
        )
        streamer: DeviceStreamer | SimStreamer | None = None
        if plan.arena_bytes:
            simulated = isinstance(device, SimDevice)
            streamer = DeviceStreamer(plan, payload.storages, device, weights, poison=poison or simulated)
            opened.callback(streamer.close)
            if isinstance(device, SimDevice):  # which is told what the kernels read
                streamer = SimStreamer(streamer, device, weights, plan.traces)
        tensors = {weight.fqn: weights.tensor(weight.parts[0]) for weight in payload.tensors}
        order = PassOrder(device)
        closers = (order.close, device.close, weights.close, device.trim, source.close)
        opened.pop_all()
    return LoadedWeights(
        plan=plan,
        tensors=tensors,
        resources=Resources(streamer, closers, lambda: device.in_reader),
        usage=partial(_device_usage, device, weights),
        order=order,
        clock=EventClock(device) if isinstance(device, AcceleratorDevice) else HostClock(),
    )


def _device_usage(device: Device, weights: DeviceWeights) -> MemoryUse:
    return MemoryUse(
        weights.held_bytes,
        weights.held_bytes,
        pinned_bytes=weights.host.pinned_bytes,
        simulated_seconds=device.now_ns / 1e9 if isinstance(device, SimDevice) else None,
    )
