"""What both engines do: random plans whose every read is compared with the files, faults, odd orders."""

import os
import signal
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.schedule.facts.errors import SourceError, StreamError
from tests.engines import ENGINES
from tests.hunt import scaled
from tests.oracle import UnsafeError
from tests.runtime.stream.cases import KINDS, cases, one_case, run_pass

pytestmark = pytest.mark.parametrize("engine", ENGINES)


@pytest.mark.random
@pytest.mark.parametrize("kind", ["contiguous", "paged", "mapped"])
@settings(
    max_examples=scaled(12), phases=[Phase.generate], deadline=None, suppress_health_check=[*HealthCheck]
)
@given(data=st.data())
def test_every_read_of_a_random_plan_finds_the_files_bytes(engine, kind, data):
    case = data.draw(cases(kind))
    if not case.plan.arena_bytes:
        return
    readers, early = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        case.folder = Path(folder) if kind == "mapped" else None
        with case.streamer(engine, readers, drop_early=early) as streamer:
            for trace in data.draw(st.lists(st.sampled_from(case.traces), min_size=1, max_size=5)):
                run_pass(streamer, case, trace)
            assert streamer.counters.misses == 0
            assert streamer.peak_bytes <= case.plan.arena_bytes
    if kind != "mapped":
        assert streamer.counters.bytes_moved == case.read_bytes
    case.check_log(readers)


@pytest.fixture(params=KINDS)
def case(request, tmp_path):
    return one_case(request.param, folder=tmp_path if request.param in ("mapped", "adaptive") else None)


@pytest.fixture
def streamer(case, engine):
    with case.streamer(engine) as streamer:
        yield streamer


def test_the_oracle_allows_what_an_engine_does_and_nothing_else(engine, case):
    with case.streamer(engine, readers=1) as streamer:
        for _ in range(4):
            run_pass(streamer, case, case.traces[0])
    case.check_log(1)
    filled = [k for k, event in enumerate(case.log) if event[0] == "filled"]
    first, last = filled[0], filled[len(filled) * 3 // 4]
    spoiled = {
        "reads other data": case.log[:last] + case.log[last + 1 :],
        "were not asked for": [*case.log[:last], case.log[last], *case.log[last:]],
        "no copy of the plan|bytes that are there|write the same bytes": [
            *case.log[:first],
            *(("fill", *case.log[first][1:]), case.log[first]),
            *case.log[first:],
        ],
    }
    for words, log in spoiled.items():
        with pytest.raises(UnsafeError, match=words):
            replace(case, log=log).check_log(1)


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


@pytest.mark.parametrize("case", ["contiguous", "paged"], indirect=True)
def test_a_failed_read_is_raised_once_and_the_next_call_is_right(streamer, case):
    run_pass(streamer, case, case.traces[0])
    transfer = case.plan.schedules[0].transfers[-1]
    storage = max(
        s for s, at in enumerate(case.plan.arena.layout) if at <= transfer.start
    )  # in order of the layout
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


def test_a_release_without_its_acquire_is_refused(streamer):
    streamer.begin(0)
    last = streamer.probed(0)[-1]
    with pytest.raises(StreamError, match=f"step {last} of graph 0 was released without being acquired"):
        streamer.release(0, last)


@pytest.mark.parametrize("case", ["contiguous", "paged"], indirect=True)
def test_a_transfer_behind_one_that_waits_for_a_later_step_is_an_error(engine, case):
    schedule = case.plan.schedules[0]
    first, second = sorted((t for t in schedule.transfers if t.step >= 1), key=lambda t: t.step)[:2]
    assert first.step < second.step
    turned = (replace(second, after=second.step - 1), replace(first, after=first.step - 1))
    schedule = replace(schedule, transfers=turned, drops=())
    case.plan = replace(case.plan, schedules=(schedule,), boundary=case.plan.resident)
    with case.streamer(engine) as streamer:
        streamer.begin(0)
        for step in (k for k in streamer.probed(0) if k < first.step):
            streamer.acquire(0, step)
            streamer.release(0, step)
        with pytest.raises(StreamError, match="waits for a later step: plan it again"):
            streamer.acquire(0, first.step)


class Gate:
    """Holds up every read of a case until it is opened."""

    def __init__(self, case):
        self.opened, self.reading, self._read = threading.Event(), threading.Event(), case.read
        case.read = self._wait

    def _wait(self, *arguments):
        self.reading.set()
        self.opened.wait(60)
        return self._read(*arguments)


def test_closing_wakes_a_call_that_waits(engine):
    case = one_case()
    gate = Gate(case)
    raised = []
    with case.streamer(engine) as streamer:

        def call():
            try:
                run_pass(streamer, case, case.traces[0])
            except BaseException as error:
                raised.append(error)

        caller, closer = threading.Thread(target=call), threading.Thread(target=streamer.close)
        caller.start()
        assert gate.reading.wait(60)
        closer.start()
        caller.join(60)  # while the readers still read, for which the closer waits
        gate.opened.set()
        closer.join(60)
    assert [type(error) for error in raised] == [StreamError]
    assert "was closed while it ran" in str(raised[0])


def test_an_interrupt_ends_a_call_that_waits_and_the_next_is_right(engine):
    case = one_case()
    gate = Gate(case)
    with case.streamer(engine) as streamer:
        assert gate.reading.wait(60)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run_pass(streamer, case, case.traces[0])
        gate.opened.set()
        streamer.abort()
        for _ in range(2):
            run_pass(streamer, case, case.traces[0])
        assert streamer.counters.misses == 0


def test_what_is_freed_is_refused_and_its_counters_stay(engine):
    case = one_case()
    with case.streamer(engine) as streamer:
        run_pass(streamer, case, case.traces[0])
        moved = streamer.counters.bytes_moved
        streamer.close()
        streamer.abort()
        streamer.close()
        streamer.free()
        assert streamer.counters.bytes_moved >= moved > 0
        with pytest.raises(StreamError, match="closed"):
            run_pass(streamer, case, case.traces[0])
