"""The verifier on literal plans: each rule, the sentence it gives, and how long it takes."""

import time
from dataclasses import replace

import pytest

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import (
    Arena,
    Drop,
    Hardware,
    Range,
    Schedule,
    Step,
    Storage,
    Trace,
    Transfer,
)
from penstock.schedule.plan import Plan
from penstock.schedule.verify.proof import verify_plan

GRANULE = 4
HARDWARE = Hardware("toy", 1e9, 1e9, 1e9, 0)


def trace_of(*reads, graph=0):
    steps = tuple(Step(f"layer.{k}", r, 1, 1) for k, r in enumerate(reads))
    return Trace(f"method{graph}", graph, "", steps, 0, 0, "modelled")


STORAGES = (
    Storage(8, "streamable"),
    Storage(8, "streamable"),
    Storage(6, "streamable"),
    Storage(5, "mutable"),
)
TRACES = (trace_of((0,), (1,), (2,)),)

# Storage 1 stays; 0 and 2 take turns in eight bytes, each copied while the other is not needed.
PAGED = Plan(
    budget=21,
    arena=Arena("paged", "anonymous", GRANULE, (0, 8, 16, -1), (Range(0, 22),)),
    arena_bytes=16,
    outside=(3,),
    addresses=(),
    resident=(Range(8, 16),),
    boundary=(Range(8, 16), Range(0, 8)),
    wrap="overlap",
    schedules=(
        Schedule(0, (Transfer(0, 8, 0, -1), Transfer(16, 22, 2, 0)), (Drop(0, 8, 0), Drop(16, 22, 2)), 6),
    ),
    traces=TRACES,
    hardware=HARDWARE,
)
CONTIGUOUS = replace(
    PAGED, arena=replace(PAGED.arena, kind="contiguous"), addresses=(0, 8, 0, -1), arena_bytes=16
)
BOTH = pytest.mark.parametrize("plan", [PAGED, CONTIGUOUS], ids=["paged", "contiguous"])


def scheduled(plan, **changes):
    return replace(plan, schedules=(replace(plan.schedules[0], **changes),))


def transfers(plan, number, **changes):
    items = list(plan.schedules[0].transfers)
    items[number] = replace(items[number], **changes)
    return scheduled(plan, transfers=tuple(items))


def refuse(plan, sentence, *, traces=TRACES):
    with pytest.raises(PlanError) as caught:
        verify_plan(STORAGES, traces, plan)
    assert sentence in str(caught.value)


@BOTH
def test_safe_plans_pass(plan):
    verify_plan(STORAGES, TRACES, plan)
    verify_plan(STORAGES, TRACES, replace(plan, wrap="barrier"))


@BOTH
def test_times_of_the_program_may_differ_but_not_its_reads(plan):
    slower = replace(TRACES[0], tail_ns=9)
    verify_plan(STORAGES, (slower,), plan)
    refuse(
        plan,
        "made for another program, which has other reads in step 2",
        traces=(trace_of((0,), (1,), (1,)),),
    )
    refuse(plan, "which has 3 steps for 2", traces=(trace_of((0,), (1,)),))
    refuse(
        plan, "expected traces of the program's graphs [1], got [0]", traces=(replace(TRACES[0], graph=1),)
    )
    refuse(replace(plan, schedules=()), "expected schedules of the program's graphs [0], got []")


@pytest.mark.parametrize("time", ["tail_ns", "gap_ns", "lead_ns", "read_ns"])
def test_times_are_not_negative(time):
    (trace,) = TRACES
    if time in ("tail_ns", "gap_ns"):
        spoiled = replace(trace, **{time: -1})  # type: ignore[arg-type]
    else:
        last = replace(trace.steps[-1], **{time: -1})  # type: ignore[arg-type]
        spoiled = replace(trace, steps=(*trace.steps[:-1], last))
    sentence = "graph 0: expected times of 0 ns or more, got a negative one"
    refuse(replace(PAGED, traces=(spoiled,)), sentence, traces=(spoiled,))


@BOTH
def test_a_read_that_nothing_covers(plan):
    missing = scheduled(plan, transfers=plan.schedules[0].transfers[:1], drops=plan.schedules[0].drops[:1])
    refuse(missing, "step 2 (layer.2) reads storage 2, of which")
    half = scheduled(
        plan,
        transfers=(Transfer(0, 8, 0, -1), Transfer(16, 20, 2, 0)),
        drops=(Drop(0, 8, 0), Drop(16, 20, 2)),
    )
    refuse(half, "step 2 (layer.2) reads storage 2, of which")
    refuse(half, "no transfer has brought")


def test_a_transfer_that_starts_before_room_is_free():
    early = scheduled(PAGED, transfers=(Transfer(0, 8, 0, -2), Transfer(16, 22, 2, 0)))
    refuse(early, "after step 1 (layer.1) the ranges held may need 22 bytes")


def test_a_transfer_that_overwrites_what_is_still_read():
    again = replace(CONTIGUOUS, traces=(trace_of((0,), (0, 1), (2,)),))
    refuse(again, "reads storage 0, of which arena bytes 0:6 then belong to storage 2", traces=again.traces)
    refuse(transfers(CONTIGUOUS, 0, after=-2), "may write arena bytes 0:6 while an earlier copy")


@BOTH
def test_a_transfer_for_a_later_step_does_not_cover_this_read(plan):
    swapped = replace(plan, traces=(trace_of((0,), (1, 2), (2,)),))
    refuse(swapped, "a transfer may still be writing", traces=swapped.traces)


@BOTH
def test_drops_of_what_is_not_there(plan):
    repeated = (*plan.schedules[0].drops, Drop(16, 22, 2))
    refuse(scheduled(plan, drops=repeated), "which are not on the device")
    early = (Drop(0, 8, 0), Drop(16, 22, 1))
    refuse(scheduled(plan, drops=early), "before they are sure to have arrived")
    refuse(scheduled(plan, drops=(*plan.schedules[0].drops, Drop(8, 16, 1))), "takes bytes that are resident")


def test_a_load_of_what_is_there():
    kept = scheduled(PAGED, drops=(Drop(16, 22, 2),))
    refuse(replace(kept, arena_bytes=22, budget=27), "which are on the device already")


@BOTH
def test_the_boundary_must_come_back(plan):
    gone = scheduled(plan, transfers=plan.schedules[0].transfers[1:])
    refuse(gone, "at the end of a pass")
    refuse(gone, "are gone, but in the boundary")
    refuse(replace(plan, boundary=(Range(0, 8),)), "bytes 8:16 are resident but missing from the boundary")
    refuse(
        replace(plan, boundary=(Range(8, 16), Range(0, 8), Range(0, 4))), "overlaps another boundary range"
    )


def test_what_stays_is_in_the_boundary_or_overwritten():
    kept = scheduled(PAGED, drops=PAGED.schedules[0].drops[:1])
    refuse(replace(kept, arena_bytes=22, budget=27), "at the end of a pass bytes 16:22 are missing from")
    verify_plan(STORAGES, TRACES, scheduled(CONTIGUOUS, drops=()))


def test_every_graph_starts_from_and_returns_to_one_boundary():
    second = trace_of((1,), (0,), graph=1)
    traces = (*TRACES, second)
    idle = Schedule(1, (), (), 0)
    plan = replace(PAGED, traces=traces, schedules=(*PAGED.schedules, idle))
    verify_plan(STORAGES, traces, plan)
    dropped = replace(idle, drops=(Drop(0, 8, 1),))
    refuse(
        replace(plan, schedules=(*PAGED.schedules, dropped)), "graph 1: at the end of a pass", traces=traces
    )
    # nobody has waited for bytes 0:8 yet when step 0 of graph 1 ends
    early = replace(idle, drops=(Drop(0, 8, 0),), transfers=(Transfer(0, 8, 1, 0),))
    refuse(
        replace(plan, schedules=(*PAGED.schedules, early)),
        "before they are sure to have arrived",
        traces=traces,
    )


@BOTH
def test_order_within_the_queue(plan):
    stuck = (Transfer(16, 22, 2, 1), Transfer(0, 8, 1, 0))
    refuse(
        scheduled(plan, transfers=stuck),
        "never starts: before it in line, transfer 0 waits for the end of step 1",
    )
    behind = (Transfer(16, 22, 2, 0), Transfer(0, 8, 2, -1))
    refuse(scheduled(plan, transfers=behind), "should be on its way when a call begins")
    refuse(transfers(plan, 1, after=2), "expected one from -1 to 1")
    refuse(transfers(plan, 0, after=-4), "expected one from -3 to -1")


def test_issue_order_delays_a_transfer_that_asks_to_start_earlier():
    plan = scheduled(
        replace(
            PAGED, boundary=(Range(8, 16),), arena_bytes=24, budget=29, traces=(trace_of((1,), (0,), (2,)),)
        ),
        transfers=(Transfer(0, 8, 1, 0), Transfer(16, 22, 2, 0)),
        drops=(Drop(0, 8, 1), Drop(16, 22, 2)),
    )
    verify_plan(STORAGES, plan.traces, plan)
    tight = replace(plan, arena_bytes=16)
    refuse(tight, "may need 22 bytes", traces=plan.traces)
    verify_plan(STORAGES, plan.traces, transfers(tight, 1, after=1))


@BOTH
def test_indices_and_kinds(plan):
    refuse(transfers(plan, 1, step=3, after=2), "names a step that is not one of 3")
    refuse(scheduled(plan, drops=(Drop(0, 8, -1),)), "names a step that is not one of 3")
    refuse(transfers(plan, 1, link=1), "link 1, expected 'in' or 'out' and 0")
    refuse(transfers(plan, 1, direction="out"), "copies out bytes that no step writes")
    refuse(scheduled(plan, predicted_ns=-1), "expected a predicted time of 0 ns or more, got -1")
    refuse(replace(plan, traces=(replace(TRACES[0], gap_ns=-1),)), "expected times of 0 ns or more")
    mutable = (trace_of((0,), (1,), (3,)),)
    refuse(replace(plan, traces=mutable), "reads storage 3, which is not a streamable one", traces=mutable)
    refuse(replace(plan, wrap="never"), "expected wrap to be overlap or barrier, got 'never'")  # type: ignore[arg-type]


@BOTH
def test_budget(plan):
    refuse(
        replace(plan, budget=20),
        "the arena of 16 bytes and 5 bytes beside it do not fit into the budget of 20",
    )
    refuse(replace(plan, outside=()), "storage 3 is mutable and must be outside the arena")
    refuse(replace(plan, outside=(3, 3)), "each once")
    refuse(replace(plan, outside=(3, 4)), "expected indices of 4 storages")
    refuse(replace(plan, arena_bytes=15), "15")


@BOTH
def test_where_ranges_may_lie(plan):
    refuse(transfers(plan, 1, stop=24), "is not inside one segment of the layout, 0:22")
    refuse(transfers(plan, 1, start=17), "is cut at 17, which is no multiple of the granule 4")
    refuse(transfers(plan, 1, start=22), "is not inside one segment")
    refuse(transfers(plan, 1, start=-4), "is not inside one segment")
    torn = replace(plan, arena=replace(plan.arena, segments=(Range(0, 18), Range(18, 22))))
    refuse(torn, "segment")
    crossed = replace(plan, arena=replace(plan.arena, segments=(Range(0, 12), Range(8, 22))))
    refuse(crossed, "expected ascending segments apart from each other")
    # A drop of the one would take the page that both lie in.
    shared = replace(PAGED, arena=replace(PAGED.arena, segments=(Range(0, 18), Range(18, 22))))
    refuse(shared, "expected segments that share no granule of 4 bytes")
    refuse(replace(plan, arena=replace(plan.arena, layout=(0, 8, 16))), "expected 4 layout offsets")
    nowhere = replace(plan, arena=replace(plan.arena, layout=(0, 8, -1, -1)))
    refuse(
        scheduled(nowhere, transfers=nowhere.schedules[0].transfers[:1], drops=(Drop(0, 8, 0),)), "no place"
    )


def test_addresses_of_a_contiguous_arena():
    refuse(replace(CONTIGUOUS, addresses=(0, 8, 4, -1)), "takes bytes that are resident")
    refuse(
        replace(CONTIGUOUS, addresses=(0, 8, 12, -1)),
        "storage 2, 6 bytes at address 12, is not inside the arena",
    )
    refuse(
        replace(CONTIGUOUS, addresses=(0, 8, 2, -1)),
        "not where the layout has it in a granule of 4 bytes: at 0",
    )
    refuse(replace(CONTIGUOUS, addresses=(0, 0, 8, -1)), "overlaps another boundary range")
    refuse(replace(CONTIGUOUS, addresses=()), "expected 4 layout offsets and 4 addresses")
    refuse(transfers(CONTIGUOUS, 0, stop=12), "is not inside one storage's slot, which is 0:8")
    shared = replace(CONTIGUOUS, arena=replace(CONTIGUOUS.arena, layout=(0, 4, 16, -1)))
    refuse(shared, "storages 0 and 1 overlap in the layout")


def test_a_program_that_streams_nothing():
    trace = trace_of()
    nothing = Plan(
        5, Arena("paged", "anonymous", 4, (), ()), 0, (), (), (), (), "overlap",
        (Schedule(0, (), (), 0),), (trace,), HARDWARE,
    )  # fmt: skip
    verify_plan((), (trace,), nothing)


def long_plan(steps, chunks, ahead):
    """Equal storages in `chunks` pieces, copied `ahead` steps before they are read."""
    nbytes = chunks * GRANULE
    trace = trace_of(*((k,) for k in range(steps)))
    moved, drops = [], []
    for k in range(steps):
        for start in range(k * nbytes, (k + 1) * nbytes, GRANULE):
            moved.append(Transfer(start, start + GRANULE, k, k - ahead))
            drops.append(Drop(start, start + GRANULE, k))
    boundary = tuple(Range(t.start, t.stop) for t in moved if t.after < 0)
    layout = tuple(range(0, steps * nbytes, nbytes))
    arena = Arena("paged", "anonymous", GRANULE, layout, (Range(0, steps * nbytes),))
    schedule = Schedule(0, tuple(moved), tuple(drops), 0)
    size = ahead * nbytes
    plan = Plan(size, arena, size, (), (), (), boundary, "overlap", (schedule,), (trace,), HARDWARE)
    return tuple(Storage(nbytes, "streamable") for _ in range(steps)), plan


def test_four_times_as_many_transfers_take_about_four_times_as_long():
    seconds = []
    for steps in (275, 1_100):
        storages, plan = long_plan(steps, 4, 8)
        taken = []
        for _ in range(3):  # of the processor: other processes may take the core
            started = time.process_time()
            verify_plan(storages, plan.traces, plan)
            taken.append(time.process_time() - started)
        seconds.append(min(taken))
    assert seconds[1] < 10 * seconds[0]
    with pytest.raises(PlanError, match=r"the boundary of 128 bytes does not fit"):
        verify_plan(storages, plan.traces, replace(plan, arena_bytes=127))
