"""The walk of one schedule through two passes, which covers every legal timing at once, for the verifier.

A transfer may write at any time from the end of the step that it waits for until the read that it is for
begins. The walk therefore takes its bytes to be unusable, and to occupy memory, for all of that time. Steps
run in sequence, and drops happen when steps end, so it suffices to look at the ends of steps. A plan that
passes is safe at any speed of any copy. At the start of a pass, the boundary is on the device or on its way.
In the first pass, all that is known is that each of its ranges has arrived when it is first read. In the
second pass, ranges arrive as in every later pass, so two passes prove all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Drop, Schedule, Trace, Transfer
from penstock.schedule.verify.memory import ABSENT, Item, Memory, Place

PASSES = 2
NEVER = 1 << 62


def lay(items: Sequence[Item], memory: Memory, what: str) -> list[int]:
    """The content of every cell if it holds `items` and nothing else.

    Raises PlanError if two of the items take the same bytes; `what` names them in the message.
    """
    owner = [ABSENT] * memory.cells
    for i, item in enumerate(items):
        place = memory.place(item)
        if not _uniform(owner, place, ABSENT):
            raise PlanError(f"{what} {i} of bytes {item.start}:{item.stop} overlaps another {what}")
        owner[place.lo : place.hi] = [place.content] * (place.hi - place.lo)
    return owner


def gates(schedule: Schedule, steps: int) -> list[int]:
    """For each transfer, the step after whose end it may really start.

    This is its own `after`, or a later `after` of a transfer that is issued before it. Raises PlanError for a
    transfer that would wait for a step that itself waits for the transfer.
    """
    transfers = schedule.transfers
    opened = max((t.after for t in transfers), default=0) - steps
    leader = max(range(len(transfers)), key=lambda i: transfers[i].after, default=0)
    result = []
    for i, t in enumerate(transfers):
        if t.after > opened:
            opened, leader = t.after, i
        where = f"graph {schedule.graph}: {_transfer(schedule, i)}"
        if opened >= t.step:
            raise PlanError(
                f"{where} never starts: before it in line, transfer {leader} waits for the end of step "
                f"{opened}, which is not before step {t.step}"
            )
        if t.after < 0 <= opened:
            raise PlanError(
                f"{where} should be on its way when a call begins, but before it in line transfer {leader} "
                f"waits for the end of step {opened} of that call"
            )
        result.append(opened)
    return result


class Walk:
    """The state of every cell while `schedule` runs; `run` raises PlanError at the first fault."""

    def __init__(self, memory: Memory, plan: Decisions, schedule: Schedule, trace: Trace) -> None:
        self._memory, self._plan, self._schedule, self._trace = memory, plan, schedule, trace
        self._steps = len(trace.steps)
        self._items = plan.boundary_of(schedule)
        self._boundary = lay(self._items, memory, "boundary range")
        self._reads = [self._read_places(step.reads) for step in trace.steps]
        self._opened: dict[int, list[int]] = defaultdict(list)
        for i, gate in enumerate(gates(schedule, self._steps)):
            self._opened[gate].append(i)
        self._dropped: dict[int, list[int]] = defaultdict(list)
        for i, drop in enumerate(schedule.drops):
            self._dropped[drop.step].append(i)
        # The content of each cell, and the step, counted over all passes, by whose read it has arrived.
        self._owner = list(self._boundary)
        self._due = self._cold_due()
        self._occupied = sum(r.nbytes for r in self._items)

    def run(self) -> None:
        """Walk through two passes. Raises PlanError at the first fault."""
        self._check_room("at the beginning of a call")
        for now in range(PASSES * self._steps):
            begun, step = now - now % self._steps, now % self._steps
            for s, place in self._reads[step]:
                self._read(s, place, now)
            for i in self._dropped[step]:
                self._drop(i, now)
            for i in self._opened[step]:
                self._start(i, now, begun)
            for i in self._opened[step - self._steps]:
                self._start(i, now, begun + self._steps)
            self._check_room(f"after {self._step(step)}")
            if step == self._steps - 1:
                self._check_boundary()

    def _read_places(self, reads: tuple[int, ...]) -> list[tuple[int, Place]]:
        places = ((s, self._memory.place_storage(s)) for s in reads)
        return [(s, place) for s, place in places if place is not None]

    def _cold_due(self) -> list[int]:
        """For each cell, the step by whose read a cold start has brought it.

        A cold start brings a range of the boundary by the first read of any of its bytes.
        """
        first = [NEVER] * self._memory.cells
        for step in reversed(range(self._steps)):
            for content, lo, hi in (place for _, place in self._reads[step]):
                first[lo:hi] = [step if self._boundary[c] == content else first[c] for c in range(lo, hi)]
        due = [NEVER] * self._memory.cells
        for item in self._items:
            _, lo, hi = self._memory.place(item)
            due[lo:hi] = [min(first[lo:hi])] * (hi - lo)
        return due

    def _read(self, s: int, place: Place, now: int) -> None:
        owner, due = self._owner, self._due
        if _uniform(owner, place, place.content) and max(due[place.lo : place.hi]) <= now:
            return
        cell = next(c for c in range(place.lo, place.hi) if owner[c] != place.content or due[c] > now)
        if owner[cell] == ABSENT:
            found = "no transfer has brought"
        elif owner[cell] != place.content:
            found = f"then belong to storage {owner[cell]}"
        else:
            found = "a transfer may still be writing"
        raise self._fault(
            f"{self._step(now % self._steps)} reads storage {s}, of which {self._at(cell)} {found}", now
        )

    def _drop(self, i: int, now: int) -> None:
        drop = self._schedule.drops[i]
        place = self._memory.place(drop)
        what = f"drop {i} of bytes {drop.start}:{drop.stop} after {self._step(drop.step)}"
        if not _uniform(self._owner, place, place.content):
            cell = next(c for c in range(place.lo, place.hi) if self._owner[c] != place.content)
            raise self._fault(f"{what} takes {self._at(cell)}, which are not on the device", now)
        if max(self._due[place.lo : place.hi]) > now:
            cell = next(c for c in range(place.lo, place.hi) if self._due[c] > now)
            raise self._fault(f"{what} takes {self._at(cell)} before they are sure to have arrived", now)
        self._owner[place.lo : place.hi] = [ABSENT] * (place.hi - place.lo)
        self._occupied -= drop.stop - drop.start

    def _start(self, i: int, now: int, begun: int) -> None:
        transfer = self._schedule.transfers[i]
        place = self._memory.place(transfer)
        lo, hi = place.lo, place.hi
        for cell in range(lo, hi):
            if self._owner[cell] != ABSENT and self._due[cell] > now:
                raise self._fault(
                    f"{_transfer(self._schedule, i)} may write {self._at(cell)} while an earlier copy into "
                    "them is under way",
                    now,
                )
        if self._memory.paged and not _uniform(self._owner, place, ABSENT):
            cell = next(c for c in range(lo, hi) if self._owner[c] != ABSENT)
            raise self._fault(
                f"{_transfer(self._schedule, i)} brings {self._at(cell)}, which are on the device already: "
                "drop them before it starts",
                now,
            )
        self._owner[lo:hi] = [place.content] * (hi - lo)
        self._due[lo:hi] = [begun + transfer.step] * (hi - lo)
        self._occupied += transfer.stop - transfer.start

    def _check_room(self, when: str) -> None:
        if self._memory.paged and self._occupied > self._plan.arena_bytes:
            raise PlanError(
                f"graph {self._trace.graph}: {when} the ranges held may need {self._occupied} bytes, more "
                f"than the {self._plan.arena_bytes} of the arena"
            )

    def _check_boundary(self) -> None:
        if self._owner == self._boundary:
            return
        cell = next(c for c, content in enumerate(self._owner) if content != self._boundary[c])
        held, expected = self._owner[cell] != ABSENT, self._boundary[cell] != ABSENT
        relation = (
            "are not those of" if held and expected else "are missing from" if held else "are gone, but in"
        )
        raise PlanError(
            f"graph {self._trace.graph}: at the end of a pass {self._at(cell)} {relation} the boundary"
        )

    def _step(self, step: int) -> str:
        return f"step {step} ({self._trace.steps[step].name})"

    def _at(self, cell: int) -> str:
        extent = self._memory.extent(cell)
        return f"{'bytes' if self._memory.paged else 'arena bytes'} {extent.start}:{extent.stop}"

    def _fault(self, message: str, now: int) -> PlanError:
        which = "first" if now < self._steps else "second"
        return PlanError(f"graph {self._trace.graph}, {which} pass: {message}")


def _uniform(owner: list[int], place: Place, content: int) -> bool:
    return owner[place.lo : place.hi].count(content) == place.hi - place.lo


def _transfer(schedule: Schedule, i: int) -> str:
    t: Transfer = schedule.transfers[i]
    return f"transfer {i} (bytes {t.start}:{t.stop}, for step {t.step}, after step {t.after})"


def dropped_or_written(schedule: Schedule) -> list[tuple[str, Transfer | Drop]]:
    """The transfers and the drops of `schedule`, each with its name for a message."""
    named: list[tuple[str, Transfer | Drop]] = [
        (_transfer(schedule, i), t) for i, t in enumerate(schedule.transfers)
    ]
    named += [
        (f"drop {i} (bytes {d.start}:{d.stop}, after step {d.step})", d) for i, d in enumerate(schedule.drops)
    ]
    return named
