"""What stands between probes and their streamer: the order of compiled code, and the times of steps."""

import time

import pytest

from penstock.passes.probes import NOTHING_STREAMS
from penstock.runtime.stream.loaded import HostClock, ProbeCalls, Stopwatch, probe_calls
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Step, Trace
from penstock.schedule.payload.codec import ProbeOrder

ORDER = ProbeOrder(7, opens=(-1, 1, 2), closes=(0, 3, -1))
"""Step 0 begins with the pass, call 1 begins step 1, and step 2 ends with the pass."""


class Recorder:
    """A streamer that notes its calls, and fails at one of them."""

    def __init__(self, fails_at=None):
        self.calls = []
        self.fails_at = fails_at

    def acquire(self, graph, step):
        self._note("acquire", graph, step)

    def release(self, graph, step):
        self._note("release", graph, step)

    def _note(self, name, graph, step):
        self.calls.append((name, graph, step))
        if (name, step) == self.fails_at:
            raise StreamError("no disk")


def emitted(calls, *, translated=False):
    """Code that calls two probes; `translated` errors become its own, as AOTInductor does it."""
    try:
        for probe in (0, 1):
            calls.acquire(0, probe)
            calls.release(0, probe)
    except StreamError as error:
        if translated:
            raise RuntimeError(f"a kernel failed: {error}") from None
        raise
    return "output"


def test_steps_begin_and_end_at_their_calls_and_at_the_edges_of_the_pass():
    streamer = Recorder()
    calls = ProbeCalls(ORDER, range(3), streamer)
    assert calls.enclose(lambda: emitted(calls)) == "output"
    assert streamer.calls == [
        ("acquire", 7, 0),
        ("release", 7, 0),
        ("acquire", 7, 1),
        ("acquire", 7, 2),
        ("release", 7, 1),
        ("release", 7, 2),
    ]


def test_a_call_ends_one_step_before_it_begins_another():
    streamer = Recorder()
    calls = ProbeCalls(ProbeOrder(0, opens=(0, 1), closes=(1, 2)), range(2), streamer)
    calls.enclose(lambda: emitted(calls))
    names = [f"{name} {step}" for name, _, step in streamer.calls]
    assert names == ["acquire 0", "release 0", "acquire 1", "release 1"]


def test_steps_that_are_not_probed_reach_nobody():
    streamer = Recorder()
    calls = ProbeCalls(ORDER, [1], streamer)
    calls.enclose(lambda: emitted(calls))
    assert streamer.calls == [("acquire", 7, 1), ("release", 7, 1)]


@pytest.mark.parametrize("translated", [False, True])
@pytest.mark.parametrize("fails_at", [("release", 0), ("acquire", 1)])
def test_what_a_call_raises_comes_out_whatever_the_code_makes_of_it(fails_at, translated):
    calls = ProbeCalls(ORDER, range(3), Recorder(fails_at))
    for _ in range(2):
        with pytest.raises(StreamError, match="no disk"):
            calls.enclose(lambda: emitted(calls, translated=translated))


def test_an_error_of_the_code_itself_is_not_that_of_a_call_before():
    streamer = Recorder(("acquire", 1))
    calls = ProbeCalls(ORDER, range(3), streamer)
    with pytest.raises(StreamError):
        calls.enclose(lambda: emitted(calls, translated=True))
    streamer.fails_at = None

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        calls.enclose(fail)


def test_reads_by_units_are_those_of_their_number_and_raise_what_they_raise():
    def by_units(*arguments):
        if not arguments:
            raise StreamError("no unit")
        return ["units", *arguments]

    calls = ProbeCalls(ORDER, (), NOTHING_STREAMS, {1: by_units})
    assert calls.read_by_units(7, 1, lambda *a: ["whole", *a], ("x", 2)) == ["units", "x", 2]
    assert calls.read_by_units(7, 0, lambda *a: ["whole", *a], ("x", 2)) == ["whole", "x", 2]

    def translated():
        try:
            calls.read_by_units(7, 1, by_units, ())
        except StreamError:
            raise RuntimeError from None

    with pytest.raises(StreamError, match="no unit"):
        calls.enclose(translated)


def test_only_what_neither_streams_nor_reads_by_units_needs_no_calls():
    with_units = ProbeOrder(0, opens=(), closes=(), units=(0,))
    assert probe_calls(ORDER, (), None) is NOTHING_STREAMS
    assert isinstance(probe_calls(with_units, (), None), ProbeCalls)
    streamer = Recorder()
    calls = probe_calls(ORDER, [1], streamer)
    calls.enclose(lambda: emitted(calls))  # type: ignore[arg-type]
    assert len(streamer.calls) == 2


class Ticks:
    """A clock that is moved by hand."""

    def __init__(self):
        self.at = 100

    def now(self):
        return self.at

    def ns_between(self, start, stop):
        return stop - start


def test_a_stopwatch_tells_leads_reads_and_waits_apart():
    clock, waited, streamer = Ticks(), [0], Recorder()

    def wait(graph, step):  # for weights, which is no part of any step
        streamer.calls.append(("acquire", graph, step))
        clock.at += 1_000

    streamer.acquire = wait  # type: ignore[method-assign]
    watch = Stopwatch(streamer, [1], 3, clock=clock, waited_ns=lambda: waited[0])

    def run():
        for step in (0, 1):
            clock.at += 10 + step  # lead
            watch.acquire(5, step)
            clock.at += 20 + step + 400  # read, in which units were waited for
            waited[0] += 400
            watch.release(5, step)
        clock.at += 7
        return "output"

    assert watch.time(run) == "output"
    steps = tuple(Step(f"s{k}", (k,), 1, 1) for k in range(3))
    trace = watch.trace(Trace("forward", 5, "", steps, 1, 3, "modelled"))
    assert [(step.lead_ns, step.read_ns) for step in trace.steps] == [(10, 20), (11, 21), (0, 0)]
    assert (trace.tail_ns, trace.gap_ns, trace.times) == (7, 0, "measured")
    assert streamer.calls == [("acquire", 5, 1), ("release", 5, 1)]


def test_the_clock_of_the_host_counts_nanoseconds():
    clock = HostClock()
    before, moment = time.perf_counter_ns(), clock.now()
    assert before <= moment <= time.perf_counter_ns()
    assert clock.ns_between(moment, moment + 5) == 5


def test_a_stopwatch_needs_no_streamer():
    clock = Ticks()
    watch = Stopwatch(None, [0], 1, clock=clock)

    def run():
        watch.acquire(0, 0)
        clock.at += 5
        watch.release(0, 0)

    watch.time(run)
    steps = (Step("s", (0,), 1, 1),)
    assert watch.trace(Trace("forward", 0, "", steps, 1, 0, "modelled")).steps[0].read_ns == 5
