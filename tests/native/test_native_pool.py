"""The pool in C++: its decisions are those of `Residency`; what it waits for, and what it refuses."""

import ctypes
import errno
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.native.library import Change as NativeChange
from penstock.native.library import Options
from penstock.runtime.sparse.units import NativeUnits
from penstock.runtime.stream.native import NativeStreamer
from penstock.schedule.facts.errors import PayloadError, SourceError, StreamError
from penstock.schedule.facts.model import Arena, Extent, Hardware, Pool, Schedule, Storage, WeightFile
from penstock.schedule.plan import Plan
from penstock.schedule.sparse.residency import Residency
from tests.hunt import scaled
from tests.pool_oracle import granules_of, served
from tests.runtime.arena.native_arena import payload_of
from tests.runtime.stream.cases import READ
from tests.schedule.sparse.test_units_resident import of_one_route, random_problem

pytestmark = pytest.mark.usefixtures("native")

PAGE = 4096
KINDS = ("drop", "bring", "ahead")


def on_pages(pool, traces):
    """A problem of any granule as one of pages: all distances in memory grow by the same factor."""
    factor = PAGE // 64

    def spread(read):
        view = read.view
        stride = tuple(factor * one for one in view.stride)
        return replace(read, view=replace(view, stride=stride, offset=factor * view.offset))

    traces = tuple(
        replace(trace, steps=tuple(replace(s, sparse=tuple(map(spread, s.sparse))) for s in trace.steps))
        for trace in traces
    )
    reads = {one.storage: one for trace in traces for step in trace.steps for one in step.sparse}
    layout, end = [-1] * len(pool.layout), 0
    for s, read in reads.items():
        layout[s] = -(-end // PAGE) * PAGE + pool.layout[s] % PAGE
        end = layout[s] + read.unit(read.count - 1)[1]
    found = Pool(1, PAGE, tuple(layout))
    each = [[len(granules_of(found, one, n)) for n in range(one.count)] for one in reads.values()]
    least, most = max(map(max, each)), sum(map(sum, each))
    room = least + pool.nbytes % (most - least + 1)
    return replace(found, nbytes=room * PAGE + pool.nbytes % PAGE), traces


class Both:
    """A native pool whose reads bring nothing, or fail while `failing`, and beside it Python's policy."""

    def __init__(self, pool, traces):
        self.failing = False
        self.before = lambda offset: None  # called with a read's offset in the file
        self._callback = READ(self._read)
        options = Options(readers=1, read=ctypes.cast(self._callback, ctypes.c_void_p))
        plan = plan_of(pool, traces)
        self.streamer = NativeStreamer(Path("nowhere"), payload_for(pool, traces), plan, options)
        self.native = NativeUnits(self.streamer, plan, [f"w{s}" for s in range(len(pool.layout))])
        self.python = Residency(pool, traces)

    def _read(self, _, file, offset, address, nbytes):
        self.before(offset)
        return errno.EIO if self.failing else 0

    def close(self):
        self.streamer.close()
        self.streamer.free()

    def begin(self, graph):
        self.streamer.begin(graph)
        self.python.begin()

    def read(self, graph, step, numbers, storage):
        parts = self.native.ask(graph, step, numbers)
        self.python.ask(graph, step, numbers)
        assert parts == self.python.parts(storage, numbers)
        for part in parts or [[]]:
            self.part(graph, step, part, alone=len(parts) < 2)

    def part(self, graph, step, part, *, alone=True):
        change = self.python.acquire(graph, step, part, alone=alone)
        fails = self.failing and any(change.granules[u][0] < change.granules[u][1] for u in change.bring)
        try:
            with self.native.hold(graph, step, part, alone=alone):
                assert not fails
                assert self.change() == in_order(change)
            self.python.release(graph, step, part)
        except SourceError:
            self.python.reset()
        self.same_sizes()

    def same_sizes(self):
        assert self.native.held_bytes == self.python.held_bytes
        assert self.native.peak_bytes == self.python.peak_bytes

    def change(self):
        """What the last hold has changed, in order."""
        library, engine = self.streamer._library, self.streamer._open()
        count = library.ps_units_changes(engine, None, 0)
        found = (NativeChange * count)()
        assert library.ps_units_changes(engine, found, count) == count
        return [(KINDS[one.kind], one.storage, one.unit, one.first, one.stop) for one in found]


def in_order(change):
    gone = [("drop", *unit, 0, 0) for unit in change.drop]
    came = [(kind, *u, *change.granules[u]) for kind in KINDS[1:] for u in getattr(change, kind)]
    return [*gone, *came]


def plan_of(pool, traces):
    """A plan in which nothing streams beside the pool."""
    none = (-1,) * len(pool.layout)
    return Plan(
        budget=pool.nbytes,
        arena=Arena("contiguous", "anonymous", 64, none, ()),
        arena_bytes=0,
        outside=(),
        addresses=none,
        resident=(),
        boundary=(),
        wrap="overlap",
        schedules=tuple(Schedule(trace.graph, (), (), 0) for trace in traces),
        traces=traces,
        hardware=Hardware("toy", 1e9, 1e9, 1e9, 0),
        pool=pool,
    )


def payload_for(pool, traces):
    """Storages that end with their last unit, one behind the other in a file."""
    sizes = [0] * len(pool.layout)
    for trace in traces:
        for read in (one for step in trace.steps for one in step.sparse):
            sizes[read.storage] = read.unit(read.count - 1)[1]
    ends = list(accumulate(sizes, initial=0))
    storages = [
        Storage(nbytes, "streamable", (Extent(0, start, 0, nbytes),), phase=max(place, 0) % 64)
        for nbytes, start, place in zip(sizes, ends, pool.layout, strict=False)
    ]
    return payload_of([WeightFile("units", ends[-1], 0, 0, "", "")], storages)


@contextmanager
def both(pool, traces):
    engines = Both(pool, traces)
    try:
        yield engines
    finally:
        engines.close()


def drive(engines, traces, dice, calls):
    """Random calls, of which some end in the middle, and some find a disk that fails."""
    for _ in range(calls):
        trace = dice.choice(traces)
        reads = [(k, one) for k, step in enumerate(trace.steps) for one in served(step, engines.native.pool)]
        named = {}
        for route in {one.route for _, one in reads}:
            count = min(one.count for _, one in reads if one.route == route)
            some = dice.sample(range(count), dice.randint(0, min(count, 8)))
            named[route] = sorted({n // 2 if dice.random() < 0.5 else n for n in some})
        ends = dice.randrange(len(reads) + 1) if dice.random() < 0.1 else len(reads)
        engines.begin(trace.graph)
        engines.failing = dice.random() < 0.1
        for k, one in reads[:ends]:
            engines.read(trace.graph, k, named[one.route], one.storage)
        engines.failing = False


@pytest.mark.random
@given(st.integers(0, 1 << 32))
@settings(max_examples=scaled(150), deadline=None)
def test_decisions_are_those_of_the_policy_in_python(seed):
    dice = Random(seed)
    pool, traces = on_pages(*random_problem(dice))
    with both(pool, traces) as engines:
        drive(engines, traces, dice, calls=20)


@pytest.mark.parametrize(("later", "calls", "leaves"), [(600, 1200, 1), (2500, 5000, 0)])
def test_decisions_are_the_same_when_units_are_long_forgotten(later, calls, leaves):
    """Unit 1 leaves, and not unit 0, which was asked for later, until nothing of either is remembered."""
    pool, trace = of_one_route(PAGE, nbytes=3 * PAGE)
    with both(replace(pool, granule=PAGE), (trace,)) as engines:
        for call in range(calls):
            numbers = [{0: 1, later: 0}.get(call, 2 + call % 14)]
            engines.python.ask(0, 0, numbers)
            engines.native.ask(0, 0, numbers)
        engines.begin(0)
        engines.part(0, 0, [0, 1])
        engines.part(0, 0, [3, 4])
        assert engines.change()[0] == ("drop", 0, leaves, 0, 0)


@pytest.mark.parametrize("units", [[3, 3], [4, 3], [-1], [16], [2, 1 << 40]])
def test_units_that_cannot_be_are_refused(units):
    pool, trace = of_one_route(4096, nbytes=5 * PAGE)
    with both(replace(pool, granule=PAGE), (trace,)) as engines:
        engines.begin(0)
        with pytest.raises(StreamError, match="of storage 0, which has 16: name each once, ascending"):
            engines.native.ask(0, 0, units)
        with (
            pytest.raises(StreamError, match="name each once, ascending"),
            engines.native.hold(0, 0, units, alone=True),
        ):
            pass
        for graph, step in ((0, 7), (0, -1), (3, 0)):
            with pytest.raises(StreamError, match="reads no units that the pool of the plan has"):
                engines.native.ask(graph, step, [1])
        engines.read(0, 0, [1, 2], 0)


Spoil = Callable[[Plan], Plan]


def with_read(plan, **changes):
    """The plan whose only read by units has another view."""
    (trace,) = plan.traces
    (step,) = trace.steps
    (read,) = step.sparse
    read = replace(read, view=replace(read.view, **changes))
    return replace(plan, traces=(replace(trace, steps=(replace(step, sparse=(read,)),)),))


def with_pool(plan, **changes):
    assert plan.pool is not None
    return replace(plan, pool=replace(plan.pool, **changes))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: with_pool(p, granule=0), "the pool has no such shape"),
        (lambda p: with_pool(p, nbytes=-1), "the pool has no such shape"),
        (lambda p: with_pool(p, layout=(0, 0)), "the pool has no such shape"),
        (lambda p: with_pool(p, layout=(8,)), "no place in the pool, or another phase"),
        (lambda p: with_pool(p, layout=(1 << 62,)), "expected a whole number"),
        (lambda p: with_pool(p, nbytes=PAGE - 1), "one does not fit into the pool"),
        (lambda p: with_read(p, storage=1), "reads units of no storage"),
        (lambda p: with_read(p, storage=-1), "reads units of no storage"),
        (lambda p: with_read(p, dtype="int17"), "reads units of no tensor"),
        (lambda p: with_read(p, dtype="float"), "reads units of no tensor"),
        (lambda p: with_read(p, shape=(), stride=()), "reads units of no tensor"),
        (lambda p: with_read(p, stride=(4096,)), "reads units of no tensor"),
        (lambda p: with_read(p, shape=(17, 4096)), "reads beyond its storage"),
        (lambda p: with_read(p, shape=(1 << 50, 1 << 50)), "reads beyond its storage"),
        (lambda p: with_read(p, shape=(0, 4096)), "reads beyond its storage"),
        (lambda p: with_read(p, shape=(1 << 62, 1 << 62)), "expected a whole number"),
        (lambda p: with_read(p, stride=(4096, 1 << 49)), "reads beyond its storage"),
        (lambda p: with_read(p, stride=(-1, 1)), "reads beyond its storage"),
        (lambda p: with_read(p, offset=1), "reads beyond its storage"),
        (lambda p: with_read(p, offset=-1), "reads beyond its storage"),
        (lambda p: with_read(p, dtype="int64"), "reads beyond its storage"),
        (lambda p: with_read(p, shape=(8, 4096), stride=(4095, 1)), "reads units that overlap"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_before_a_byte_is_read(spoil, words):
    pool, trace = of_one_route(4096, nbytes=5 * PAGE)
    pool = replace(pool, granule=PAGE)
    options = Options(readers=1, read=ctypes.cast(READ(lambda *_: errno.EIO), ctypes.c_void_p))
    plan, payload = plan_of(pool, (trace,)), payload_for(pool, (trace,))
    with pytest.raises(PayloadError, match=words):
        NativeStreamer(Path("nowhere"), payload, spoil(plan), options)


def test_two_storages_of_a_pool_share_no_granule_and_a_step_reads_units_of_one():
    pool, trace = of_one_route(4096, 4096, nbytes=5 * PAGE)
    pool = replace(pool, granule=PAGE, layout=(0, 16 * PAGE))
    options = Options(readers=1, read=ctypes.cast(READ(lambda *_: errno.EIO), ctypes.c_void_p))
    payload = payload_for(pool, (trace,))
    near = replace(pool, layout=(0, 15 * PAGE))
    with pytest.raises(PayloadError, match="shares a granule of the pool with another"):
        NativeStreamer(Path("nowhere"), payload, plan_of(near, (trace,)), options)
    first, second = trace.steps
    joined = replace(trace, steps=(replace(first, sparse=(*first.sparse, *second.sparse)),))
    with pytest.raises(PayloadError, match="reads units of two storages"):
        NativeStreamer(Path("nowhere"), payload, plan_of(pool, (joined,)), options)
    (read,) = first.sparse
    half = replace(read, view=replace(read.view, shape=(8, 8192), stride=(8192, 1)))
    other = replace(trace, steps=(first, replace(second, sparse=(half,))))
    with pytest.raises(PayloadError, match="reads other units of a storage than another step"):
        NativeStreamer(Path("nowhere"), payload, plan_of(pool, (other,)), options)
