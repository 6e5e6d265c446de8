"""Loads a plan: files, memory, tensors and streamer, and with the lowered program a streamed module.

On a CPU weights stream into an arena (runtime/arena); on other devices they are copied from a host
(runtime/device). Both become one `LoadedWeights`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.passes.lowering import compiled, eager
from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.arena.reading import WeightArena
from penstock.runtime.device.accelerator import AcceleratorDevice
from penstock.runtime.device.opening import (
    check_compiled_for,
    device_kind,
    index_of,
    load_on_device,
    open_device,
)
from penstock.runtime.device.protocol import Device
from penstock.runtime.device.simulated import SimDevice
from penstock.runtime.files.direct_file import open_spill_file, spills, with_places
from penstock.runtime.files.source import HeldStorages, Mode, Source, open_source
from penstock.runtime.machine.calibrate import THIS_CPU, Sightings
from penstock.runtime.memory_split import MemorySplit, check_host, check_room
from penstock.runtime.module import LoadedMethod, StreamedModule
from penstock.runtime.options import LoadRequest
from penstock.runtime.planning import least_budget
from penstock.runtime.registered import WAYS
from penstock.runtime.stream.engine import MemoryUse, PooledReads
from penstock.runtime.stream.loaded import LoadedWeights, Resources, memory_use, view_of
from penstock.runtime.stream.native import NativeStreamer, engine_options
from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.runtime.system.threads import ParkedTeam
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Method
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    from penstock.runtime.program import Program


def load_module(
    program: Program,
    plan: Plan,
    options: LoadRequest,
    *,
    split: MemorySplit | None = None,
    device: Device | None = None,
) -> StreamedModule:
    """Returns a streamed module for a verified plan; on an error everything opened so far is closed again.

    `split` is the division of a cap on all memory, if there is one. `device` is a device that is open
    already; it is closed with the module.
    """
    payload = program.payload
    # The code first: no byte of a weight is read for a program that does not fit, or that needs trust.
    check_compiled_for(payload, device.name if device else options.device)
    code: compiled.LoadedPackage | eager.LoweredProgram = (
        compiled.load(program.path, payload, trust=program.trust, index=index_of(options.device))
        if payload.lowering == "inductor"
        else program.lowered
    )
    if device is None and device_kind(options.device) != "cpu":
        device = _open_device(payload, plan, options, program.beside_bytes, program.activation_bytes)
    if device is None:
        weights = load_weights(program.path, payload, plan, options, program.beside_bytes)
    else:
        weights = load_on_device(
            program.path,
            payload,
            plan,
            device,
            poison=options.poison,
            lowered=code if isinstance(code, eager.LoweredProgram) else None,
        )
        weights.out_of_memory = partial(
            _outgrown,
            device,
            weights.usage,
            lambda: split or program.split_memory(plan.budget, device=device.name),
        )
    try:
        # Tensors made in inference mode could not be written outside it, nor those of a default device read.
        with torch.inference_mode(False), torch.device("cpu"):
            where = device.torch_device if device else torch.device("cpu")
            if isinstance(code, compiled.LoadedPackage):
                methods = _compiled_methods(code, weights, where)
            else:
                methods = _eager_methods(code, weights, where)
            if module := program.kind.module(payload, methods, weights, program.path.name):
                return module
    except BaseException:
        weights.close()
        raise
    sightings = None
    if device is None and plan.hardware.name == THIS_CPU and not (options.check_reads or options.poison):
        sightings = Sightings(program.path, payload, plan, lambda: weights.counters)
    return StreamedModule(methods, weights, program.path.name, sightings)


def load_weights(
    folder: Path, payload: Payload, plan: Plan, options: LoadRequest, beside: int = 0
) -> LoadedWeights:
    """Returns the weights of a verified plan, with readers at work; an error closes all again.

    On other devices than a CPU, each weight has a storage of its own. Raises BudgetError without room for the
    weights and for the `beside` bytes that calls take.
    """
    if device_kind(options.device) != "cpu":
        device = _open_device(payload, plan, options, beside, beside)
        return load_on_device(folder, payload, plan, device, poison=options.poison, own_storages=True)
    if options.readers < 1:
        raise StreamError(f"expected one reader or more, got {options.readers}: somebody has to read weights")
    private = check_room(plan, payload, partial(least_budget, payload, "cpu"), beside=beside)
    with ExitStack() as opened, torch.inference_mode(False), torch.device("cpu"):
        source = _open_files(folder, payload, plan, private=private)
        opened.callback(source.close)
        storages = payload.storages
        if any(storage.kind == "produced" for storage in storages):
            storages = with_places(storages, plan, len(payload.files))
            if spills(plan):
                source.add_spill(open_spill_file(options.spill, storages))
        memory: WeightArena | NativeStreamer | None = None
        streamer: ArenaStreamer | NativeStreamer | None = None
        at_once = options.check_reads or options.poison
        if options.native and (plan.arena_bytes or plan.pool):
            how = engine_options(source, options, drop_early=at_once)
            memory = streamer = NativeStreamer(folder, payload.to_bytes(), plan, how)
            opened.callback(streamer.free)
        elif plan.arena_bytes:
            memory = open_arena(plan, storages, source, debug=options.check_reads, poison=options.poison)
            opened.callback(memory.close)
            streamer = ArenaStreamer(
                plan, payload.storages, memory, readers=options.readers, drop_at_once=at_once
            )
            opened.callback(streamer.close)
        if pooled := _open_pool(plan, payload, source, streamer, debug=options.check_reads):
            opened.callback(pooled.close)
        team = ParkedTeam() if plan.arena_bytes or pooled else None
        if team:
            opened.callback(team.wake)
        fixed = HeldStorages(payload.storages, plan.outside, source, options.readers)
        opened.callback(fixed.close)
        places = payload.storages, plan.arena.layout, fixed.buffers, memory
        tensors = {weight.fqn: view_of(weight.parts[0], *places) for weight in payload.tensors}
        free = memory.free if isinstance(memory, NativeStreamer) else memory and memory.close
        ends = team and team.wake, pooled and pooled.close, fixed.close, free, source.close
        closers = tuple(end for end in ends if end)
        opened.pop_all()
    return LoadedWeights(
        plan=plan,
        tensors=tensors,
        resources=Resources(
            streamer, closers, lambda: fixed.in_reader or (pooled is not None and pooled.in_reader)
        ),
        usage=partial(memory_use, plan, memory, fixed.nbytes, options.readers, pooled),
        wait=fixed.wait,
        team=team,
        pooled=pooled,
    )


def _open_pool(
    plan: Plan, payload: Payload, source: Source, streamer: object, *, debug: bool
) -> PooledReads | None:
    pools = (way.open(plan, payload, source, streamer, debug=debug) for way in WAYS)
    return next(filter(None, pools), None) if plan.pool else None


def _open_files(folder: Path, payload: Payload, plan: Plan, *, private: bool) -> Source:
    """The weight files of a plan. A mapped arena reads past the page cache only into `private` memory."""
    if plan.arena_bytes > 0 and plan.arena.backing == "mapped":
        mode: Mode = "direct" if private else "buffered"
        return Source(payload.files, folder, mode=mode, storages=payload.storages)
    moved = sum(t.stop - t.start for schedule in plan.schedules for t in schedule.transfers)
    repeated = min(moved, sum(storage.nbytes for storage in payload.storages))
    return open_source(payload.files, folder, storages=payload.storages, repeated=repeated)


def load_on_accelerator(folder: Path, payload: Payload, plan: Plan, device: str) -> LoadedWeights:
    """Returns the weights of a verified plan on an accelerator, for code that the caller has compiled.

    Raises BudgetError, before a byte is read, where its host has no room for what streams.
    """
    check_host(plan, device, 0)
    check_room(plan, payload, partial(least_budget, payload, device), device=device)
    return load_on_device(folder, payload, plan, open_device(device, plan), poison=False)


def _open_device(payload: Payload, plan: Plan, options: LoadRequest, beside: int, activations: int) -> Device:
    check_host(plan, options.device, beside)
    floor = partial(least_budget, payload, options.device)
    check_room(plan, payload, floor, device=options.device, beside=beside)
    device = open_device(options.device, plan, page_lock=options.page_lock)
    if isinstance(device, SimDevice):
        device.reserve(activations, "activations")
    return device


def _outgrown(device: Device, usage: Callable[[], MemoryUse], split: Callable[[], MemorySplit]) -> str:
    """The part of the device's memory that was too small, in words."""
    if not isinstance(device, AcceleratorDevice):
        return f"beside {split()}"
    return split().outgrown(device.allocated - usage().held_bytes, device.held_by_others)


def _eager_methods(
    lowered: eager.LoweredProgram, weights: LoadedWeights, device: torch.device
) -> dict[str, LoadedMethod]:
    """Returns the methods as graph modules with the probes that the plan asks for."""
    payload = lowered.payload

    def load(method: Method) -> LoadedMethod:
        trace = payload.trace_for(method.graph)
        for way in WAYS if device.type == "cpu" else ():
            way.check(trace)
        rewrite = partial(weights.pooled.rewrite, trace=trace) if weights.pooled else None
        instantiate = partial(
            eager.instantiate, lowered, weights.tensors, method, device=device, rewrite=rewrite
        )
        probed = weights.probed(method.graph)
        everywhere = partial(instantiate, range(len(trace.steps)))
        return LoadedMethod(trace, probed, instantiate(probed), everywhere)

    return {method.name: load(method) for method in payload.methods}


def _compiled_methods(
    package: compiled.LoadedPackage, weights: LoadedWeights, device: torch.device
) -> dict[str, LoadedMethod]:
    """Returns the compiled methods. Their runners are destroyed before the memory that they read."""
    payload = package.payload
    orders = {order.graph: order for order in payload.probes}
    methods: dict[str, LoadedMethod] = {}
    for method in payload.methods:
        trace, order = payload.trace_for(method.graph), orders[method.graph]
        for way in WAYS:
            way.check(trace)
        loaded = compiled.CompiledMethod(package, weights.tensors, method, device)
        weights.resources.close_first(loaded.close)
        pooled = weights.pooled.calls(trace, order) if weights.pooled else {}
        probed = weights.probed(method.graph)
        methods[method.name] = LoadedMethod(
            trace, probed, loaded, order=order, pooled=pooled, bodies=package.bodies[method.name]
        )
    return methods
