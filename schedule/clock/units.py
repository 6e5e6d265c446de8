"""The copies of units in the event graph: what a call asks for, beside the transfers of its plan.

A step asks for its units when its lead has ended and what it reads whole is there. They overtake the
transfers that wait for the link by then, since nothing can go on without them, and the link makes up for
them before the first transfer that cannot start until this step has ended. So a unit takes the link's time
once: no event is later than without units by more than all of them take, and none is earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.schedule.facts.model import Hardware, Schedule, Trace


@dataclass(frozen=True)
class UnitCopy:
    """Units that step `step` has brought in `ns` nanoseconds; the reads of the steps in `waits` need them."""

    step: int
    ns: int
    waits: tuple[int, ...]


UnitCopies = Sequence[UnitCopy]
"""The copies of units of one pass, in the order in which they are asked for."""


def unit_edges(
    facts: tuple[Trace, Schedule, Hardware],
    line: Sequence[int],
    copies: tuple[UnitCopies, UnitCopies],
    begin: int,
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the edges that the units of a pass add to the event graph: source, target, ns and height.

    `line` has the transfers in issue order, those out too where they share the link. `copies` are those of
    the pass before and of this one. The latter are numbered from `begin` on; so are the former, among the
    events of their own pass.
    """
    trace, schedule, hardware = facts
    n, (before, now) = len(trace.steps), copies
    arrived = {schedule.transfers[i].step: n + i for i in line if schedule.transfers[i].direction == "in"}
    for node, copy in enumerate(now, begin):
        asked = trace.steps[copy.step].lead_ns
        yield (copy.step - 1 if copy.step else n + len(schedule.transfers)), node, asked + copy.ns, 0
        if copy.step in arrived:
            yield arrived[copy.step], node, copy.ns, 0
        if node > begin:
            yield node - 1, node, copy.ns, 0
        elif before:
            yield begin + len(before) - 1, node, copy.ns, 1
        for step in copy.waits:
            yield node, step, trace.steps[step].read_ns, 0
    made_up: Counter[int] = Counter()
    for height, some in ((1, before), (0, now)):
        for node, copy in enumerate(some, begin):
            late, place = _next_place(schedule, line, copy.step, n)
            if line and late == height:
                made_up[place] += copy.ns
                yield node, n + line[place], hardware.moving_ns(schedule.transfers[line[place]]), height
    for place, ns in made_up.items():
        copy_ns = hardware.moving_ns(schedule.transfers[line[place]])
        yield n + line[place - 1], n + line[place], ns + copy_ns, int(place == 0)


def _next_place(schedule: Schedule, line: Sequence[int], step: int, n: int) -> tuple[int, int]:
    """Where in a line the first transfer is that cannot start before `step` has ended.

    Returns 0 for a transfer of the same pass and 1 for one of the next pass, and its place in the line.
    """
    afters = [schedule.transfers[i].after for i in line]
    places = [
        (height, place)
        for height, reached in ((0, step), (1, step - n))
        for place, after in enumerate(afters)
        if after >= reached
    ]
    return next(iter(places), (1, 0))
