"""Loads a plan: files, memory, tensors and streamer, and with the lowered program a streamed module.

On a CPU weights stream into an arena (runtime/arena); on other devices they are copied from a host
(runtime/device). Both become one `LoadedWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from ctypes import pointer
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.native.library import File, Options, Spill, library
from penstock.passes.lowering import compiled, eager
from penstock.passes.sparse.calls import sparse_calls
from penstock.passes.training.facts import Training
from penstock.passes.weights.lifted import tensor_in
from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.arena.reading import WeightArena
from penstock.runtime.device.accelerator import AcceleratorDevice, EventClock
from penstock.runtime.device.opening import ACCELERATOR, device_kind, open_device
from penstock.runtime.device.protocol import Device
from penstock.runtime.device.simulated import SimDevice, SimStreamer
from penstock.runtime.device.streamer import DeviceStreamer, PassOrder
from penstock.runtime.device.weights import DeviceWeights
from penstock.runtime.files.direct_file import open_spill_file, spills, with_places
from penstock.runtime.files.source import HeldStorages, Mode, Source, open_source
from penstock.runtime.machine.calibrate import THIS_CPU, Sightings
from penstock.runtime.memory_split import MemorySplit, check_host, check_room
from penstock.runtime.module import LoadedMethod, StreamedModule
from penstock.runtime.options import LoadOptions
from penstock.runtime.planning import least_budget
from penstock.runtime.sparse.trust import check_experts, check_trusted
from penstock.runtime.sparse.units import LoadedUnits, NativeUnits, PooledUnits
from penstock.runtime.stream.engine import MemoryUse
from penstock.runtime.stream.loaded import HostClock, LoadedWeights, Resources
from penstock.runtime.stream.native import NativeStreamer
from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.runtime.system.threads import ParkedTeam
from penstock.runtime.training.module import TrainingModule, read_parameters
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Method, Part
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    from penstock.runtime.program import Program


@dataclass(frozen=True)
class LoadRequest(LoadOptions):
    """The options of a load, the device of its weights, and the folder of its spill file."""

    device: str = "cpu"
    spill: str | PathLike[str] | None = None

    @classmethod
    def of(cls, options: LoadOptions | None, **where: Any) -> LoadRequest:
        """Return a request with these options, or the default ones; `where` has `device` and `spill`."""
        return cls(**(vars(options or LoadOptions()) | where))

    @property
    def native(self) -> bool:
        """Tells whether the library in C++ executes the plan: if it was built and reads are not checked."""
        chosen = self.engine == "auto" and not self.check_reads and library() is not None
        return chosen or self.engine == "native"

    def check(self, payload: Payload) -> None:
        """Raise StreamError for an engine that is not for the device, and for code of another device."""
        if device_kind(self.device) != "cpu" and self.engine == "native":
            raise StreamError(
                f"the native engine streams on a CPU, not on {self.device}: leave engine='auto'"
            )
        check_compiled_for(payload, self.device)


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
        compiled.load(program.path, payload, trust=program.trust, index=_index_of(options.device))
        if payload.lowering == "inductor"
        else program.lowered
    )
    if device is None and device_kind(options.device) != "cpu":
        device = _open_device(payload, plan, options, program.beside_bytes, program.activation_bytes)
    if device is None:
        weights = load_weights(program.path, payload, plan, options, program.beside_bytes)
    else:
        weights = _load_on_device(
            program.path,
            payload,
            plan,
            device,
            poison=options.poison,
            on_host=() if isinstance(code, compiled.LoadedPackage) else _kept_on_host(code, device),
            own_storages=not isinstance(code, compiled.LoadedPackage) and _counts_in_storages(code),
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
            if program.training is not None:
                return _training_module(program, methods, weights, program.training)
    except BaseException:
        weights.close()
        raise
    sightings = None
    if device is None and plan.hardware.name == THIS_CPU and not (options.check_reads or options.poison):
        sightings = Sightings(program.path, payload, plan, lambda: weights.counters)
    return StreamedModule(methods, weights, program.path.name, sightings)


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


def _index_of(device: str) -> int:
    """The index in the name of an accelerator, and -1 where there is none."""
    index = torch.device(device).index if device_kind(device) == ACCELERATOR else None
    return -1 if index is None else index


def _training_module(
    program: Program, methods: dict[str, LoadedMethod], weights: LoadedWeights, training: Training
) -> TrainingModule:
    """Returns the module of a program that is trained, with its parameters and the buffers that it writes."""
    payload = program.payload
    written = {s for s, storage in enumerate(payload.storages) if storage.kind == "mutable"}
    buffers = {w.fqn: weights.tensors[w.fqn] for w in payload.tensors if w.parts[0].storage in written}
    parameters = read_parameters(program.path, training.parameters, training.sha256)
    name = program.path.name
    places = any(storage.kind == "produced" for storage in payload.storages)
    rung = program.rung or training.rungs[0]
    return TrainingModule(
        methods, weights, name, training, rung, parameters=parameters, buffers=buffers, places=places
    )


def load_weights(
    folder: Path, payload: Payload, plan: Plan, options: LoadRequest, beside: int = 0
) -> LoadedWeights:
    """Returns the weights of a verified plan, with readers at work; an error closes all again.

    On other devices than a CPU, each weight has a storage of its own. Raises BudgetError without room for the
    weights and for the `beside` bytes that calls take.
    """
    if device_kind(options.device) != "cpu":
        device = _open_device(payload, plan, options, beside, beside)
        return _load_on_device(folder, payload, plan, device, poison=options.poison, own_storages=True)
    if options.readers < 1:
        raise StreamError(f"expected one reader or more, got {options.readers}: somebody has to read weights")
    private = check_room(plan, payload, partial(least_budget, payload, "cpu"), beside=beside)
    with ExitStack() as opened, torch.inference_mode(False), torch.device("cpu"):
        source = _open_files(folder, payload, plan, private=private)
        opened.callback(source.close)
        storages = with_places(payload.storages, plan, len(payload.files))
        if spills(plan):
            source.add_spill(open_spill_file(options.spill, storages, plan))
        memory: WeightArena | NativeStreamer | None = None
        streamer: ArenaStreamer | NativeStreamer | None = None
        team: ParkedTeam | None = None
        at_once = options.check_reads or options.poison
        if options.native and (plan.arena_bytes or plan.pool):
            how = _native_options(source, options, drop_early=at_once)
            memory = streamer = NativeStreamer(folder, payload.to_bytes(), plan, how)
            opened.callback(streamer.free)
        elif plan.arena_bytes:
            memory = open_arena(plan, storages, source, debug=options.check_reads, poison=options.poison)
            opened.callback(memory.close)
            streamer = ArenaStreamer(
                plan, payload.storages, memory, readers=options.readers, drop_at_once=at_once
            )
            opened.callback(streamer.close)
        units: PooledUnits | None = None
        if plan.pool:
            units = _load_units(plan, payload, source, streamer, debug=options.check_reads)
            opened.callback(units.close)
        if plan.arena_bytes or units:
            team = ParkedTeam()
            opened.callback(team.wake)
        fixed = HeldStorages(payload.storages, plan.outside, source, options.readers)
        opened.callback(fixed.close)
        tensors = {w.fqn: _tensor(w.parts[0], payload, plan, fixed.buffers, memory) for w in payload.tensors}
        free = memory.free if isinstance(memory, NativeStreamer) else memory and memory.close
        away = units and units.close
        closers = tuple(end for end in (team and team.wake, away, fixed.close, free, source.close) if end)
        opened.pop_all()
    return LoadedWeights(
        plan=plan,
        tensors=tensors,
        resources=Resources(
            streamer, closers, lambda: fixed.in_reader or (units is not None and units.in_reader)
        ),
        usage=partial(_arena_usage, plan, memory, fixed.nbytes, options.readers, units),
        wait=fixed.wait,
        team=team,
        units=units,
    )


def _open_files(folder: Path, payload: Payload, plan: Plan, *, private: bool) -> Source:
    """The weight files of a plan. A mapped arena reads past the page cache only into `private` memory."""
    if plan.arena_bytes > 0 and plan.arena.backing == "mapped":
        mode: Mode = "direct" if private else "buffered"
        return Source(payload.files, folder, mode=mode, storages=payload.storages)
    moved = sum(t.stop - t.start for schedule in plan.schedules for t in schedule.transfers)
    repeated = min(moved, sum(storage.nbytes for storage in payload.storages))
    return open_source(payload.files, folder, storages=payload.storages, repeated=repeated)


def _load_units(
    plan: Plan,
    payload: Payload,
    source: Source,
    streamer: ArenaStreamer | NativeStreamer | None,
    *,
    debug: bool,
) -> PooledUnits:
    """The pool of a plan, in the engine that streams. Raises an error if calls cannot bring units."""
    if payload.lowering not in ("eager", "inductor"):
        raise StreamError(
            f"the plan reads weights by units, and a program of lowering {payload.lowering!r} cannot: make a "
            "plan for it"
        )
    check_trusted(plan)
    names = payload.storage_names()
    if isinstance(streamer, NativeStreamer):
        return NativeUnits(streamer, plan, names)
    return LoadedUnits(plan, payload.storages, source, names=names, debug=debug)


def _native_options(source: Source, options: LoadRequest, *, drop_early: bool) -> Options:
    """What the native engine is told: it reads the files that are open here, as they are read here."""
    files = [File(file.fd, file.mtime_ns, file.contents.ctime_ns) for file in source.files if file.contents]
    spill = None
    if (file := source.spill) is not None:
        spill = Spill(file.fd, file.direct_fd, file.block, file.nbytes, str(file.path).encode())
    return Options(
        readers=options.readers,
        buffered=source.mode == "buffered",
        drop_early=drop_early,
        poison=options.poison,
        debug=options.check_reads,
        opened=(File * len(files))(*files),
        spill=pointer(spill) if spill else None,
    )


def _tensor(
    part: Part,
    payload: Payload,
    plan: Plan,
    outside: Mapping[int, torch.Tensor],
    memory: WeightArena | NativeStreamer | None,
) -> torch.Tensor:
    """Returns the tensor that the program reads a part through, for as long as the module lives."""
    if part.storage in outside and 0 not in part.shape:
        return tensor_in(outside[part.storage], part)
    if memory is not None and plan.arena.layout[part.storage] >= 0:
        if isinstance(memory, NativeStreamer):
            return memory.view(part, payload.storages[part.storage].nbytes)
        return memory.view(part)
    # No step reads this weight, so a placeholder of its shape, whose memory is never touched, will do.
    return torch.empty_strided(part.shape, part.stride, dtype=getattr(torch, part.dtype))


def _arena_usage(
    plan: Plan,
    memory: WeightArena | NativeStreamer | None,
    outside: int,
    readers: int,
    units: PooledUnits | None,
) -> MemoryUse:
    """Returns what a CPU holds: `outside` bytes, units and the arena; a mapped one is the page cache's."""
    in_use, peak = (memory.held_bytes, memory.peak_bytes) if memory else (0, 0)
    maps = plan.arena.kind == "paged" and plan.arena.backing == "mapped"
    mapped = in_use if maps else 0
    if units is not None:
        in_use, peak = in_use + units.held_bytes, peak + units.peak_bytes
    return MemoryUse(outside + in_use, outside + peak, readers, mapped_bytes=mapped)


def load_on_accelerator(folder: Path, payload: Payload, plan: Plan, device: str) -> LoadedWeights:
    """Returns the weights of a verified plan on an accelerator, for code that the caller has compiled.

    Raises BudgetError, before a byte is read, where its host has no room for what streams.
    """
    check_host(plan, device, 0)
    check_room(plan, payload, partial(least_budget, payload, device), device=device)
    return _load_on_device(folder, payload, plan, open_device(device, plan), poison=False)


def _open_device(payload: Payload, plan: Plan, options: LoadRequest, beside: int, activations: int) -> Device:
    check_host(plan, options.device, beside)
    floor = partial(least_budget, payload, options.device)
    check_room(plan, payload, floor, device=options.device, beside=beside)
    device = open_device(options.device, plan, page_lock=options.page_lock)
    if isinstance(device, SimDevice):
        device.reserve(activations, "activations")
    return device


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


def _load_on_device(
    folder: Path,
    payload: Payload,
    plan: Plan,
    device: Device,
    *,
    poison: bool,
    on_host: Collection[int] = (),
    own_storages: bool = False,
) -> LoadedWeights:
    """Returns the weights of a verified plan on a device with streams; on an error all is closed again."""
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
            plan, payload.storages, device, source, on_host=on_host, own_storages=own_storages
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
        if device.type == "cpu":
            check_experts(trace)
        instantiate = partial(
            eager.instantiate, lowered, weights.tensors, method, device=device, units=weights.units
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
        check_experts(trace)
        loaded = compiled.CompiledMethod(package, weights.tensors, method, device)
        weights.resources.close_first(loaded.close)
        by_units = sparse_calls(trace, order.units, weights.units) if weights.units else {}
        probed = weights.probed(method.graph)
        methods[method.name] = LoadedMethod(
            trace, probed, loaded, order=order, by_units=by_units, bodies=package.bodies[method.name]
        )
    return methods
