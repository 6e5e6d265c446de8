"""A plan as a trace for Perfetto, and as a few lines for the terminal."""

import itertools
import json
from dataclasses import replace

import pytest

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import make_plan
from penstock.schedule.report.drawing import page_data, save_report, save_timeline, terminal_timeline
from penstock.schedule.space.layout import packed_arena
from tests.schedule.report.report_plans import UNIT, corpus_plan, equal_plan, plan_behind_a_disk, two_links
from tests.schedule.traces import equal_problem, machine


def threads(events):
    """The complete events of a trace with one process, by the name of their thread."""
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {name: [] for name in named.values()}
    for event in events:
        assert event["ph"] in {"M", "X"}
        if event["ph"] == "X":
            found[named[event["tid"]]].append(event)
    return found


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_the_timeline_is_a_trace_of_complete_events(tmp_path, kind):
    plan = replace(equal_plan(kind=kind), names=[f"w{s}" for s in range(8)])
    save_timeline(plan, tmp_path / "plan.json", passes=3)
    trace = json.loads((tmp_path / "plan.json").read_text())
    lanes = threads(trace["traceEvents"])
    assert set(lanes) == {"compute", "link"}
    for events in lanes.values():
        events.sort(key=lambda event: event["ts"])
        assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events)
        for before, after in itertools.pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    reads = [event for event in lanes["compute"] if event["cat"] == "read"]
    assert [event["name"] for event in reads] == [f"block.{k}" for k in range(8)] * 3
    assert reads[11]["args"] == {"pass": 1, "step": "block.3", "weights": ["w3"]}
    stalls = [event for event in lanes["compute"] if event["name"] == "stall"]
    working = sum(event["dur"] for event in lanes["compute"]) - sum(event["dur"] for event in stalls)
    assert working == pytest.approx(3 * plan.traces[0].compute_ns / 1000)
    assert stalls
    assert all(event["args"]["weights"] for event in stalls)
    copied = [event["args"]["bytes"] for event in lanes["link"]]
    assert sum(copied) == 3 * plan.streamed_bytes
    assert {event["args"]["pass"] for event in lanes["link"]} == {0, 1, 2}


def test_a_second_link_is_the_disk(tmp_path):
    plan = two_links(equal_plan())
    save_timeline(plan, tmp_path / "plan.json", passes=1)
    lanes = threads(json.loads((tmp_path / "plan.json").read_text())["traceEvents"])
    assert (len(lanes["link"]), len(lanes["disk"])) == (8, 8)
    named = [line.split()[0] for line in terminal_timeline(plan).splitlines()]
    assert named[:3] == ["compute", "link", "disk"]


def test_what_the_disk_reads_for_a_host_is_a_lane(tmp_path):
    plan = plan_behind_a_disk()
    save_timeline(plan, tmp_path / "plan.json", passes=1)
    lanes = threads(json.loads((tmp_path / "plan.json").read_text())["traceEvents"])
    assert len(lanes["disk"]) == sum(nbytes > 0 for nbytes in plan.schedules[0].staged) > 0
    named = [line.split()[0] for line in terminal_timeline(plan).splitlines()]
    assert named[:3] == ["compute", "link", "disk"]


def test_a_timeline_needs_a_pass(tmp_path):
    with pytest.raises(PlanError, match="at least 1"):
        save_timeline(equal_plan(), tmp_path / "plan.json", passes=0)


def test_the_terminal_shows_what_is_busy():
    storages = tuple(Storage(1000, "streamable") for _ in range(2))
    steps = (Step("a", (0,), 0, 1000), Step("b", (1,), 0, 1000))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="contiguous", granule=1000, alignment=1000)
    plan = make_plan(Problem(storages, traces, arena, hardware=machine(1e9)), 1000)
    full, none = "\u2588" * 8, " " * 8
    assert terminal_timeline(plan, 45).splitlines() == [
        f"compute {none}{full}{none}{full}  50%",
        f"link    {full}{none}{full}{none}  50%",
        "        0             2 us          4 us",
        "        compute waits 2 us of it",
    ]


def test_the_terminal_is_as_wide_as_it_is_told():
    plan = corpus_plan("whisper-large-v3, decode", "rtx4090", "paged", 0.3)
    for width in (10, 40, 79, 200):
        lines = terminal_timeline(plan, width).splitlines()
        assert {len(line) for line in lines[:2]} == {max(40, width)}
        assert all(len(line) <= max(40, width) for line in lines)


def test_several_methods_are_told_apart(tmp_path):
    p = equal_problem(6, 0.5)
    traces = (p.traces[0], replace(p.traces[0], method="decode", graph=1, steps=p.traces[0].steps[::-1]))
    arena = packed_arena(p.storages, traces, kind="paged", granule=64, alignment=64)
    plan = make_plan(Problem(p.storages, traces, arena, hardware=p.hardware), 5 * UNIT)
    lines = terminal_timeline(plan, 60).splitlines()
    assert [line for line in lines if line.endswith(":")] == ["forward:", "decode:"]
    save_timeline(plan, tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"forward on toy", "decode on toy"}
    assert len(page_data(plan, "abcdef")["methods"]) == 2


def test_a_program_without_steps_has_empty_pictures(tmp_path):
    trace = Trace("forward", 0, "", (), 5, 5, "modelled")
    arena = packed_arena((), [trace], kind="paged", granule=64, alignment=64)
    plan = make_plan(Problem((), (trace,), arena, hardware=machine(1e9)), 1)
    assert terminal_timeline(plan) == ""
    save_report(plan, tmp_path / "plan.html")
    save_timeline(plan, tmp_path / "plan.json", passes=1)
    events = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["tail", "gap"]
