"""Problems of a few granules, whose plans can be followed by hand."""

from collections.abc import Sequence

from penstock.schedule.facts.model import Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.space.layout import packed_arena
from tests.schedule.traces import machine

GRANULE = 64
Reads = Sequence[Sequence[int]]


def problem_of(sizes, *methods, keep=(), made=(), kind="paged", wrap="overlap", hardware=None):
    """Storages of so many granules, and methods whose steps of 10 ns read them; `made` ones are produced."""
    storages = tuple(
        Storage(GRANULE * size, "produced" if s in made else "streamable") for s, size in enumerate(sizes)
    )
    traces = []
    for which, reads in enumerate(methods):
        written = set()
        steps = []
        for some in reads:
            writes = tuple(s for s in some if s in made and s not in written)
            written.update(writes)
            steps.append(Step("s", tuple(s for s in some if s not in writes), 3, 7, writes=writes))
        traces.append(Trace(f"m{which}", which, "", tuple(steps), 0, 0, "modelled"))
    arena = packed_arena(storages, traces, kind=kind, granule=GRANULE, alignment=GRANULE)
    given = hardware or machine(1e9)
    return Problem(storages, tuple(traces), arena, frozenset(keep), hardware=given, wrap=wrap)


def one_each(count):
    return [(s,) for s in range(count)]
