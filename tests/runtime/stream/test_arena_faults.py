"""Faults between the streamer of a CPU, its arena and its plan, each of which is found.

Everything happens on the caller's thread and as early as it may: there are no readers, and the arena has
every range ready. A fault is found by what a step reads (`bits`), by bytes moved or held that differ from
those of a run without it (`count`), or by a PenstockError (`error`). Mapped weights are right wherever they
are read, so what goes wrong there shows in what is held.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.files.source import Source
from penstock.runtime.stream.streamer import ArenaStreamer
from penstock.runtime.system.memory import PAGE
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.model import (
    Arena,
    Extent,
    Hardware,
    Part,
    Range,
    Step,
    Storage,
    Trace,
    WeightFile,
)
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena

PAGES = (2, 1, 3, 1, 2, 4, 1, 2)
CONTENT = random.Random(0).randbytes(sum(PAGES) * PAGE)
STARTS = tuple(sum(PAGES[:k]) * PAGE for k in range(len(PAGES)))
STORAGES = tuple(
    Storage(n * PAGE, "streamable", (Extent(0, start, 0, n * PAGE),))
    for n, start in zip(PAGES, STARTS, strict=True)
)
TRACE = Trace("forward", 0, "", tuple(Step(f"s{k}", (k,), 30, 200) for k in range(8)), 40, 10, "modelled")
HARDWARE = Hardware("test", 1e12, 1e11, 1e11, 100)
KINDS = ("contiguous", "anonymous", "mapped")


@cache
def plan_for(kind):
    """A plan of which about half streams."""
    arena = Arena("paged", "mapped", PAGE, STARTS, (Range(0, len(CONTENT)),))
    if kind == "anonymous":
        arena = replace(arena, backing="anonymous")
    elif kind == "contiguous":
        arena = packed_arena(STORAGES, (TRACE,), kind="contiguous", granule=PAGE, alignment=64)
    least = floor(Demand(STORAGES, (TRACE,), arena)).upper_bytes
    return make_plan(Problem(STORAGES, (TRACE,), arena, hardware=HARDWARE), least + 3 * PAGE)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "weights"
    path.write_bytes(CONTENT)
    opened = Source([WeightFile(str(path), len(CONTENT), 0, 0, "", "")], path.parent, check=False)
    yield opened
    opened.close()


@dataclass
class Fault:
    """What happens instead of the arena's method `name`, or to the streamer's plan; `fired` counts it.

    `by` says what finds it in a contiguous, an anonymous and a mapped arena.
    """

    by: tuple[str, str, str]
    name: str = ""
    call: Callable[..., Any] = lambda arena, *args: None
    plan: Callable[[Plan], Plan] = lambda plan: plan
    fired: int = 0


class FaultyArena:
    """An arena with every range ready, which passes on what it is asked but for what a fault changes."""

    def __init__(self, arena, fault):
        self.arena, self.fault = arena, fault

    def __getattr__(self, name):
        if name == "fill_ready":
            return self.fill
        if name != self.fault.name:
            return getattr(self.arena, name)
        self.fault.fired += 1
        return lambda *args: self.fault.call(self.arena, *args)


def run(kind, source, fault):
    """What finds the fault in three passes, if anything does on the way, and what was moved and held."""
    plan = plan_for(kind)
    given = fault.plan(plan)
    fault.fired += given != plan
    arena = open_arena(plan, STORAGES, source, poison=True)
    faulty = FaultyArena(arena, fault)
    streamer = ArenaStreamer(given, STORAGES, faulty, readers=0)
    wrong, held = "", []
    try:
        for _ in range(3):
            wrong = run_pass(streamer, faulty, held) or wrong
    except PenstockError:
        wrong = "error"
    counts = arena.peak_bytes, streamer.counters.bytes_moved, streamer.counters.misses, *held
    streamer.close()
    arena.close()
    return wrong, counts


def run_pass(streamer, arena, held):
    """`bits` where a step reads other bytes than its weights'; what is held at each step goes to `held`."""
    wrong = ""
    streamer.begin(0)
    for step in range(len(TRACE.steps)):
        probed = step in streamer.methods[0].probed
        if probed:
            streamer.acquire(0, step)
        held.append(arena.held_bytes)
        # Short of a granule, so that there is a view that begins one late.
        nbytes = STORAGES[step].nbytes - 64
        found = arena.view(Part("", "uint8", (nbytes,), (1,), step, 0)).numpy().tobytes()
        if found != CONTENT[STARTS[step] :][:nbytes]:
            wrong = "bits"
        if probed:
            streamer.release(0, step)
    streamer.end(0)
    return wrong


def of_transfers(change):
    def changed(plan):
        (schedule,) = plan.schedules
        return replace(plan, schedules=(replace(schedule, transfers=tuple(map(change, schedule.transfers))),))

    return changed


def first_transfer_forgotten(plan):
    (schedule,) = plan.schedules
    return replace(plan, schedules=(replace(schedule, transfers=schedule.transfers[1:]),))


def drops_early(plan):
    (schedule,) = plan.schedules
    drops = tuple(replace(drop, step=max(0, drop.step - 1)) for drop in schedule.drops)
    return replace(plan, schedules=(replace(schedule, drops=drops),))


def behind(part):
    return replace(part, storage=(part.storage + 1) % len(PAGES), shape=(PAGE - 64,))


FAULTS = {
    "nothing is filled": Fault(("bits", "bits", "count"), "fill", lambda arena, start, stop: stop - start),
    "a fill leaves out its first page": Fault(
        ("bits", "bits", "count"), "fill", lambda arena, start, stop: arena.fill(start + PAGE, stop) + PAGE
    ),
    "a fill leaves out its last page": Fault(
        ("bits", "bits", "count"), "fill", lambda arena, start, stop: arena.fill(start, stop - PAGE) + PAGE
    ),
    "a fill is of the page before": Fault(
        ("bits", "bits", "count"),
        "fill",
        lambda arena, start, stop: arena.fill(max(0, start - PAGE), stop - PAGE),
    ),
    "a fill tells fewer bytes": Fault(
        ("count", "count", "count"), "fill", lambda arena, start, stop: arena.fill(start, stop) - 64
    ),
    "nothing is dropped": Fault(("count", "count", "count"), "drop"),
    "a drop leaves a page": Fault(
        ("count", "count", "count"), "drop", lambda arena, start, stop: arena.drop(start, stop - PAGE)
    ),
    "a drop takes a page more": Fault(
        ("bits", "bits", "count"), "drop", lambda arena, start, stop: arena.drop(start, stop + PAGE)
    ),
    "views begin a granule late": Fault(
        ("bits", "bits", "bits"), "view", lambda arena, part: arena.view(replace(part, offset=64))
    ),
    "views are of the storage behind": Fault(
        ("bits", "bits", "bits"), "view", lambda arena, part: arena.view(behind(part))
    ),
    "transfers start a step early": Fault(
        ("bits", "bits", "count"), plan=of_transfers(lambda t: replace(t, after=t.after - 1))
    ),
    "transfers start two steps late": Fault(
        ("error", "error", "error"), plan=of_transfers(lambda t: replace(t, after=t.step))
    ),
    "the first transfer is forgotten": Fault(("bits", "bits", "count"), plan=first_transfer_forgotten),
    "the last range of the boundary is forgotten": Fault(
        ("bits", "bits", "count"), plan=lambda plan: replace(plan, boundary=plan.boundary[:-1])
    ),
    "drops come a step early": Fault(("bits", "bits", "count"), plan=drops_early),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_arena_and_plan_are_found(name, kind, source):
    fault = replace(FAULTS[name])
    expected, found = run(kind, source, Fault(("", "", ""))), run(kind, source, fault)
    assert expected[0] == ""
    assert fault.fired
    by = found[0] or ("count" if found[1] != expected[1] else "nothing")
    assert by == fault.by[KINDS.index(kind)], (found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_a_fault_stays_within_its_plan(kind, source):
    plan = plan_for(kind)
    wrong, (peak, moved, misses, *held) = run(kind, source, Fault(("", "", "")))
    assert (wrong, misses) == ("", 0)
    assert max(held) <= peak <= plan.arena_bytes
    assert moved > 2 * plan.streamed_bytes > 0
