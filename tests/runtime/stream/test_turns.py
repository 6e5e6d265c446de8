"""A forward and a backward whose calls come in turn, on both engines, in that order and in others.

Reads are late at random, and dropped bytes are overwritten, so that a byte that is read too early is wrong.
"""

import time

import pytest

from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.turns import joined
from penstock.schedule.verify.proof import verify_plan
from tests import oracle
from tests.engines import ENGINES
from tests.hunt import nightly_but
from tests.runtime.stream.cases import KINDS, run_pass, turn_case

pytestmark = pytest.mark.parametrize("units", [1, 4])


@pytest.fixture(params=ENGINES)
def engine(request):
    return str(request.param)


@pytest.fixture(params=nightly_but({"contiguous", "paged", "mapped"}, KINDS))
def case(request, units, tmp_path):
    kind = request.param
    return turn_case(kind, units, folder=tmp_path if kind in ("mapped", "adaptive") else None)


@pytest.fixture
def streamer(case, engine):
    with case.streamer(engine) as streamer:
        yield streamer


def moved(schedule, *, early=None):
    """The bytes of the transfers, of those that may start before the call alone, or of the others."""
    chosen = (t for t in schedule.transfers if early is None or (t.after < 0) == early)
    return sum(t.stop - t.start for t in chosen)


def boundary(case, graph):
    return sum(item.nbytes for item in case.plan.schedules[graph].boundary or ())


def settled(streamer, expected):
    """The bytes moved, once nothing more can come; at most as many as expected, unless there are more."""
    until = time.monotonic() + 60
    while streamer.counters.bytes_moved < expected and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(0.01)
    return int(streamer.counters.bytes_moved)


def test_a_round_moves_what_is_planned_and_prefetches_for_the_next(streamer, case):
    verify_plan(case.storages, case.traces, case.plan)
    oracle.check_plan(case.storages, case.traces, case.plan)
    forward, backward = case.plan.schedules
    rounds = 5
    cold = boundary(case, 0) + moved(forward, early=False)
    for number in range(rounds):
        run_pass(streamer, case, case.traces[0])
        done = cold + number * (moved(forward) + moved(backward))
        assert settled(streamer, done + moved(backward, early=True)) == done + moved(backward, early=True)
        run_pass(streamer, case, case.traces[1])
        done += moved(backward) + moved(forward, early=True)
        assert settled(streamer, done) == done
    assert streamer.counters.misses == 0
    assert streamer.peak_bytes <= case.plan.arena_bytes
    case.check_log(2)


@pytest.mark.parametrize("case", ["contiguous", "paged"], indirect=True)
def test_what_turns_around_stays(case, units):
    """Of n storages a round needs to copy each twice, less what is there when the calls turn around."""
    nbytes, count = case.storages[0].nbytes, len(case.storages)
    forward, backward = case.plan.schedules
    reads = 2 * count - 2
    assert moved(forward) + moved(backward) <= (reads - max(1, 2 * (units - 1))) * nbytes
    (trace,), (schedule,) = joined(case.plan).traces, joined(case.plan).schedules
    period = steady_period_ns(trace, schedule, case.plan.hardware, case.plan.wrap)
    assert period == case.plan.predicted_ns == forward.predicted_ns + backward.predicted_ns


@pytest.mark.parametrize("order", ["F", "FFBB", "BF", "FBFFB"])
def test_calls_in_any_order_find_their_bytes(streamer, case, order):
    for letter in order * 2:
        run_pass(streamer, case, case.traces["FB".index(letter)])
    assert streamer.counters.misses == 0
    assert streamer.peak_bytes <= case.plan.arena_bytes


def test_a_call_out_of_turn_begins_with_what_is_resident(streamer, case):
    """Each begins from the resident ranges: it loads the rest of its boundary, and no step is a miss."""
    forward, _ = case.plan.schedules
    resident = sum(item.nbytes for item in case.plan.resident)
    first = boundary(case, 0) + moved(forward, early=False)
    following = moved(case.plan.schedules[1], early=True)
    run_pass(streamer, case, case.traces[0])
    assert settled(streamer, first + following) == first + following
    for number in range(1, 4):
        run_pass(streamer, case, case.traces[0])
        done = (number + 1) * (first + following) - number * resident
        assert settled(streamer, done) == done
    assert streamer.counters.misses == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_in_a_call_costs_the_turn_and_nothing_else(streamer, case, failing):
    run_pass(streamer, case, case.traces[0])
    run_pass(streamer, case, case.traces[1])
    for step in range(0, len(case.traces[failing].steps), 3):
        if failing == 1:
            run_pass(streamer, case, case.traces[0])
        streamer.begin(failing)
        for k in streamer.probed(failing):
            if k > step:
                break
            streamer.acquire(failing, k)
            if k < step:
                streamer.release(failing, k)
        streamer.abort()
        run_pass(streamer, case, case.traces[0])
        run_pass(streamer, case, case.traces[1])
    assert streamer.counters.misses == 0


def test_a_step_out_of_order_is_a_miss_of_its_own_call_alone(streamer, case):
    run_pass(streamer, case, case.traces[0])
    order = list(reversed(streamer.probed(1)))
    run_pass(streamer, case, case.traces[1], order)
    misses = streamer.counters.misses
    assert 0 < misses <= len(order)
    for letter in (0, 1, 0, 1):
        run_pass(streamer, case, case.traces[letter])
    assert streamer.counters.misses == misses
