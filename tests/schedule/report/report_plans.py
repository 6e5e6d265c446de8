"""Plans to draw: small ones, and those of well-known models."""

from dataclasses import replace

from benchmarks.corpus import list_programs, make_problem
from penstock.schedule.facts.hardware import find_hardware, with_times
from penstock.schedule.host import with_host
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.space.layout import packed_arena
from tests.schedule.traces import equal_problem

UNIT = 4096


def equal_plan(n=8, *, kind="paged", units=4, compute=0.5):
    p = equal_problem(n, compute)
    arena = packed_arena(p.storages, p.traces, kind=kind, granule=64, alignment=64)
    return make_plan(replace(p, arena=arena), int(units * UNIT))


def two_links(plan):
    """The same plan with every other transfer on a second link."""
    (schedule,) = plan.schedules
    transfers = tuple(replace(t, link=i % 2) for i, t in enumerate(schedule.transfers))
    return replace(plan, schedules=(replace(schedule, transfers=transfers),))


def plan_behind_a_disk(n=16):
    """A plan whose host holds a third of the weights, with a disk a third as fast as the link."""
    plan = equal_plan(n)
    rate = plan.hardware.link_bytes_per_s / 3
    return with_host(replace(plan, hardware=replace(plan.hardware, disk_bytes_per_s=rate)), n * UNIT // 3)


def corpus_plan(name, hardware, kind, share):
    program, machine_ = list_programs()[name](), find_hardware(hardware)
    granule = {"paged": 2 << 20, "contiguous": 4096}[kind]
    problem = make_problem(program, with_times(program.trace, machine_), machine_, kind, granule)
    lowest = floor(problem).upper_bytes
    budget = lowest + int((program.nbytes - lowest) * share)
    return make_plan(problem, budget, names=program.names)
