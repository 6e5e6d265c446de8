"""Builds a streamed module on a device with streams: memory, weights, streamer and program, in that order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from penstock.passes.lowering.eager import LoweredProgram
from penstock.runtime.device.cuda import CudaDevice
from penstock.runtime.device.memory import DeviceWeights
from penstock.runtime.device.protocol import Device
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.loading import LoadOptions, bind_eager, bind_inductor, describe_arena, open_source
from penstock.runtime.memory_split import MemorySplit
from penstock.runtime.module import Resources, StreamedModule
from penstock.runtime.sim.device import SimDevice
from penstock.runtime.sim.streamer import SimStreamer
from penstock.runtime.stream.interface import Stats
from penstock.runtime.stream.streamer import Counters
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Hardware, Storage
from penstock.schedule.facts.presets import find_hardware
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan


def device_kind(name: str) -> str:
    """`cpu`, `sim` or `cuda`, of a device's name; StreamError for any other."""
    kind, _, detail = name.partition(":")
    if kind in ("cpu", "sim", "cuda") and not (kind == "cpu" and detail):
        if kind == "cuda" and detail and not detail.isdecimal():
            raise StreamError(f"expected a number behind 'cuda:', got {name!r}")
        return kind
    raise StreamError(
        f"there is no device {name!r}: choose 'cpu', 'cuda', 'cuda:1', 'sim', or 'sim:h200' (any preset)"
    )


def hardware_of(name: str) -> Hardware | None:
    """The preset in a simulated device's name; PlanError, naming the nearest, for an unknown one."""
    kind, _, detail = name.partition(":")
    return find_hardware(detail) if kind == "sim" and detail else None


def open_device(name: str, plan: Plan, *, page_lock: bool = True) -> Device:
    """The device of that name. A simulated one without a preset runs on the hardware of the plan."""
    if device_kind(name) == "cuda":
        return CudaDevice.of(name, page_lock=page_lock)
    return SimDevice(hardware_of(name) or plan.hardware, name=name)


def load_on_device(
    folder: Path,
    payload: Payload,
    plan: Plan,
    device: Device,
    options: LoadOptions,
    *,
    lowered: Callable[[], LoweredProgram],
    split: Callable[[], MemorySplit] | None = None,
) -> StreamedModule:
    """A streamed module for a verified plan; on an error everything opened so far is closed again.

    `lowered` gives the program where it is an eager one. `split` tells what was left beside weights, should
    memory run out in a pass.
    """
    if plan.arena.kind != "contiguous" and plan.arena_bytes:
        raise StreamError(
            f"a {plan.arena.kind} arena cannot be on {device.name}: plan for that device, or with "
            "arena='contiguous'"
        )
    if payload.lowering == "inductor" and device.torch_device.type != "cpu":
        raise StreamError(
            f"the program was compiled for a CPU, not for {device.name}: compile it with lowering='eager'"
        )
    with ExitStack() as opened, torch.inference_mode(False), torch.device("cpu"):
        source = open_source(payload, folder)
        opened.callback(source.close)
        opened.callback(device.close)
        weights = DeviceWeights(plan, payload.storages, device, source)
        streamer = _open_streamer(plan, payload.storages, device, weights, poison=options.poison)
        if streamer is not None:
            opened.callback(streamer.close)
        tensors = {weight.fqn: weights.tensor(weight.parts[0]) for weight in payload.tensors}
        if payload.lowering == "inductor":
            methods, closers = bind_inductor(folder, payload, tensors, streamer)
        else:
            methods, closers = bind_eager(lowered(), tensors, streamer, device.torch_device)
        resources = Resources(
            streamer,
            (*closers, device.close, weights.close, source.close),
            os.getpid(),
            in_reader=lambda: device.in_reader,
        )
        if split is not None:
            resources.out_of_memory = partial(_outgrown, device, weights, split)

        opened.pop_all()
    return StreamedModule(methods, plan, resources, _Meter(plan, device, weights, streamer).read)


def _open_streamer(
    plan: Plan, storages: Sequence[Storage], device: Device, weights: DeviceWeights, *, poison: bool
) -> DeviceStreamer | SimStreamer | None:
    """None where nothing streams; a simulated device is told what the kernels read."""
    if not plan.arena_bytes:
        return None
    if not isinstance(device, SimDevice):
        return DeviceStreamer(plan, storages, device, weights, poison=poison)
    streamer = DeviceStreamer(plan, storages, device, weights, poison=True)
    return SimStreamer(streamer, device, weights, plan.traces)


@dataclass(frozen=True)
class _Meter:
    plan: Plan
    device: Device
    weights: DeviceWeights
    streamer: DeviceStreamer | SimStreamer | None

    def read(self, passes: int) -> Stats:
        counters = Counters() if self.streamer is None else self.streamer.counters
        return Stats(
            passes=passes,
            bytes_moved=counters.bytes_moved,
            misses=counters.misses,
            stall_seconds=counters.stall_ns / 1e9,
            held_bytes=self.weights.held_bytes,
            peak_bytes=self.weights.held_bytes,
            budget=self.plan.budget,
            arena=describe_arena(self.plan),
            readers=0,
            pinned_bytes=self.weights.host.pinned_bytes,
            simulated_seconds=self.device.now_ns / 1e9 if isinstance(self.device, SimDevice) else None,
        )


def _outgrown(device: Device, weights: DeviceWeights, split: Callable[[], MemorySplit]) -> str:
    """Which part of the device's memory was too small."""
    if not isinstance(device, CudaDevice):
        return f"beside {split()}"
    return split().outgrown(device.allocated - weights.held_bytes, device.held_by_others)
