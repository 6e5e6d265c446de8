"""Plans run on a simulated device without a model: what steps find is compared with the files."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import torch

from penstock.runtime.device.simulated import SimDevice, SimStreamer
from penstock.runtime.device.streamer import DeviceStreamer, PassOrder
from penstock.runtime.device.weights import DeviceWeights
from penstock.schedule.facts.model import Extent, Hardware, Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from tests.runtime.device.simulated.ordered_device import OrderedDevice

UNIT = 256
HARDWARE = Hardware("toy", 1e12, 1e11, 1e9, 100, disk_bytes_per_s=0.5e9, disk_latency_ns=50)


class BrokenError(Exception):
    """What a pass raises that breaks."""


class WrongBytesError(AssertionError):
    """A step found other bytes than its weights'."""


class SlowPassError(AssertionError):
    """A pass took another time than it should."""


class CountError(AssertionError):
    """Other bytes were moved, other steps missed, or the host waited more often, than should have been."""


@dataclass(frozen=True)
class Memory:
    """A source of weights that are nowhere but here, each byte telling its storage and place."""

    contents: bytes

    files: tuple[()] = ()

    def read_into(self, file, offset, address, nbytes):
        assert file == 0
        ctypes.memmove(address, self.contents[offset : offset + nbytes], nbytes)


@cache
def contents_of(nbytes):
    return bytes((torch.arange(nbytes) * 7919 % 251).to(torch.uint8).tolist())


@dataclass(frozen=True)
class Case:
    """A plan, the weights it is for, and what runs: (method, how) in turn, on so many streams in turn.

    Nothing is planned before a test asks, since pytest collects the cases of all tests in each worker.
    """

    name: str
    storages: tuple[Storage, ...]
    planned: Callable[[], Plan]
    passes: tuple[tuple[int, str], ...]
    streams: int = 1

    @property
    def plan(self):
        return self.planned()

    @property
    def source(self):
        return Memory(contents_of(sum(s.nbytes for s in self.storages)))


def storages_of(sizes):
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return tuple(
        Storage(size, "streamable", (Extent(0, start, 0, size),))
        for size, start in zip(sizes, starts, strict=True)
    )


def trace_of(graph, reads):
    steps = tuple(Step(f"step.{k}", tuple(r), 30, 200) for k, r in enumerate(reads))
    return Trace(f"method_{graph}", graph, "", steps, 40, 10, "modelled")


def case(
    name, units, reads, share, passes, *, wrap="overlap", host=None, in_turn=False, streams=1, beside=()
):
    storages = storages_of([UNIT * n for n in units])
    storages = (*storages[:-1], replace(storages[-1], kind="mutable"))  # stays, outside the arena
    traces = tuple(trace_of(graph, steps) for graph, steps in enumerate(reads))
    if in_turn:
        traces = tuple(replace(trace, follows=(trace.graph or len(traces)) - 1) for trace in traces)

    @cache
    def planned():
        arena = packed_arena(storages, traces, kind="contiguous", granule=64, alignment=64)
        facts = {"hardware": HARDWARE, "wrap": wrap, "host": host, "beside": frozenset(beside)}
        problem = Problem(storages, traces, arena, **facts)
        least = floor(problem).upper_bytes
        return make_plan(problem, least + int(share * (sum(s.nbytes for s in storages) - least)))

    return Case(name, storages, planned, tuple(passes), streams)


UNEVEN = [4, 1, 6, 2, 2, 9, 3, 1, 5, 2, 3]
IN_TURN = [[k] for k in range(10)]  # and an eleventh that is written
AGAIN = [[0], [1, 2], [3], [0, 4], [5], [1, 6], [7], [8], [2, 9], [0]]
TURNS = [(graph, "in order") for graph in (0, 1, 0, 1, 1, 0, 0, 1)]


@cache
def cases():
    equal = [4] * 11
    plain = [(0, "in order")] * 3
    return (
        case("equal", equal, [IN_TURN], 0.3, plain),
        case("floor", equal, [IN_TURN], 0.0, plain),
        case("nearly all", equal, [IN_TURN], 0.9, plain, beside=(0, 1, 7)),
        case("uneven", UNEVEN, [IN_TURN], 0.4, plain),
        case("read again", UNEVEN, [AGAIN], 0.3, plain),
        case("barrier", UNEVEN, [IN_TURN], 0.3, plain, wrap="barrier"),
        case(
            "two methods",
            equal,
            [IN_TURN, IN_TURN[:6]],
            0.3,
            [(0, "in order"), (1, "in order"), (1, "in order"), (0, "in order"), (1, "in order")],
        ),
        case("in turn", equal, [IN_TURN, IN_TURN[:1:-1]], 0.3, TURNS, in_turn=True),
        case("misses", UNEVEN, [AGAIN], 0.3, [(0, "in order"), (0, "backwards"), (0, "in order")]),
        case("breaks", UNEVEN, [AGAIN], 0.3, [(0, "in order"), (0, "raises"), (0, "in order")]),
        case(
            "streams",
            UNEVEN,
            [AGAIN],
            0.3,
            [plain[0], (0, "backwards"), plain[0], (0, "raises"), *plain[:2]],
            streams=2,
        ),
    )


@cache
def disk_cases():
    """Cases in which a host holds a part, or nothing, of what streams."""
    plain = [(0, "in order")] * 4
    in_between = [(0, "in order"), (0, "in order")]
    return (
        case("half", UNEVEN, [IN_TURN], 0.2, plain, host=14 * UNIT),
        case("a ring only", UNEVEN, [IN_TURN], 0.2, plain, host=UNIT),
        case("a granule", UNEVEN, [IN_TURN], 0.5, plain, host=64),
        case("read again", UNEVEN, [AGAIN], 0.2, plain, host=9 * UNIT),
        case("barrier", UNEVEN, [IN_TURN], 0.4, plain, wrap="barrier", host=5 * UNIT),
        case(
            "two methods",
            UNEVEN,
            [IN_TURN, IN_TURN[:6]],
            0.2,
            [(0, "in order"), (1, "in order"), (1, "in order"), (0, "in order")],
            host=9 * UNIT,
        ),
        case("in turn", UNEVEN, [IN_TURN, IN_TURN[:1:-1]], 0.2, TURNS, host=9 * UNIT, in_turn=True),
        case("misses", UNEVEN, [AGAIN], 0.3, [plain[0], (0, "backwards"), *in_between], host=6 * UNIT),
        case("breaks", UNEVEN, [AGAIN], 0.3, [plain[0], (0, "raises"), *in_between], host=6 * UNIT),
        case("streams", UNEVEN, [AGAIN], 0.5, plain, host=6 * UNIT, streams=2),
    )


@cache
def small_cases():
    """Few storages, two of the plans behind a host, for all changes of their plans."""
    in_turn, again, plain = [[k] for k in range(5)], [[0], [1], [2], [0, 3], [4]], [(0, "in order")] * 3
    return (
        case("in turn", [2, 1, 3, 2, 2, 1], [in_turn, in_turn[:0:-1]], 0.4, TURNS, in_turn=True),
        case("host", [2, 1, 3, 2, 1, 1], [in_turn], 0.2, plain, host=4 * UNIT),
        case("host, read again", [2, 1, 3, 1, 2, 1], [again], 0.3, plain, host=3 * UNIT),
    )


class Parts:
    """What the parts of a run get to work with: what they should. A fault alters one of these."""

    def device(self, device):
        """What weights and streamer are given as the device."""
        return device

    def source(self, source):
        """What the device is given to read from."""
        return source

    def plan_of_weights(self, plan):
        return plan

    def plan_of_streamer(self, plan):
        return plan

    def streamer(self, streamer):
        """What the program's probes call."""
        return streamer

    def begin_pass(self, how):
        """A pass of this kind comes next."""


@dataclass(frozen=True)
class Totals:
    """What a run took: virtual times of its passes, bytes that were to be moved and were copied, misses.

    `waits` is how often the host waited in a pass for anything but a disk.
    """

    times: tuple[int, ...]
    bytes_moved: int
    copied_ns: int
    misses: int
    waits: int


@dataclass
class Run:
    """A case on a simulated device. What the kernels read is told by the plan of the case, not by `parts`."""

    case: Case
    device: SimDevice
    parts: Parts = field(default_factory=Parts)

    def __post_init__(self):
        one, parts = self.case, self.parts
        device = parts.device(self.device)
        self.weights = DeviceWeights(
            parts.plan_of_weights(one.plan), one.storages, device, parts.source(one.source)
        )
        plan = parts.plan_of_streamer(one.plan)
        inner = parts.streamer(DeviceStreamer(plan, one.storages, device, self.weights, poison=True))
        self.streamer = SimStreamer(inner, self.device, self.weights, one.plan.traces)
        self.order = PassOrder(device)
        others = (self.device.open_kernels(str(number)) for number in range(1, one.streams))
        self.streams = [self.device.current_stream(), *others]

    def go(self):
        """Run all passes, and compare what each step finds."""
        times = []
        for storage in self.case.plan.outside:
            self._compare(storage)
        waits = self._waits
        for number, (graph, how) in enumerate(self.case.passes):
            began = self.device.now_ns
            self.parts.begin_pass(how)
            stream = self.streams[number % len(self.streams)]
            with suppress(BrokenError), self.device.kernels_on(stream), self.order.turn():
                {"in order": self._in_order, "backwards": self._backwards, "raises": self._raises}[how](graph)
            times.append(self.device.now_ns - began)
        counters, copied_ns, waits = self.streamer.counters, self.device.copied_ns, self._waits - waits
        self.streamer.close()
        self.order.close()
        self.device.close()
        return Totals(tuple(times), counters.bytes_moved, copied_ns, counters.misses, waits)

    @property
    def _waits(self):
        return self.device.waits["a stream"] + self.device.waits["the device"]

    def _in_order(self, graph):
        probed = self.streamer.probed(graph)
        self.streamer.begin(graph)
        for step in range(len(self.case.plan.traces[graph].steps)):
            self._step(graph, step, probed=step in probed)
        self.streamer.end(graph)
        if self.case.plan.wrap == "barrier":
            # What follows a pass, the replay of a graph for example, finds all copies done.
            memory = self.weights.arena
            self.device.kernels_touch(memory, 0, memory.numel(), "what follows the pass")

    def _backwards(self, graph):
        self.streamer.begin(graph)
        for step in reversed(self.streamer.probed(graph)):
            self._step(graph, step, probed=True)
        self.streamer.end(graph)

    def _raises(self, graph):
        probed = self.streamer.probed(graph)
        self.streamer.begin(graph)
        for step in probed[: len(probed) // 2]:
            self._step(graph, step, probed=True)
        # The last step's kernels are enqueued, and it is never released.
        self.streamer.acquire(graph, probed[len(probed) // 2])
        self.streamer.abort()
        raise BrokenError

    def _step(self, graph, step, *, probed):
        if probed:
            self.streamer.acquire(graph, step)
        for storage in self.case.plan.traces[graph].steps[step].reads:
            self._compare(storage)
        if probed:
            self.streamer.release(graph, step)

    def _compare(self, storage):
        """What lies where the plan has a storage is what the file has."""
        found = self.weights.ranges_of(storage)
        contents = self.case.source.contents
        extents = self.case.storages[storage].extents
        expected = b"".join(contents[e.file_offset : e.file_offset + e.nbytes] for e in extents)
        if not expected:
            return
        if found is None or found[0][found[1] : found[2]].numpy().tobytes() != expected:
            raise WrongBytesError(f"{self.case.name}: storage {storage} is not what the file has")


POLICIES = (("latest", 0), ("earliest", 0), ("lagging", 0), ("lagging", 1), ("random", 1))


@cache
def totals_of(one, policy, seed):
    """Those of a run without a fault, whose steady passes take what the plan predicts."""
    totals = Run(one, OrderedDevice(HARDWARE, policy=policy, seed=seed)).go()
    assert _steady(one, totals), totals
    assert not totals.waits, totals
    return totals


def run_everywhere(parts, policies=POLICIES):
    """All cases in all orders; raises what the first to fail raises, or else that one took something else."""
    odd = []
    for (policy, seed), one in product(policies, (*cases(), *disk_cases())):
        totals = Run(one, OrderedDevice(HARDWARE, policy=policy, seed=seed), parts).go()
        expected = totals_of(one, policy, seed)
        # How far copies are ahead in the end is the disk's affair, where there is one.
        if one in disk_cases():
            totals = replace(totals, bytes_moved=expected.bytes_moved, copied_ns=expected.copied_ns)
        if replace(totals, times=expected.times) != expected:
            odd.append(CountError(f"{one.name}: {totals}, expected {expected}"))
        elif not _steady(one, totals):
            odd.append(SlowPassError(f"{one.name}: {totals}, expected {expected}"))
    if odd:
        raise min(odd, key=lambda error: isinstance(error, SlowPassError))


def _steady(one, totals):
    """Whether the last of several passes alike took what the plan predicts."""
    alike = len(one.plan.traces) == 1 and {how for _, how in one.passes[-2:]} == {"in order"}
    return not alike or totals.times[-1] == one.plan.schedules[0].predicted_ns
