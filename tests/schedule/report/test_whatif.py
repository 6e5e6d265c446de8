"""What if: other budgets, and machines that one does not have."""

from __future__ import annotations

import pytest

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import PRESETS, find_hardware, with_times
from penstock.schedule.facts.model import Hardware, Step, Storage, Trace, Work
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.facts.validity import check_machine
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report import whatif
from penstock.schedule.space.layout import packed_arena

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


def test_a_sweep_goes_from_the_floor_to_everything_and_never_gets_slower() -> None:
    trace = trace_for(PRESETS["l4"], flops=1e11)
    arena = packed_arena(STORAGES, [trace], kind="paged", granule=2 << 20, alignment=4096)
    lowest = floor(Demand(STORAGES, (trace,), arena)).upper_bytes
    points = whatif.sweep(
        lambda budget: plan_for(budget, flops=1e11, hardware=PRESETS["l4"]),
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
    check_machine(hardware)
    assert hardware.name == name
    assert hardware.memory_nbytes
