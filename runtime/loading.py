"""Builds a streamed module on a CPU: files, arena, tensors, streamer and program, in that order."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from penstock.passes.lowering import compiled, eager
from penstock.runtime.arena.opening import WeightArena, open_arena
from penstock.runtime.files.rates import READERS
from penstock.runtime.files.reading import HeldStorages
from penstock.runtime.files.source import WARM_FRACTION, Mode, Source
from penstock.runtime.memory_split import MemorySplit
from penstock.runtime.module import BoundMethod, Resources, StreamedModule
from penstock.runtime.stream.interface import Stats, StepStreamer
from penstock.runtime.stream.streamer import Counters, Streamer
from penstock.runtime.system.threads import ParkedTeam
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Method, Part
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan


@dataclass(frozen=True)
class LoadOptions:
    """How a plan is carried out; none of it changes what is computed.

    `split` is what was left beside weights, where a cap on all memory was given.
    """

    readers: int = READERS
    debug: bool = False
    poison: bool = False
    page_lock: bool = True
    split: MemorySplit | None = None


def open_source(payload: Payload, folder: Path, repeated: int = 0) -> Source:
    """The weight files, read through the page cache where it holds them and past it where not.

    `repeated` bytes are read in every pass: later passes may read them through the cache.
    """
    return Source(payload.files, folder, mode=reading_mode(payload, folder), repeated=repeated)


def reading_mode(payload: Payload, folder: Path) -> Mode:
    """How weight files are best read now; their stamps are not compared."""
    with Source(payload.files, folder, mode="buffered", check=False) as source:
        return "direct" if source.cached_fraction() < WARM_FRACTION else "buffered"


@dataclass(frozen=True)
class StreamedWeights:
    """The weights of a plan as tensors by FQN, and what moves them; `closers` free memory, then files.

    What streams is waited for by the streamer; the rest is there once `wait` has returned.
    """

    tensors: dict[str, torch.Tensor]
    streamer: Streamer | None
    closers: tuple[Callable[[], None], ...]
    read_stats: Callable[[int], Stats]
    wait: Callable[[], None]
    in_reader: Callable[[], bool]


def load_on_cpu(
    folder: Path,
    payload: Payload,
    plan: Plan,
    options: LoadOptions,
    lowered: Callable[[], eager.LoweredProgram],
) -> StreamedModule:
    """A streamed module for a verified plan; on an error everything opened so far is closed again.

    `lowered` gives the program where it is an eager one; weights are read meanwhile.
    """
    weights = load_weights(folder, payload, plan, options)
    try:
        if payload.lowering == "inductor":
            methods, closers = bind_inductor(folder, payload, weights.tensors, weights.streamer)
        else:
            methods, closers = bind_eager(lowered(), weights.tensors, weights.streamer)
    except BaseException:
        Resources(weights.streamer, weights.closers, os.getpid(), in_reader=weights.in_reader).close()
        raise
    resources = Resources(
        weights.streamer,
        (*closers, *weights.closers),
        os.getpid(),
        wait=weights.wait,
        in_reader=weights.in_reader,
    )
    return StreamedModule(methods, plan, resources, weights.read_stats)


def load_weights(folder: Path, payload: Payload, plan: Plan, options: LoadOptions) -> StreamedWeights:
    """The weights of a verified plan, its streamer started; on an error everything is closed again."""
    if options.readers < 1:
        raise StreamError(f"expected one reader or more, got {options.readers}: somebody has to read weights")
    # Weights made in inference mode could not be written outside it, nor those of a default device read.
    with ExitStack() as opened, torch.inference_mode(False), torch.device("cpu"):
        # What the page cache holds is mapped; a mapped arena reads only what it does not, past it.
        maps = plan.arena_bytes > 0 and plan.arena.backing == "mapped"
        moved = sum(t.stop - t.start for schedule in plan.schedules for t in schedule.transfers)
        repeated = min(moved, sum(storage.nbytes for storage in payload.storages))
        source = (
            Source(payload.files, folder, mode="direct") if maps else open_source(payload, folder, repeated)
        )
        opened.callback(source.close)
        held = HeldStorages(payload.storages, plan.outside, source, options.readers)
        opened.callback(held.close)
        arena, streamer, team = None, None, None
        if plan.arena_bytes:
            arena = open_arena(plan, payload.storages, source, debug=options.debug, poison=options.poison)
            opened.callback(arena.close)
            at_once = options.debug or options.poison
            streamer = Streamer(plan, payload.storages, arena, readers=options.readers, drop_at_once=at_once)
            opened.callback(streamer.close)
            team = ParkedTeam()
            opened.callback(team.close)
        outside = held.buffers
        tensors = {weight.fqn: _tensor(weight.parts[0], plan, outside, arena) for weight in payload.tensors}
        parts = (team, held, arena, source)
        closers = tuple(part.close for part in parts if part is not None)
        meter = _Meter(plan, arena, streamer, options.readers, held.nbytes)
        opened.pop_all()
    return StreamedWeights(tensors, streamer, closers, meter.read, held.wait, lambda: held.in_reader)


def bind_eager(
    lowered: eager.LoweredProgram,
    tensors: dict[str, torch.Tensor],
    streamer: StepStreamer | None,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, BoundMethod], list[Callable[[], None]]]:
    """The methods as graph modules with the probes that the plan asks for; nothing to close."""
    payload = lowered.payload

    def bind(method: Method) -> BoundMethod:
        trace = payload.trace_for(method.graph)
        probed = streamer.methods[method.graph].probed if streamer else ()
        program = eager.instantiate(lowered, tensors, method, probed, device=device)
        everywhere = partial(
            eager.instantiate, lowered, tensors, method, range(len(trace.steps)), device=device
        )
        return BoundMethod(trace, probed, program, everywhere)

    return {method.name: bind(method) for method in payload.methods}, []


def bind_inductor(
    folder: Path, payload: Payload, tensors: dict[str, torch.Tensor], streamer: StepStreamer | None
) -> tuple[dict[str, BoundMethod], list[Callable[[], None]]]:
    """The methods as compiled, and what destroys their runners, which must come before their memory goes."""
    package = compiled.load(folder, payload)
    orders = {order.graph: order for order in payload.probes}
    methods: dict[str, BoundMethod] = {}
    closers: list[Callable[[], None]] = []
    for method in payload.methods:
        program = compiled.CompiledMethod(package, tensors, method)
        probed = streamer.methods[method.graph].probed if streamer else ()
        methods[method.name] = BoundMethod(
            payload.trace_for(method.graph), probed, program, partial(_itself, program), orders[method.graph]
        )
        closers.append(program.close)
    return methods, closers


def _itself(program: compiled.CompiledMethod) -> compiled.CompiledMethod:
    """Compiled code calls every probe whatever the plan."""
    return program


@dataclass(frozen=True)
class _Meter:
    plan: Plan
    arena: WeightArena | None
    streamer: Streamer | None
    readers: int
    outside_bytes: int

    def read(self, passes: int) -> Stats:
        counters = Counters() if self.streamer is None else self.streamer.counters
        return Stats(
            passes=passes,
            bytes_moved=counters.bytes_moved,
            misses=counters.misses,
            stall_seconds=counters.stall_ns / 1e9,
            held_bytes=self.outside_bytes + (self.arena.held_bytes if self.arena else 0),
            peak_bytes=self.outside_bytes + (self.arena.peak_bytes if self.arena else 0),
            budget=self.plan.budget,
            arena=describe_arena(self.plan),
            readers=self.readers,
            mapped_bytes=self.arena.held_bytes if self.arena and self._maps else 0,
        )

    @property
    def _maps(self) -> bool:
        return self.plan.arena.kind == "paged" and self.plan.arena.backing == "mapped"


def describe_arena(plan: Plan) -> str:
    """Where the weights of a plan live, in words."""
    if not plan.arena_bytes:
        return "ordinary memory: everything fits"
    backing = f" {plan.arena.backing}" if plan.arena.kind == "paged" else ""
    return f"a {plan.arena.kind}{backing} arena of {format_size(plan.arena_bytes)}; {plan.hardware.note}"


def _tensor(
    part: Part, plan: Plan, outside: dict[int, torch.Tensor], arena: WeightArena | None
) -> torch.Tensor:
    """The tensor that the program reads a part through, for as long as the module lives."""
    s = part.storage
    dtype = getattr(torch, part.dtype)
    if s in outside and 0 not in part.shape:
        flat = outside[s][part.offset :]
        whole = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(part.shape, part.stride)
    if arena is not None and plan.arena.layout[s] >= 0:
        return arena.view(part)
    # No step reads it: a placeholder of its shape, whose memory is never touched.
    return torch.empty_strided(part.shape, part.stride, dtype=dtype)
