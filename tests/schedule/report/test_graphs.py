"""The event graph that users get: the planned period again, its attributes, and both ways to write it."""

from dataclasses import replace

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import PlanError
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report.graphs import to_dot
from tests.schedule.report.report_plans import equal_plan, plan_behind_a_disk
from tests.schedule.traces import problems


def exceeds(graph, period_ns):
    """Whether some cycle has more weight than `period_ns` for each pass that it spans."""
    worth = networkx.DiGraph()
    for source, target, edge in graph.edges(data=True):
        worth.add_edge(source, target, weight=period_ns * edge["height"] - edge["weight"])
    return bool(networkx.negative_edge_cycle(worth))


@given(st.one_of(problems(), problems(methods=2)))
@settings(max_examples=60)
def test_the_heaviest_cycle_is_the_planned_period(p):
    plan = make_plan(p, p.budget(floor(p).upper_bytes))
    whole = joined(plan)
    for trace, schedule in zip(whole.traces, whole.schedules, strict=True):
        graph = plan.event_graph(trace.method)
        assert graph.graph["period_ns"] == schedule.predicted_ns
        assert not exceeds(graph, schedule.predicted_ns)
        assert schedule.predicted_ns == 0 or exceeds(graph, schedule.predicted_ns - 1)


def test_nodes_say_what_happens_and_edges_why():
    plan = equal_plan(4, units=2, compute=2)
    graph = plan.event_graph()
    (schedule,) = plan.schedules
    kinds = [facts["kind"] for _, facts in graph.nodes(data=True)]
    assert kinds == ["step"] * 4 + ["transfer"] * len(schedule.transfers) + ["call"]
    for number, transfer in enumerate(schedule.transfers):
        copy, step = graph.nodes["transfer", number], graph.nodes["step", transfer.step]
        assert (copy["bytes"], copy["method"]) == (transfer.stop - transfer.start, "forward")
        assert copy["name"] == f"storage {transfer.step}"
        assert copy["pass"] == (-1 if transfer.after < 0 else 0)
        assert copy["end_ns"] - copy["start_ns"] == plan.hardware.copy_ns(copy["bytes"])
        assert copy["end_ns"] <= step["start_ns"]
        room = graph.edges[("step", transfer.after % 4), ("transfer", number)]
        assert (room["why"], room["height"]) == ("room", -copy["pass"])
    assert sum(graph.nodes["step", k]["bytes"] for k in range(4)) == plan.streamed_bytes
    whys = {edge["why"] for _, _, edge in graph.edges(data=True)}
    assert whys == {"order", "covers", "room"}
    assert graph.edges[("step", 0), ("step", 1)] == {"weight": 2000, "height": 0, "why": "order"}


def test_what_the_disk_reads_has_events_too():
    plan = plan_behind_a_disk()
    graph = plan.event_graph("forward")
    staged = [facts["bytes"] for _, facts in graph.nodes(data=True) if facts["kind"] == "stage"]
    assert staged == [nbytes for nbytes in plan.schedules[0].staged if nbytes]
    assert not exceeds(graph, plan.schedules[0].predicted_ns)


@pytest.mark.parametrize(
    ("method", "message"), [("decode", "no method 'decode'"), (None, "no method is named")]
)
def test_a_method_that_the_plan_does_not_have_is_refused(method, message):
    plan = equal_plan()
    two = replace(plan, traces=(*plan.traces, replace(plan.traces[0], method="prefill", graph=1)))
    with pytest.raises(PlanError, match=f"{message}.*: the plan has forward, prefill"):
        two.event_graph(method)


def test_nanoseconds_are_no_weights_for_the_layout():
    graph = equal_plan().event_graph()
    text = to_dot(graph)
    assert '"weight"=' not in text
    assert text.count('"weight_ns"=') == graph.number_of_edges()
