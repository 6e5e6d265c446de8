"""Plans run on a simulated device without a model: what steps find is compared with the files."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from penstock.runtime.device import memory as device_memory
from penstock.runtime.device import streamer as device_streamer
from penstock.runtime.sim.device import Policy, SimDevice
from penstock.runtime.sim.streamer import SimStreamer
from penstock.schedule.facts.model import Extent, Hardware, Step, Storage, Trace, Wrap
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena

UNIT = 256
HARDWARE = Hardware("toy", 1e12, 1e11, 1e9, 100, disk_bytes_per_s=0.5e9, disk_latency_ns=50)


class WrongBytesError(AssertionError):
    """A step found other bytes than its weights'."""


class SlowPassError(AssertionError):
    """A steady pass took another time than its plan predicts."""


@dataclass(frozen=True)
class Memory:
    """A source of weights that are nowhere but here, each byte telling its storage and place."""

    contents: bytes

    files: tuple[()] = ()

    def read_into(self, file: int, offset: int, address: int, nbytes: int) -> None:
        assert file == 0
        ctypes.memmove(address, self.contents[offset : offset + nbytes], nbytes)


@cache
def contents_of(nbytes: int) -> bytes:
    return bytes((torch.arange(nbytes) * 7919 % 251).to(torch.uint8).tolist())


@dataclass(frozen=True)
class Case:
    """A plan, the weights it is for, and what runs: (method, how) in turn."""

    name: str
    storages: tuple[Storage, ...]
    plan: Plan
    passes: tuple[tuple[int, str], ...]

    @property
    def source(self) -> Memory:
        return Memory(contents_of(sum(s.nbytes for s in self.storages)))


def storages_of(sizes: Sequence[int]) -> tuple[Storage, ...]:
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(
        Storage(size, "streamable", (Extent(0, start, 0, size),))
        for size, start in zip(sizes, starts, strict=True)
    )


def trace_of(graph: int, reads: Sequence[Sequence[int]]) -> Trace:
    steps = tuple(Step(f"step.{k}", tuple(r), 30, 200) for k, r in enumerate(reads))
    return Trace(f"method_{graph}", graph, "", steps, 40, 10, "modelled")


def case(
    name: str,
    units: Sequence[int],
    reads: Sequence[Sequence[Sequence[int]]],
    share: float,
    passes: Sequence[tuple[int, str]],
    *,
    wrap: Wrap = "overlap",
    host: int | None = None,
) -> Case:
    storages = storages_of([UNIT * n for n in units])
    storages = (*storages[:-1], replace(storages[-1], kind="mutable"))  # stays, outside the arena
    traces = tuple(trace_of(graph, steps) for graph, steps in enumerate(reads))
    arena = packed_arena(storages, traces, kind="contiguous", granule=64, alignment=64)
    least = floor(Demand(storages, traces, arena)).upper_bytes
    budget = least + int(share * (sum(s.nbytes for s in storages) - least))
    plan = make_plan(Problem(storages, traces, arena, hardware=HARDWARE, wrap=wrap, host=host), budget)
    return Case(name, storages, plan, tuple(passes))


@cache
def cases() -> tuple[Case, ...]:
    in_turn = [[k] for k in range(10)]  # and an eleventh that is written
    equal = [4] * 11
    uneven = [4, 1, 6, 2, 2, 9, 3, 1, 5, 2, 3]
    again = [[0], [1, 2], [3], [0, 4], [5], [1, 6], [7], [8], [2, 9], [0]]
    plain = [(0, "in order")] * 3
    return (
        case("equal", equal, [in_turn], 0.3, plain),
        case("floor", equal, [in_turn], 0.0, plain),
        case("nearly all", equal, [in_turn], 0.9, plain),
        case("uneven", uneven, [in_turn], 0.4, plain),
        case("read again", uneven, [again], 0.3, plain),
        case("barrier", uneven, [in_turn], 0.3, plain, wrap="barrier"),
        case(
            "two methods",
            equal,
            [in_turn, in_turn[:6]],
            0.3,
            [(0, "in order"), (1, "in order"), (1, "in order"), (0, "in order"), (1, "in order")],
        ),
        case("misses", uneven, [again], 0.3, [(0, "in order"), (0, "backwards"), (0, "in order")]),
        case("breaks", uneven, [again], 0.3, [(0, "in order"), (0, "raises"), (0, "in order")]),
    )


@cache
def disk_cases() -> tuple[Case, ...]:
    """Cases in which a host holds a part, or nothing, of what streams."""
    in_turn = [[k] for k in range(10)]
    uneven = [4, 1, 6, 2, 2, 9, 3, 1, 5, 2, 3]
    again = [[0], [1, 2], [3], [0, 4], [5], [1, 6], [7], [8], [2, 9], [0]]
    plain = [(0, "in order")] * 4
    in_between = [(0, "in order"), (0, "in order")]
    return (
        case("half", uneven, [in_turn], 0.2, plain, host=14 * UNIT),
        case("a ring only", uneven, [in_turn], 0.2, plain, host=UNIT),
        case("a granule", uneven, [in_turn], 0.5, plain, host=64),
        case("read again", uneven, [again], 0.2, plain, host=9 * UNIT),
        case("barrier", uneven, [in_turn], 0.4, plain, wrap="barrier", host=5 * UNIT),
        case(
            "two methods",
            uneven,
            [in_turn, in_turn[:6]],
            0.2,
            [(0, "in order"), (1, "in order"), (1, "in order"), (0, "in order")],
            host=9 * UNIT,
        ),
        case("misses", uneven, [again], 0.3, [plain[0], (0, "backwards"), *in_between], host=6 * UNIT),
        case("breaks", uneven, [again], 0.3, [plain[0], (0, "raises"), *in_between], host=6 * UNIT),
    )


@cache
def small_disk_cases() -> tuple[Case, ...]:
    """Few storages behind a host, for all changes of their plans."""
    in_turn, again, plain = [[k] for k in range(5)], [[0], [1], [2], [0, 3], [4]], [(0, "in order")] * 3
    return (
        case("host", [2, 1, 3, 2, 1, 1], [in_turn], 0.2, plain, host=4 * UNIT),
        case("host, read again", [2, 1, 3, 1, 2, 1], [again], 0.3, plain, host=3 * UNIT),
    )


@dataclass
class Run:
    """A case on a device, with the streamer of `streamers` and the weights of `memories`."""

    case: Case
    device: SimDevice
    streamers: ModuleType = device_streamer
    memories: ModuleType = device_memory

    def __post_init__(self) -> None:
        one = self.case
        self.weights: Any = self.memories.DeviceWeights(one.plan, one.storages, self.device, one.source)
        inner = self.streamers.DeviceStreamer(one.plan, one.storages, self.device, self.weights, poison=True)
        self.streamer = SimStreamer(inner, self.device, self.weights, one.plan.traces)

    def go(self) -> list[int]:
        """Run all passes; returns the virtual time that each took."""
        times = []
        for storage in self.case.plan.outside:
            self._compare(storage)
        for graph, how in self.case.passes:
            began = self.device.now_ns
            {"in order": self._in_order, "backwards": self._backwards, "raises": self._raises}[how](graph)
            times.append(self.device.now_ns - began)
        self.streamer.close()
        self.device.close()
        return times

    def _in_order(self, graph: int) -> None:
        method = self.streamer.methods[graph]
        self.streamer.begin(graph)
        for step in range(method.steps):
            self._step(graph, step, probed=step in method.probed)
        self.streamer.end(graph)
        if self.case.plan.wrap == "barrier":
            # What follows a pass, the replay of a graph for example, finds all copies done.
            memory = self.weights.arena
            self.device.kernels_read(memory, 0, memory.numel(), "what follows the pass")

    def _backwards(self, graph: int) -> None:
        method = self.streamer.methods[graph]
        self.streamer.begin(graph)
        for step in reversed(method.probed):
            self._step(graph, step, probed=True)
        self.streamer.end(graph)

    def _raises(self, graph: int) -> None:
        method = self.streamer.methods[graph]
        self.streamer.begin(graph)
        for step in method.probed[: len(method.probed) // 2]:
            self._step(graph, step, probed=True)
        self.streamer.abort()

    def _step(self, graph: int, step: int, *, probed: bool) -> None:
        if probed:
            self.streamer.acquire(graph, step)
        for storage in self.case.plan.traces[graph].steps[step].reads:
            self._compare(storage)
        if probed:
            self.streamer.release(graph, step)

    def _compare(self, storage: int) -> None:
        """What lies where the plan has a storage is what the file has."""
        found = self.weights.ranges_of(storage)
        contents = self.case.source.contents
        extents = self.case.storages[storage].extents
        expected = b"".join(contents[e.file_offset : e.file_offset + e.nbytes] for e in extents)
        if not expected:
            return
        if found is None or bytes(found[0][found[1] : found[2]].tolist()) != expected:
            raise WrongBytesError(f"{self.case.name}: storage {storage} is not what the file has")


POLICIES: tuple[tuple[Policy, int], ...] = (
    ("latest", 0),
    ("earliest", 0),
    ("lagging", 0),
    ("lagging", 1),
    ("random", 1),
)


def run_everywhere(
    *,
    streamers: ModuleType = device_streamer,
    memories: ModuleType = device_memory,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> None:
    """All cases in all orders; raises what the first to fail raises."""
    for one in (*cases(), *disk_cases()):
        for policy, seed in POLICIES:
            device = SimDevice(HARDWARE, policy=policy, seed=seed)
            times = Run(replace(one, plan=change(one.plan)), device, streamers, memories).go()
            steady = len(one.plan.traces) == 1 and {how for _, how in one.passes[-2:]} == {"in order"}
            if steady and times[-1] != one.plan.schedules[0].predicted_ns:
                raise SlowPassError(f"{one.name}: {times} ns, expected {one.plan.schedules[0].predicted_ns}")
