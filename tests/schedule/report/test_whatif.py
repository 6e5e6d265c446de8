"""What if: what limits a plan, which way wins, and what one more gigabyte buys."""

from __future__ import annotations

import pytest

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import PRESETS, find_hardware, with_times
from penstock.schedule.facts.model import Hardware, Step, Storage, Trace, Work
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report import whatif
from penstock.schedule.space.layout import packed_arena
from tests.schedule.report.report_plans import plan_behind_a_disk

GB = 10**9
STORAGES = tuple(Storage(GB // 10, "streamable") for _ in range(40))


def trace_for(hardware: Hardware, *, flops: float) -> Trace:
    """Forty products over 100 MB each."""
    steps = tuple(
        Step(f"s{k}", (k,), 0, 0, Work(), Work(int(flops), storage.nbytes))
        for k, storage in enumerate(STORAGES)
    )
    return with_times(Trace("forward", 0, "", steps, 0, 0, "modelled"), hardware)


def plan_for(budget: int, *, flops: float = 0, hardware: Hardware = PRESETS["rtx4090"]) -> Plan:
    trace = trace_for(hardware, flops=flops)
    arena = packed_arena(STORAGES, [trace], kind="paged", granule=2 << 20, alignment=4096)
    return make_plan(Problem(STORAGES, (trace,), arena, hardware=hardware), budget)


def test_a_decoder_on_a_slow_link_is_limited_by_it() -> None:
    plan = plan_for(2 * GB)
    policies = whatif.other_policies(plan, STORAGES, PRESETS["server"])
    limit, other, more = whatif.verdict(plan, policies, plan_for(3 * GB))
    assert limit.startswith("The link limits it: ")
    assert "25 GB/s" in limit
    assert other.startswith("Another way wins here: 'rest on the host' would take ")
    assert more.startswith("One more gigabyte saves 4")
    assert more.endswith("%).")


def test_much_compute_hides_copying_and_more_memory_buys_nothing() -> None:
    plan = plan_for(2 * GB, flops=4e12)
    policies = whatif.other_policies(plan, STORAGES)
    limit, other, more = whatif.verdict(plan, policies, plan_for(3 * GB, flops=4e12))
    assert limit.startswith("Compute limits it: ")
    assert other == "Streaming is as good as any other way here: 'one block ahead' takes the same time."
    assert more == "One more gigabyte buys next to nothing."


def test_streaming_pays_where_nothing_else_is_as_fast() -> None:
    plan = plan_for(3 * GB)
    sentences = whatif.verdict(plan, whatif.other_policies(plan, STORAGES))
    assert sentences[1].startswith("Streaming pays: the best other way, 'some of every group', ")


def test_one_slot_is_limited_by_memory() -> None:
    """Copies and compute take as long as each other and must take turns."""
    plan = plan_for(GB // 10 + (3 << 20), flops=6.6e11)
    assert whatif.limit_of(plan) == "memory"
    assert whatif.verdict(plan, {})[0].startswith("Memory limits it: ")


def test_what_fits_needs_no_verdict() -> None:
    plan = plan_for(4 * GB)
    assert whatif.verdict(plan, whatif.other_policies(plan, STORAGES)) == (
        "Everything fits: nothing streams.",
    )


def test_a_sweep_goes_from_the_floor_to_everything_and_never_gets_slower() -> None:
    trace = trace_for(PRESETS["l4"], flops=1e11)
    arena = packed_arena(STORAGES, [trace], kind="paged", granule=2 << 20, alignment=4096)
    lowest = floor(Demand(STORAGES, (trace,), arena)).upper_bytes
    points = whatif.sweep(
        lambda budget: plan_for(budget, flops=1e11, hardware=PRESETS["l4"]),
        STORAGES,
        lowest=lowest,
        highest=4 * GB,
    )
    assert (points[0].budget, points[-1].budget) == (lowest, 4 * GB)
    periods = [point.predicted_ns for point in points]
    assert periods == sorted(periods, reverse=True)
    assert all(point.lower_bound_ns <= point.predicted_ns for point in points if point.lower_bound_ns)
    assert points[-1].policies["everything resident"] == trace.compute_ns
    assert "everything resident" not in points[0].policies


@pytest.mark.parametrize(
    ("name", "hint"), [("rtx4091", "'rtx4090'"), ("H100", "'h100'"), ("a1000", "'a100'")]
)
def test_the_nearest_preset_is_suggested(name: str, hint: str) -> None:
    with pytest.raises(PlanError, match=f"there is no hardware '{name}': did you mean {hint}"):
        find_hardware(name)


def test_an_unknown_machine_lists_all() -> None:
    with pytest.raises(PlanError, match=r"one of t4, l4, rtx4090, .*, laptop, server") as raised:
        find_hardware("toaster")
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_machines(name: str) -> None:
    hardware = find_hardware(name)
    hardware.check()
    assert hardware.name == name
    assert hardware.memory_nbytes


def test_a_disk_behind_a_small_host_limits() -> None:
    plan = plan_behind_a_disk()
    assert whatif.limit_of(plan) == "disk"
    assert whatif.verdict(plan, {})[0].startswith("The disk limits it: of ")
