"""Plans by which values leave memory: outs are drawn and named as outs, and take time at their own rate."""

import json
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from penstock.schedule.clock.event_graph import settle, stalls_of
from penstock.schedule.clock.turns import joined
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report.comparison import POLICIES, best_ns, other_policies
from penstock.schedule.report.drawing import (
    page_data,
    save_report,
    save_timeline,
    terminal_timeline,
    terms_of,
)
from penstock.schedule.report.pictures import (
    boxes_of,
    held_of,
    lanes_of,
    leaving_of,
    names_of,
    picture_of,
    views_of,
)
from penstock.schedule.report.verdict import copying_ns, limit_of, verdict
from tests.schedule.report.report_browser import Page
from tests.schedule.test_produced import layers, outs_of, random_problem
from tests.schedule.traces import machine

NBYTES, COUNT = 4096, 12


@cache
def spilling(*, units=7, compute=3000, **hardware):
    """Twelve values of 4 KiB on a link of 1 GB/s, with memory for some."""
    problem = layers(COUNT, NBYTES, compute=compute, hardware=replace(machine(1e9), **hardware))
    return make_plan(problem, int(units * NBYTES))


def test_bytes_out_are_no_bytes_that_stream():
    plan = spilling()
    out = sum(t.stop - t.start for t in outs_of(plan))
    assert plan.written_bytes == out > 0
    assert plan.streamed_bytes + out == sum(t.stop - t.start for s in plan.schedules for t in s.transfers)
    assert f"of {COUNT * 4}.00 KiB of kept values written out" in repr(plan)
    assert plan.produced == frozenset(range(1, COUNT + 1))


@pytest.mark.parametrize("duplex", [False, True])
def test_outs_are_drawn_as_outs_in_their_own_time(duplex):
    plan = spilling(write_bytes_per_s=2.5e8, duplex=duplex)
    picture = picture_of(joined(plan), 0)
    lanes = lanes_of(picture, picture.views.steady)
    assert list(lanes) == ["compute", "link", *(["link out"] if duplex else [])]
    drawn = [one for one in lanes["link out" if duplex else "link"] if one.kind == "out"]
    assert {one.kind for one in lanes["link"]} == ({"copy"} if duplex else {"copy", "out"})
    passes = len(picture.views.steady.passes)
    assert sum(one.nanoseconds for one in drawn) == passes * plan.written_bytes * 4
    kinds = {"out": plan.written_bytes, "copy": plan.streamed_bytes}
    for kind, nbytes in kinds.items():
        numbers = {one.of for lane in lanes.values() for one in lane if one.kind == kind}
        assert sum(copy.range.nbytes for c, copy in enumerate(picture.copies) if c in numbers) == nbytes


@pytest.mark.parametrize("rate", [None, 2.5e8])
def test_a_step_that_waits_for_an_out_is_drawn_as_waiting_at_its_end(rate):
    plan = joined(spilling(write_bytes_per_s=rate))
    picture = picture_of(plan, 0)
    view = picture.views.steady
    compute = [one for one in lanes_of(picture, view)["compute"] if one.at == view.focus]
    assert [one.start for one in compute[1:]] == [one.end for one in compute[:-1]]
    busy = sum(one.nanoseconds for one in compute if one.kind not in {"stall", "hold"})
    assert busy == picture.trace.compute_ns
    held = {one.of for one in compute if one.kind == "hold"}
    assert bool(held) == (rate is not None)
    assert held <= {t.step for t in picture.schedule.transfers if t.direction == "out"}
    waits = sum(one.nanoseconds for one in compute if one.kind in {"stall", "hold"} and one.of is not None)
    assert sum(stalls_of(picture.trace, view.now)) == waits
    assert settle(picture.trace, picture.schedule, plan.hardware, plan.wrap).period_ns == plan.predicted_ns


@pytest.mark.parametrize("seed", range(12))
def test_what_is_drawn_in_the_arena_fits_into_it(seed):
    problem = random_problem(Random(seed))
    lowest = floor(problem).upper_bytes
    plan = joined(make_plan(problem, lowest + sum(one.nbytes for one in problem.storages) // 3))
    for which, trace in enumerate(plan.traces):
        picture = picture_of(plan, which)
        for view in (picture.views.first, picture.views.steady):
            boxes = boxes_of(picture, view)
            assert max((held for _, held in held_of(view, boxes)), default=0) <= plan.arena_bytes
            written = {s for step in trace.steps for s in step.writes} - {*plan.outside}
            assert written <= {box.storage for box in boxes}
            inside = [box for _, box in leaving_of(picture, view)]
            for out in inside:  # what is copied out is in memory while it is
                there = [
                    b for b in boxes if b.storage == out.storage and b.start <= out.start and out.end <= b.end
                ]
                assert (
                    sum(
                        max(0, min(b.range.stop, out.range.stop) - max(b.range.start, out.range.start))
                        for b in there
                    )
                    >= out.range.nbytes
                )


def test_the_link_is_said_to_limit_with_the_rate_of_writes():
    plan = spilling(units=5, compute=10, write_bytes_per_s=2.5e8)
    assert copying_ns(plan) == plan.streamed_bytes + 4 * plan.written_bytes
    assert limit_of(plan) == "link"
    (said,) = (one for one in verdict(plan, {}) if one.startswith("The link limits it"))
    assert "at 1 GB/s in, and" in said
    assert "at 0.25 GB/s out, take" in said
    both = replace(plan, hardware=replace(plan.hardware, duplex=True))
    assert copying_ns(both) == 4 * plan.written_bytes
    (kept,) = (value for name, value in terms_of(plan) if name == "Kept")
    assert "at 0.25 GB/s" in kept
    assert f"{COUNT} values" in kept


@pytest.mark.parametrize("seed", range(20))
def test_link_and_compute_at_best_are_a_bound(seed):
    problem = random_problem(Random(seed))
    lowest = floor(problem).upper_bytes
    for share in (0.0, 0.3, 0.7):
        plan = make_plan(problem, lowest + int(share * sum(one.nbytes for one in problem.storages)))
        assert best_ns(plan, plan.budget) <= plan.predicted_ns


def test_other_policies_hold_what_a_forward_keeps():
    whole = spilling(units=COUNT + 1)
    assert not whole.written_bytes
    assert other_policies(whole)["everything resident"] == whole.compute_ns
    assert set(other_policies(whole)) == set(POLICIES)
    plan = spilling()
    assert other_policies(plan) == {}
    assert verdict(plan, {})[0].startswith("No other way fits, as each holds all that the forward keeps: ")


def test_the_table_says_what_leaves():
    plan = joined(spilling())
    data = page_data(plan, names_of(plan))
    assert [one["value"] for one in data["weights"]] == [False, *[True] * COUNT]
    uses = data["methods"][0]["uses"]
    spilled = [use for use in uses if use["lives"] == "spilled"]
    assert {use["lives"] for use in uses[1:]} == {"kept", "spilled"}
    brought = sum(use["streamed"] for use in uses)
    assert brought == plan.written_bytes + plan.streamed_bytes
    for use in spilled:
        assert use["why"].startswith("written by keep.")
        assert "leave by the end of" in use["why"]


def test_the_timeline_names_outs(tmp_path):
    plan = spilling(write_bytes_per_s=2.5e8)
    save_timeline(plan, tmp_path / "plan.json", passes=1)
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    outs = [one for one in events if one.get("cat") == "out"]
    assert len(outs) == len(outs_of(plan))
    for one in outs:
        assert one["name"].endswith(" out")
        assert one["args"]["direction"] == "out"
        assert one["dur"] == pytest.approx(one["args"]["bytes"] * 4 / 1000)
    assert any(one["args"].get("writes") for one in events if one.get("cat") == "read")
    assert any(one["name"] == "stall for copies out" for one in events)
    assert "link out" in terminal_timeline(spilling(duplex=True))


def test_the_page_names_what_leaves(browser, tmp_path):
    plan = spilling(write_bytes_per_s=2.5e8)
    save_report(plan, tmp_path / "plan.html")
    page = Page(browser, tmp_path / "plan.html")
    steady = views_of(joined(plan), 0).steady
    first = next(i for i, t in enumerate(joined(plan).schedules[0].transfers) if t.direction == "out")
    start, end = steady.now.transfers[first]
    said = page.hover(((start + end) / 2 - steady.now.call_start) / steady.period_ns, "lanes", 0.75)
    assert said.split("\n")[0].endswith(" out")
    assert "by the end of" in said
    assert page.text("#weights-title") == "Weights and kept values"
    assert page.text("#count") == "1 of 1 weights, 64 B; 12 of 12 kept values, 48 KiB"
    page.press("lives", "spilled")
    assert 0 < len(page.rows()) < COUNT
    assert page.complaints() == []
