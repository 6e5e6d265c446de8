"""A plan of four steps for tests of the streamer, and a pass over it."""

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

UNIT = 4
HARDWARE = Hardware("test", 1e9, 1e9, 1e9, 0)


def make_plan(graphs=1, *, wrap="overlap"):
    """Four storages of four units, one read a step; storage 3 is resident, two others fit beside it."""
    layout = tuple(UNIT * i for i in range(4))
    arena = Arena("paged", "anonymous", 1, layout, (Range(0, 16),))
    names = ("forward", "decode")
    traces = tuple(
        Trace(names[g], g, "", tuple(Step(f"s{k}", (k,), 1, 1) for k in range(4)), 0, 0, "modelled")
        for g in range(graphs)
    )
    transfers = (Transfer(0, 4, 0, -3), Transfer(4, 8, 1, -2), Transfer(8, 12, 2, 0))
    drops = tuple(Drop(UNIT * k, UNIT * (k + 1), k) for k in range(3))
    boundary = (Range(12, 16), Range(0, 8))
    if graphs > 1:  # what streams stays within its call: storage 2 only
        transfers, drops = transfers[2:], drops[2:]
    return Plan(
        budget=12,
        arena=arena,
        arena_bytes=12,
        outside=(),
        addresses=(),
        resident=(Range(12, 16),) if graphs == 1 else (Range(0, 8), Range(12, 16)),
        boundary=boundary,
        wrap=wrap,  # type: ignore[arg-type]
        schedules=tuple(Schedule(g, transfers, drops, 1) for g in range(graphs)),
        traces=traces,
        hardware=HARDWARE,
    )


STORAGES = tuple(Storage(UNIT, "streamable") for _ in range(4))


def run_pass(streamer, arena, graph=0, order=(0, 1, 2, 3)):
    streamer.begin(graph)
    for step in order:
        probed = step in streamer.methods[graph].probed
        if probed:
            streamer.acquire(graph, step)
        arena.require(UNIT * step, UNIT * (step + 1))
        if probed:
            streamer.release(graph, step)
    streamer.end(graph)
