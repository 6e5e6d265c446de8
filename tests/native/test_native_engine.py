"""The native engine: random plans whose every read is compared with the files, faults, and what it refuses.

Reads come through a function of the test's own, which is late at random and fails where it is told to. Bytes
that are dropped are overwritten with 0xFF. So a byte that is read too early or too late, or that comes from
elsewhere, is wrong.
"""

from __future__ import annotations

import ctypes
import errno
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import penstock
from penstock.native.library import Options, library
from penstock.runtime.arena.opening import open_arena
from penstock.runtime.files.source import Source
from penstock.runtime.stream.native import NativeStreamer
from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.schedule.facts.errors import PayloadError, SourceError, StreamError
from penstock.schedule.facts.model import Drop, Hardware, Part, Range, Step, Storage, Trace, WeightFile
from penstock.schedule.facts.problem import Problem
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from tests.schedule.traces import hardwares, in_files, storages_and_traces

PAGE, HUGE_PAGE = 4096, 2 << 20
READ = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
)
ENGINES = ("native", "python")


def test_the_library_is_built_where_the_tests_run() -> None:
    assert library() is not None, "install penstock again where g++ and nlohmann-json3-dev are: make"


@dataclass
class Case:
    """A plan over two files of random bytes, and what the engine did with them."""

    storages: tuple[Storage, ...]
    traces: tuple[Trace, ...]
    files: tuple[WeightFile, ...]
    plan: Plan
    seed: int = 0
    content: list[bytes] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)
    read_bytes: int = 0

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        self.content = [dice.randbytes(file.nbytes) for file in self.files]
        self._late = random.Random(self.seed)
        self._lock = threading.Lock()
        self.callback = READ(self._read)

    def _read(self, _: int, file: int, offset: int, address: int, nbytes: int) -> int:
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

    @property
    def payload(self) -> bytes:
        """What the engine reads of a payload."""
        facts = {"files": map(asdict, self.files), "storages": map(asdict, self.storages)}
        return json.dumps({name: list(some) for name, some in facts.items()}).encode()

    def bytes_of(self, storage: int) -> bytes:
        return b"".join(
            self.content[one.file][one.file_offset :][: one.nbytes] for one in self.storages[storage].extents
        )

    def open(self, readers: int = 2, *, drop_early: bool = True) -> NativeStreamer:
        read = ctypes.cast(self.callback, ctypes.c_void_p)
        options = Options(readers=readers, drop_early=drop_early, poison=True, read=read)
        return NativeStreamer(Path("nowhere"), self.payload, self.plan, options)


@st.composite
def cases(draw, kind: str) -> Case:
    storages, traces = draw(storages_and_traces(methods=2))
    scale = 61 if kind == "paged" else 1  # so that storages share pages, and fill several
    storages = tuple(replace(one, nbytes=one.nbytes * scale) for one in storages)
    storages, files = in_files(storages, gap=draw(st.sampled_from([0, 64])))
    granule = PAGE if kind == "paged" else 64
    arena = packed_arena(storages, traces, kind=kind, granule=granule, alignment=64)
    wrap = draw(st.sampled_from(["overlap", "barrier"]))
    problem = Problem(storages, traces, arena, hardware=draw(hardwares()), wrap=wrap)
    lowest = floor(problem).upper_bytes
    total = sum(one.nbytes for one in storages)
    budget = lowest + int(draw(st.floats(0, 1)) * max(0, total - lowest))
    return Case(
        storages, traces, files, make_plan(problem, max(budget, 1), effort=0.1), draw(st.integers(0, 99))
    )


def run_pass(streamer: NativeStreamer, case: Case, trace: Trace, order: list[int] | None = None) -> None:
    """A pass whose steps read all bytes of their weights, at once and once more before they end."""
    streamer.begin(trace.graph)
    probed = streamer.probed(trace.graph)
    for k in range(len(trace.steps)) if order is None else order:
        if k in probed:
            streamer.acquire(trace.graph, k)
        for s in trace.steps[k].reads:
            if s not in case.plan.outside and case.storages[s].nbytes:
                part = Part(
                    name="", storage=s, dtype="uint8", shape=(case.storages[s].nbytes,), stride=(1,), offset=0
                )
                found = bytes(streamer.view(part).numpy().data)
                assert found == case.bytes_of(s), f"step {k} read other bytes of storage {s}"
        if k in probed:
            streamer.release(trace.graph, k)
    streamer.end(trace.graph)


def moved_by_python(case: Case, folder: Path, graphs: list[int]) -> tuple[int, int, int]:
    """Bytes moved, misses and peak of Python's streamer in the same passes."""
    files = [replace(file, path=str(folder / file.path)) for file in case.files]
    for file, content in zip(files, case.content, strict=True):
        Path(file.path).write_bytes(content)
    with Source(files, folder, mode="buffered", check=False) as source:
        arena = open_arena(case.plan, case.storages, source)
        streamer = ArenaStreamer(case.plan, case.storages, arena, readers=2, drop_at_once=True)
        try:
            for graph in graphs:
                streamer.begin(graph)
                for k in streamer.probed(graph):
                    streamer.acquire(graph, k)
                    streamer.release(graph, k)
                streamer.end(graph)
            streamer._drain()
            return streamer.counters.bytes_moved, streamer.counters.misses, arena.peak_bytes
        finally:
            streamer.close()
            arena.close()


@pytest.mark.random
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@settings(max_examples=60, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_read_of_a_random_plan_finds_the_files_bytes(kind: str, data: st.DataObject) -> None:
    case = data.draw(cases(kind))
    if not case.plan.arena_bytes:
        return
    streamer = case.open(data.draw(st.integers(1, 3)), drop_early=data.draw(st.booleans()))
    try:
        for trace in data.draw(st.lists(st.sampled_from(case.traces), min_size=1, max_size=5)):
            run_pass(streamer, case, trace)
        assert streamer.counters.misses == 0
        assert streamer.peak_bytes <= case.plan.arena_bytes
    finally:
        streamer.close()
        streamer.free()
    assert streamer.counters.bytes_moved == case.read_bytes


KINDS = {"contiguous": 64, "paged": PAGE, "pooled": HUGE_PAGE}
"""The granule of each kind of arena."""

UNITS = {"contiguous": 5 * PAGE, "paged": 5 * PAGE, "pooled": HUGE_PAGE}
"""The bytes of each weight."""


def one_case(kind: str = "contiguous", *, wrap: str = "overlap") -> Case:
    """Six storages, each read by one step of two methods, of which about half stream."""
    nbytes = UNITS[kind]
    storages, files = in_files(tuple(Storage(nbytes, "streamable") for _ in range(6)))
    steps = tuple(Step(f"s{k}", (k,), 100, 300) for k in range(6))
    traces = tuple(Trace(f"m{graph}", graph, "", steps, 0, 0, "modelled") for graph in range(2))
    shape = "contiguous" if kind == "contiguous" else "paged"
    alignment = HUGE_PAGE if kind == "pooled" else 64
    arena = packed_arena(storages, traces, kind=shape, granule=KINDS[kind], alignment=alignment)
    problem = Problem(storages, traces, arena, hardware=Hardware("test", 1e12, 1e11, 1e10, 10), wrap=wrap)
    return Case(storages, traces, files, make_plan(problem, 3 * nbytes))


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return one_case(request.param)


@pytest.fixture
def streamer(case: Case) -> Iterator[NativeStreamer]:
    streamer = case.open()
    yield streamer
    streamer.close()
    streamer.free()


def test_it_moves_what_pythons_streamer_moves(case, tmp_path):
    graphs = [0] * 5
    streamer = case.open()
    for graph in graphs:
        run_pass(streamer, case, case.traces[graph])
    streamer.abort()  # waits for what is on its way, as what it is compared with does
    found = streamer.counters.bytes_moved, streamer.counters.misses
    streamer.close()
    moved, misses, peak = moved_by_python(case, tmp_path, graphs)
    assert misses == found[1] == 0
    assert abs(found[0] - moved) <= case.plan.arena_bytes  # what was begun for a next pass
    assert peak <= case.plan.arena_bytes >= streamer.peak_bytes
    streamer.free()


@pytest.mark.parametrize("order", ["reversed", "swapped", "half", "twice"])
def test_an_order_that_was_not_planned_is_slower_and_never_wrong(streamer, case, order):
    probed = streamer.probed(0)
    first, second, *rest = probed
    orders = {
        "reversed": probed[::-1],
        "swapped": (second, first, *rest),
        "half": probed[len(probed) // 2 :],
        "twice": (first, first, second, *rest),
    }
    run_pass(streamer, case, case.traces[0])
    run_pass(streamer, case, case.traces[0], list(orders[order]))
    misses = streamer.counters.misses
    assert misses > 0
    run_pass(streamer, case, case.traces[1])
    run_pass(streamer, case, case.traces[0])
    assert streamer.counters.misses == misses


def test_a_failed_read_is_raised_once_and_the_next_call_is_right(streamer, case):
    run_pass(streamer, case, case.traces[0])
    transfer = case.plan.schedules[0].transfers[-1]
    storage = next(s for s, at in enumerate(case.plan.arena.layout) if at <= transfer.start < at + 5 * PAGE)
    case.failing = {case.storages[storage].extents[0].file_offset}
    raised = []
    for _ in range(4):
        try:
            run_pass(streamer, case, case.traces[0])
        except SourceError as error:
            raised.append(str(error))
            streamer.abort()
    assert raised == ["reading weights failed (Input/output error)"]
    assert not case.failing


def test_a_pass_that_is_left_in_the_middle_is_forgotten(streamer, case):
    for step in range(len(case.traces[0].steps)):
        streamer.begin(0)
        for k in [k for k in streamer.probed(0) if k <= step]:
            streamer.acquire(0, k)
        streamer.abort()
        run_pass(streamer, case, case.traces[0])


def test_calls_in_an_impossible_order_are_refused(streamer):
    streamer.begin(0)
    last = streamer.probed(0)[-1]
    with pytest.raises(StreamError, match=f"step {last} of graph 0 was released without being acquired"):
        streamer.release(0, last)
    with pytest.raises(StreamError, match="no step 99"):
        streamer.acquire(0, 99)
    with pytest.raises(StreamError, match="no schedule for graph 7"):
        streamer.begin(7)


def test_a_transfer_behind_one_that_waits_for_a_later_step_is_an_error(case):
    schedule = case.plan.schedules[0]
    first, second = sorted((t for t in schedule.transfers if t.step >= 1), key=lambda t: t.step)[:2]
    assert first.step < second.step
    turned = (replace(second, after=second.step - 1), replace(first, after=first.step - 1))
    schedule = replace(schedule, transfers=turned, drops=())
    case.plan = replace(case.plan, schedules=(schedule,), boundary=case.plan.resident)
    streamer = case.open()
    streamer.begin(0)
    for step in (k for k in streamer.probed(0) if k < first.step):
        streamer.acquire(0, step)
        streamer.release(0, step)
    with pytest.raises(StreamError, match="waits for a later step: plan it again"):
        streamer.acquire(0, first.step)
    streamer.close()
    streamer.free()


def test_stopping_wakes_a_call_that_waits(case):
    gate, reading = threading.Event(), threading.Event()
    read = case._read

    def late(*arguments: int) -> int:
        reading.set()
        gate.wait(60)
        return read(*arguments)

    case.callback = READ(late)
    streamer = case.open()
    raised: list[BaseException] = []

    def call() -> None:
        try:
            run_pass(streamer, case, case.traces[0])
        except BaseException as error:
            raised.append(error)

    caller, closer = threading.Thread(target=call), threading.Thread(target=streamer.close)
    caller.start()
    assert reading.wait(60)
    closer.start()
    caller.join(60)  # while the readers still read, for which the closer waits
    gate.set()
    closer.join(60)
    assert [type(error) for error in raised] == [StreamError]
    assert "was closed while it ran" in str(raised[0])
    streamer.free()


def test_what_is_freed_is_refused_and_its_counters_stay(case):
    streamer = case.open()
    run_pass(streamer, case, case.traces[0])
    moved = streamer.counters.bytes_moved
    streamer.close()
    streamer.close()
    streamer.free()
    streamer.free()
    assert streamer.counters.bytes_moved >= moved > 0
    with pytest.raises(StreamError, match="has been closed"):
        streamer.begin(0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p: replace(p, resident=(Range(1 << 40, 2 << 40),)), PayloadError, "are in no segment"),
        (lambda p: replace(p, schedules=()), PayloadError, "has no schedule"),
        (
            lambda p: replace(p, arena=replace(p.arena, layout=p.arena.layout[1:])),
            PayloadError,
            "no such shape",
        ),
        (lambda p: replace(p, addresses=p.addresses[1:]), PayloadError, "one address for each"),
        (lambda p: replace(p, addresses=(1, *p.addresses[1:])), PayloadError, "storage 0 has no room"),
        (lambda p: replace(p, addresses=(1 << 40, *p.addresses[1:])), PayloadError, "storage 0 has no room"),
        (lambda p: with_drop(p, Drop(0, 64, 77)), PayloadError, "no step 77"),
        (lambda p: with_drop(p, Drop(64, 64, 0)), PayloadError, "reaches from byte 64 to 64"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_a_byte_is_read(change, error, words):
    case = one_case()
    case.plan = change(case.plan)
    with pytest.raises(error, match=words):
        case.open()
    assert case.read_bytes == 0


def with_drop(plan: Plan, drop: Drop) -> Plan:
    schedule = replace(plan.schedules[0], drops=(drop,))
    return replace(plan, schedules=(schedule, *plan.schedules[1:]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[:-1], "the payload is not JSON"),
        (lambda text: text.replace(b'"extents"', b'"extends"'), "a field is missing"),
        (lambda text: text.replace(b'"nbytes": ', b'"nbytes": -'), "negative size|outside its file"),
        (lambda text: text.replace(b'"file": 0', b'"file": 7'), "names no file"),
        (lambda text: text.replace(b'"file_offset": ', b'"file_offset": 9999999'), "outside its file"),
    ],
)
def test_a_payload_that_cannot_be_is_refused(spoil, words):
    case = one_case()
    with pytest.raises(PayloadError, match=words):
        NativeStreamer(Path("nowhere"), spoil(case.payload), case.plan, Options(readers=1))


@pytest.mark.parametrize("arena", ["mapped", "pooled", "contiguous", "paged"])
def test_a_module_computes_the_same_with_either_engine(arena, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).eval()
    x = torch.randn(3, 1024)
    program = penstock.compile(torch.export.export(model, (x,)), tmp_path / "m.penstock")
    counted = []
    for engine in ENGINES:
        with program.load(budget="50%", arena=arena, engine=engine) as module, torch.no_grad():
            for _ in range(3):
                assert torch.equal(module(x), model(x))
            assert module.stats.misses == 0
            assert (module.stats.mapped_bytes > 0) == (arena == "mapped")
            assert 0 < module.stats.peak_bytes <= module.stats.budget
            counted.append(module.stats.bytes_moved)
    assert min(counted) > program.weight_bytes


def test_files_that_change_while_the_engine_streams_are_noticed(tmp_path):
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).eval()
    x = torch.randn(3, 512)
    program = penstock.compile(torch.export.export(model, (x,)), tmp_path / "m.penstock")
    with program.load(budget="30%", arena="contiguous", engine="native") as module, torch.no_grad():
        module(x)
        with (tmp_path / "m.penstock" / "weights.safetensors").open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(SourceError, match=r"truncated|changed|ended at"):
            call_thrice(module, x)


def call_thrice(module: torch.nn.Module, x: torch.Tensor) -> None:
    for _ in range(3):
        module(x)


def test_an_unknown_engine_and_a_device_without_one_are_refused(tmp_path):
    model = torch.nn.Linear(64, 64)
    program = penstock.compile(torch.export.export(model, (torch.ones(1, 64),)), tmp_path / "m.penstock")
    with pytest.raises(StreamError, match="no engine 'fast': choose auto, native or python"):
        program.load(budget="100%", engine="fast")
    with pytest.raises(StreamError, match="on a CPU, not on sim"):
        program.load(budget="100%", device="sim", engine="native")
    with pytest.raises(StreamError, match="leave debug=True out"):
        program.load(budget="100%", engine="native", debug=True)
