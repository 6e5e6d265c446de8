"""Made-up routes of made-up tables, for replays."""

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from penstock.schedule.facts.model import Part, SparseRead, Step, Storage, Trace
from penstock.schedule.sparse.routes import Ask, Routes, profile_of, routed_reads

PAGE = 4096

Units = Sequence[int]


def recording(tables, calls):
    """Routes of calls, each of which is a list of tables and of the units that it asks of them.

    A table has a number of units, the bytes of each, and the route of its step: the tables are read in their
    order, one step each.
    """
    storages = tuple(Storage(max(count * nbytes, 1 << 20), "streamable") for count, nbytes, _ in tables)
    steps = []
    for number, (count, nbytes, route) in enumerate(tables):
        view = Part("", "uint8", (count, nbytes), (nbytes, 1), number, 0)
        read = SparseRead(view, "aten.embedding.default", route, min(2, count))
        steps.append(Step(f"look.up.{number}", (number,), 0, 0, sparse=(read,)))
    traces = (Trace("forward", 0, "", tuple(steps), 0, 0, "modelled"),)
    names = [f"table.{number}" for number in range(len(tables))]
    reads = tuple(routed_reads(traces, [0] * len(tables), names))
    asks = tuple(tuple(Ask(t, tuple(units)) for t, units in call) for call in calls)
    return profile_of(Routes(reads, asks), storages, traces, names)


@st.composite
def recordings(draw, pages=(1,)):
    """Calls that ask for random units, of which some are popular, of pairs of tables or of single ones.

    Units of the n-th table of a pair have `pages[n]` pages.
    """
    random = Random(draw(st.integers(0, 1 << 32)))
    count, most, skew = random.randint(2, 12), random.randint(1, 5), random.random()
    turns = random.randint(1, 3)
    tables = [(count, one * PAGE, turn) for turn in range(turns) for one in pages]
    calls = []
    for _ in range(random.randint(2, 20)):
        call = []
        for turn in range(turns):
            some = {_one(random, count, skew) for _ in range(random.randint(1, most))}
            call += [(turn * len(pages) + k, sorted(some)) for k in range(len(pages))]
        calls.append(call)
    return recording(tables, calls)


def _one(random, count, skew):
    """A unit: any one, or, with probability `skew`, one by Zipf's law with exponent 1."""
    if random.random() > skew:
        return random.randrange(count)
    return random.choices(range(count), [1 / (k + 1) for k in range(count)])[0]
