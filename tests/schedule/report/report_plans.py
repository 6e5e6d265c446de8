"""Plans to draw: small ones, and those of well-known models."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.corpus import list_programs
from penstock.schedule.facts.hardware import find_hardware, with_times
from penstock.schedule.facts.model import ArenaKind
from penstock.schedule.facts.problem import Problem
from penstock.schedule.host import with_host
from penstock.schedule.plan import Plan
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from tests.schedule.traces import equal_problem

UNIT = 4096


def equal_plan(n: int = 8, *, kind: ArenaKind = "paged", units: float = 4, compute: float = 0.5) -> Plan:
    p = equal_problem(n, compute)
    arena = packed_arena(p.storages, p.traces, kind=kind, granule=64, alignment=64)
    return make_plan(replace(p, arena=arena), int(units * UNIT))


def two_links(plan: Plan) -> Plan:
    """The same plan with every other transfer on a second link."""
    (schedule,) = plan.schedules
    transfers = tuple(replace(t, link=i % 2) for i, t in enumerate(schedule.transfers))
    return replace(plan, schedules=(replace(schedule, transfers=transfers),))


def plan_behind_a_disk(n: int = 16) -> Plan:
    """A plan whose host holds a third of the weights, with a disk a third as fast as the link."""
    plan = equal_plan(n)
    rate = plan.hardware.link_bytes_per_s / 3
    return with_host(replace(plan, hardware=replace(plan.hardware, disk_bytes_per_s=rate)), n * UNIT // 3)


def corpus_plan(name: str, hardware: str, kind: ArenaKind, share: float) -> Plan:
    program, machine_ = list_programs()[name](), find_hardware(hardware)
    trace = with_times(program.trace, machine_)
    granule = {"paged": 2 << 20, "contiguous": 4096}[kind]
    arena = packed_arena(program.storages, [trace], kind=kind, granule=granule, alignment=4096)
    problem = Problem(program.storages, (trace,), arena, hardware=machine_)
    lowest = floor(problem).upper_bytes
    budget = lowest + int((program.nbytes - lowest) * share)
    return make_plan(problem, budget, names=program.names)
