"""Plans over weight files of random bytes, and what they need to run on either engine.

Reads come through a function of the test's own, which is late at random and fails where it is told to. Bytes
that are dropped are overwritten with 0xFF. So a byte that is read too early or too late, or that comes from
elsewhere, is wrong. A mapped plan has files, which are the engines' own to read.
"""

import ctypes
import errno
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from penstock.native.library import Options
from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.files.source import Source
from penstock.runtime.stream.native import NativeStreamer
from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Hardware, Part, Step, Storage, Trace, WeightFile
from penstock.schedule.facts.problem import Problem
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import mapped_arena, packed_arena
from tests import engine_log
from tests.engine_log import Event
from tests.runtime.arena.native_arena import files_of, options_of, payload_of
from tests.schedule.traces import hardwares, in_files, storages_and_traces

PAGE, HUGE_PAGE = 4096, 2 << 20
READ = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
)

LOG = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)

EVENTS = ("fill", "filled", "drop")

KINDS = {"contiguous": 64, "paged": PAGE, "mapped": PAGE, "adaptive": HUGE_PAGE}
"""The granule of each kind of arena."""

UNITS = {kind: 5 * PAGE for kind in KINDS} | {"adaptive": HUGE_PAGE}
"""The bytes of each weight."""


class PythonStreamer(ArenaStreamer):
    """Python's streamer with an arena of its own, behind the interface of the native one."""

    def __init__(self, plan, storages, arena, **options):
        self.arena = arena
        super().__init__(plan, storages, arena, **options)

    @property
    def held_bytes(self):
        return self.arena.held_bytes

    @property
    def peak_bytes(self):
        return self.arena.peak_bytes

    def view(self, part):
        return self.arena.view(part)

    def free(self):
        self.arena.close()


class LoggedArena:
    """An arena that tells what is done to it, as `ps_log` does."""

    def __init__(self, arena, log):
        self._arena, self._log = arena, log

    def __getattr__(self, name):
        return getattr(self._arena, name)

    def fill(self, start, stop):
        self._log("fill", start, stop)
        try:
            brought = self._arena.fill(start, stop)
        except SourceError:
            self._log("drop", start, stop)
            raise
        self._log("filled", start, stop)
        return brought

    def drop(self, start, stop):
        self._log("drop", start, stop)
        self._arena.drop(start, stop)


class ReadSource:
    """The part of a `Source` that an arena of private memory uses, with a function in place of files."""

    mode = "direct"
    files = ()

    def __init__(self, read):
        self._read = read

    def read_into(self, file, offset, address, nbytes):
        if self._read(0, file, offset, address, nbytes):
            raise SourceError("reading weights failed (Input/output error)")


@dataclass
class Case:
    """A plan over files of random bytes, and what was read of them."""

    storages: tuple[Storage, ...]
    traces: tuple[Trace, ...]
    files: tuple[WeightFile, ...]
    plan: Plan
    seed: int = 0
    folder: Path | None = None
    content: list[bytes] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)
    read_bytes: int = 0
    log: list[Event] = field(default_factory=list)

    def __post_init__(self):
        dice = random.Random(self.seed)
        self.content = [dice.randbytes(file.nbytes) for file in self.files]
        self._late = random.Random(self.seed)
        self._lock = threading.Lock()
        self.read = self._read

    def _read(self, _, file, offset, address, nbytes):
        with self._lock:
            late, self.read_bytes = self._late.random(), self.read_bytes + nbytes
            fails = any(offset <= at < offset + nbytes for at in self.failing)
            self.failing -= set(range(offset, offset + nbytes)) if fails else set()
        if late < 0.2:
            time.sleep(late / 200)
        if fails:
            return errno.EIO
        ctypes.memmove(address, self.content[file][offset : offset + nbytes], nbytes)
        return 0

    def _tell(self, what, start, stop):
        self.log.append((what, start, stop))

    def check_log(self, readers):
        """Have the oracle look at what an engine did."""
        engine_log.check_log(self.storages, self.traces, self.plan, self.log, readers=readers)

    @property
    def payload(self):
        return payload_of(self.files, self.storages)

    def bytes_of(self, storage):
        return b"".join(
            self.content[one.file][one.file_offset :][: one.nbytes] for one in self.storages[storage].extents
        )

    @contextmanager
    def streamer(self, engine, readers=2, *, drop_early=True, room=0, log=True):
        """The engine at work; with files where there is a folder for them. It is freed in the end."""
        source = self._source() if self.folder else ReadSource(self.read)
        if engine == "python":
            arena = open_arena(self.plan, self.storages, source, poison=True)
            arena = LoggedArena(arena, self._tell)
            opened = PythonStreamer(self.plan, self.storages, arena, readers=readers, drop_at_once=drop_early)
        else:
            options = Options(readers=readers, drop_early=drop_early, available=room)
            if log:
                self.events = LOG(lambda _, event, start, stop: self._tell(EVENTS[event], start, stop))
                options.log = ctypes.cast(self.events, ctypes.c_void_p)
            opened = self._native(source, options)
        try:
            yield opened
        finally:
            opened.close()
            opened.free()
            if self.folder:
                source.close()

    def _native(self, source, options):
        options.poison = True
        payload = self.payload
        if self.folder:
            options.opened = options_of(source).opened
            payload = payload_of(files_of(source), self.storages)
        else:
            # Kept, so that it lives as long as the engine may call it.
            self.callback = READ(self.read)
            options.read = ctypes.cast(self.callback, ctypes.c_void_p)
        return NativeStreamer(Path("nowhere"), payload, self.plan, options)

    def _source(self):
        assert self.folder is not None
        for file, content in zip(self.files, self.content, strict=True):
            path = self.folder / file.path
            if not path.exists():
                path.write_bytes(content)
        moved = sum(t.stop - t.start for schedule in self.plan.schedules for t in schedule.transfers)
        repeated = min(moved, sum(one.nbytes for one in self.storages))
        if self.plan.arena.backing == "mapped":
            repeated = 0
        return Source(self.files, self.folder, check=False, repeated=repeated)


@st.composite
def cases(draw, kind):
    storages, traces = draw(storages_and_traces(methods=2))
    scale = 1 if kind == "contiguous" else 61  # so that storages share pages, and fill several
    storages = tuple(replace(one, nbytes=one.nbytes * scale) for one in storages)
    storages, files = in_files(storages, gap=draw(st.sampled_from([0, 64])))
    arena = packed_arena(
        storages,
        traces,
        kind="contiguous" if kind == "contiguous" else "paged",
        granule=KINDS[kind],
        alignment=64,
    )
    if kind == "mapped":
        mapped = mapped_arena(storages, files, granule=PAGE, traces=traces)
        assert mapped is not None
        arena = mapped
    wrap = draw(st.sampled_from(["overlap", "barrier"]))
    problem = Problem(storages, traces, arena, hardware=draw(hardwares()), wrap=wrap)
    lowest = floor(problem).upper_bytes
    total = sum(one.nbytes for one in storages)
    budget = lowest + int(draw(st.floats(0, 1)) * max(0, total - lowest))
    return Case(
        storages, traces, files, make_plan(problem, max(budget, 1), effort=0.1), draw(st.integers(0, 99))
    )


def one_case(kind="contiguous", *, wrap="overlap", folder=None):
    """Six storages, each read by one step of two methods, of which about half stream."""
    steps = tuple(Step(f"s{k}", (k,), 100, 300) for k in range(6))
    traces = tuple(Trace(f"m{graph}", graph, "", steps, 0, 0, "modelled") for graph in range(2))
    return Case(*_planned(kind, wrap, traces, 3), folder=folder)


def turn_case(kind, units, *, folder=None):
    """Twelve storages that a forward reads in order; a backward reads all but the first two in reverse.

    Their calls come in turn, within the memory of `units` of them.
    """
    steps = tuple(Step(f"s{k}", (k,), 100, 300) for k in range(12))
    forward = Trace("forward", 0, "", steps, 0, 0, "modelled", follows=1)
    backward = replace(forward, method="backward", graph=1, steps=steps[:1:-1], follows=0)
    return Case(*_planned(kind, "overlap", (forward, backward), units), folder=folder)


@cache
def _planned(kind, wrap, traces, units):
    nbytes, count = UNITS[kind], len(traces[0].steps)
    storages, files = in_files(tuple(Storage(nbytes, "streamable") for _ in range(count)))
    shape = "contiguous" if kind == "contiguous" else "paged"
    arena = packed_arena(storages, traces, kind=shape, granule=KINDS[kind], alignment=64)
    if kind in ("mapped", "adaptive"):
        mapped = mapped_arena(storages, files, granule=KINDS[kind], traces=traces)
        assert mapped is not None
        arena = mapped
    problem = Problem(storages, traces, arena, hardware=Hardware("test", 1e12, 1e11, 1e10, 10), wrap=wrap)
    return storages, traces, files, make_plan(problem, max(units * nbytes, floor(problem).upper_bytes))


def run_pass(streamer, case, trace, order=None):
    """A pass whose steps read all bytes of their weights."""
    graph = trace.graph
    case.log.append(("begin", graph, 0))
    streamer.begin(graph)
    probed = streamer.probed(graph)
    for k in range(len(trace.steps)) if order is None else order:
        if k in probed:
            streamer.acquire(graph, k)
        case.log.append(("read", graph, k))
        for s in trace.steps[k].reads:
            if s not in case.plan.outside and case.storages[s].nbytes:
                part = Part("", "uint8", (case.storages[s].nbytes,), (1,), s, 0)
                found = bytes(streamer.view(part).numpy().data)
                assert found == case.bytes_of(s), f"step {k} read other bytes of storage {s}"
        case.log.append(("ended", graph, k))
        if k in probed:
            streamer.release(graph, k)
    streamer.end(graph)
