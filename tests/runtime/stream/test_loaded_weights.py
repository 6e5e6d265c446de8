"""Loaded weights: what a pass calls and in which order, what calms the threads, and how all is given back."""

from penstock.runtime.stream.engine import Counters, MemoryUse
from penstock.runtime.stream.loaded import LoadedWeights, Resources
from tests.runtime.stream.four_steps import make_plan


class Stub:
    """A streamer, units, a team and an order of passes in one, which notes what is called."""

    in_reader = False
    captured = False

    def __init__(self):
        self.calls = []
        self.counters = Counters()

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


def loaded(streamer, **parts):
    resources = Resources(streamer, (lambda: streamer.calls.append("memory"), lambda: None))
    return LoadedWeights(
        plan=make_plan(), tensors={}, resources=resources, usage=lambda: MemoryUse(1, 2), **parts
    )


def test_a_pass_begins_and_ends_the_streamer_and_begins_the_units():
    streamer, units = Stub(), Stub()
    weights = loaded(streamer, pooled=units)
    assert weights.run(0, None, lambda: streamer.calls.append("run") or "output") == "output"
    assert (streamer.calls, units.calls) == (["begin", "run", "end"], ["begin"])
    weights.close()


def test_a_pass_whose_steps_others_run_begins_and_ends_likewise():
    streamer, units, team = Stub(), Stub(), Stub()
    weights = loaded(streamer, pooled=units, team=team)
    before = weights.begin(0)
    streamer.counters = Counters(100, 26)
    weights.end(0, before)
    weights.begin(0)
    weights.abort()
    assert streamer.calls == ["begin", "end", "begin", "abort"]
    assert (units.calls, team.calls) == (["begin", "begin"], ["park"])
    weights.close()


def test_steps_are_probed_where_something_streams():
    streamer = Stub()
    streamer.probed = {4: (1, 2)}.__getitem__
    weights = loaded(streamer)
    assert weights.probed(4) == (1, 2)
    weights.close()
    resources = Resources(None, ())
    alone = LoadedWeights(plan=make_plan(), tensors={}, resources=resources, usage=lambda: MemoryUse(0, 0))
    assert alone.probed(4) == ()
    assert alone.run(4, None, lambda: "output") == "output"
    alone.close()


def test_the_team_sleeps_where_readers_bring_more_than_a_quarter_of_what_comes():
    streamer, team = Stub(), Stub()
    weights = loaded(streamer, team=team)

    def bring(moved, read):
        streamer.counters = Counters(
            streamer.counters.bytes_moved + moved, streamer.counters.bytes_read + read
        )

    for moved, read in ((100, 26), (100, 25), (100, 26), (0, 0), (100, 100)):
        weights.run(0, None, lambda: bring(moved, read))  # noqa: B023 (it runs at once)
    assert team.calls == ["park", "wake", "park", "wake", "park"]
    weights.close()


def test_counters_are_those_of_the_streamer_and_of_the_units():
    streamer, units = Stub(), Stub()
    streamer.counters, units.counters = Counters(1, 2, 3, 4, 5), Counters(10, 20, 30, 40, 50)
    weights = loaded(streamer, pooled=units)
    assert weights.counters == Counters(11, 22, 33, 44, 55)
    assert weights.unit_wait_ns == 40
    stats = weights.stats(9)
    assert (stats.passes, stats.bytes_moved, stats.misses, stats.bytes_written) == (9, 11, 33, 55)
    assert (stats.held_bytes, stats.peak_bytes, stats.stall_seconds) == (1, 2, 44e-9)
    weights.close()
    alone = loaded(streamer)
    assert (alone.counters, alone.unit_wait_ns) == (Counters(1, 2, 3, 4, 5), 0)
    alone.close()


def test_closing_stops_the_streamer_before_its_memory_goes():
    streamer = Stub()
    weights = loaded(streamer)
    weights.resources.close_first(lambda: streamer.calls.append("first"))
    weights.close()
    assert streamer.calls == ["close", "first", "memory"]
    assert weights.resources.closed
