"""The walk through two passes of a method, which covers every legal timing at once, for the verifier.

A transfer may write at any time from the end of the step that it waits for until the read that it is for
begins. The walk therefore takes its bytes to be unusable, and to occupy memory, for all of that time. Steps
run in sequence, and drops happen when steps end, so it suffices to look at the ends of steps. A plan that
passes is safe at any speed of any copy. At the start of a pass, the boundary is on the device or on its way.
In the first pass, all that is known is that each of its ranges has arrived when it is first read. In the
second pass, ranges arrive as in every later pass, so two passes prove all of them. Methods whose calls come
in turn run in turn, twice, from each of them on.

Produced bytes take memory when the step begins that writes them. A copy out holds its bytes from when it may
start to the end of the step that waits for it; only then may they leave or be overwritten, and only from then
on may a copy in bring them. What the spill file has is forgotten when a call begins that writes it anew. From
a cold device, it has all that the call before wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Drop, Schedule, Trace, Transfer
from penstock.schedule.verify.memory import ABSENT, Item, Memory, Place

PASSES = 2
NEVER = 1 << 62
NEVER_YET = -1


def lay(items: Sequence[Item], memory: Memory, title: str) -> list[int]:
    """The content of every cell if it holds `items` and nothing else.

    Raises PlanError if two of the items take the same bytes; `what` names them in the message.
    """
    owner = [ABSENT] * memory.cells
    for i, move in enumerate(items):
        place = memory.place(move)
        if not _uniform(owner, place, ABSENT):
            raise PlanError(f"{title} {i} of bytes {move.start}:{move.stop} overlaps another {title}")
        owner[place.lo : place.hi] = [place.content] * (place.hi - place.lo)
    return owner


Call = tuple[Schedule, Trace]
"""One call of a method."""


def gates(calls: Sequence[Call]) -> list[list[int]]:
    """For each transfer of calls that come in turn, the step after whose end it may really start.

    This is its own `after`, or a later one of a transfer that is issued before it, counted from the beginning
    of the transfer's own call. Raises PlanError for a transfer that would wait for a step that itself waits
    for the transfer.
    """
    line: list[tuple[int, int, Schedule, int]] = []
    begins, begun = [], 0
    for schedule, trace in calls:
        begins.append(begun)
        line += ((t.after + begun, begun, schedule, i) for i, t in enumerate(schedule.transfers))
        begun += len(trace.steps)
    last = max(line, key=lambda reached: reached[0], default=None)
    opened = last[0] - begun if last else 0
    result: list[list[int]] = [[] for _ in calls]
    for after, begin, schedule, i in line:
        if after > opened:
            opened, last = after, (after, begin, schedule, i)
        assert last is not None
        t, step = schedule.transfers[i], opened - begin
        where = f"graph {schedule.graph}: {_transfer(schedule, i)}"
        leader = f"transfer {last[3]}" + (f" of graph {last[2].graph}" if last[2] is not schedule else "")
        if step >= t.step:
            raise PlanError(
                f"{where} never starts: before it in line, {leader} waits for the end of step "
                f"{step}, which is not before step {t.step}"
            )
        if t.after < 0 <= step:
            raise PlanError(
                f"{where} should be on its way when a call begins, but before it in line {leader} "
                f"waits for the end of step {step} of that call"
            )
        result[begins.index(begin)].append(step)
    return result


class _Steps:
    """What happens when the steps of one call end: which transfers may start, and which drops are due.

    `opened` counts steps from the beginning of the call; negative ones are of the call before.
    """

    def __init__(self, call: Call, gates: Sequence[int], memory: Memory) -> None:
        self.schedule, self.trace = call
        self.reads = [_places(memory, step.reads) for step in self.trace.steps]
        self.writes = [_places(memory, step.writes) for step in self.trace.steps]
        self.opened: dict[int, list[int]] = defaultdict(list)
        for i, gate in enumerate(gates):
            self.opened[gate].append(i)
        self.dropped: dict[int, list[int]] = defaultdict(list)
        for i, drop in enumerate(self.schedule.drops):
            self.dropped[drop.step].append(i)

    @property
    def count(self) -> int:
        return len(self.trace.steps)


def _places(memory: Memory, storages: tuple[int, ...]) -> list[tuple[int, Place]]:
    places = ((s, memory.place_storage(s)) for s in storages)
    return [(s, place) for s, place in places if place is not None]


class Walk:
    """The state of every cell while calls run in turn; `run` raises PlanError at the first fault.

    The first of `calls` begins from a cold device, and the first comes again behind the last.
    """

    def __init__(self, memory: Memory, plan: Decisions, calls: Sequence[Call]) -> None:
        self._memory, self._plan = memory, plan
        self._calls = [_Steps(*pair, memory) for pair in zip(calls, gates(calls), strict=True)]
        self._items = plan.boundary_of(calls[0][0])
        self._boundaries = [
            lay(plan.boundary_of(schedule), memory, "boundary range") for schedule, _ in calls
        ]
        # The content of each cell, and the step, counted over all calls, by whose read it has arrived.
        self._owner = list(self._boundaries[0])
        self._due = self._cold_due()
        self._occupied = sum(r.nbytes for r in self._items)
        # By storage and cell, the step by whose end the spill file has the bytes; by cell, the step up to
        # whose end a copy out needs them.
        self._saved = {(s, c): NEVER_YET for s, place in self._written(-1) for c in range(place.lo, place.hi)}
        self._leaving = [NEVER_YET] * memory.cells

    def _written(self, number: int) -> list[tuple[int, Place]]:
        """The storages that a call writes, with their cells."""
        return [written for step in self._calls[number].writes for written in step]

    def run(self) -> None:
        """Walk through two passes of every method. Raises PlanError at the first fault."""
        self._call, self._pass = self._calls[0], 0
        self._check_room("at the beginning of a call")
        begun = 0
        for number in range(PASSES * len(self._calls)):
            self._pass, index = divmod(number, len(self._calls))
            self._call = self._calls[index]
            following = (index + 1) % len(self._calls)
            self._run_call(self._calls[following], begun)
            if self._call.count:
                self._check_boundary(self._boundaries[following])
            begun += self._call.count

    def _run_call(self, following: _Steps, begun: int) -> None:
        call = self._call
        written = {s for places in call.writes for s, _ in places}
        self._saved = {key: step for key, step in self._saved.items() if key[0] not in written}
        for step in range(call.count):
            now = begun + step
            for s, place in call.writes[step]:
                self._write(s, place, now, begun)
            for s, place in call.reads[step]:
                self._read(s, place, now, begun)
            for i in call.dropped[step]:
                self._drop(i, now)
            for i in call.opened[step]:
                self._start(call.schedule, i, now, begun)
            for i in following.opened[step - call.count]:
                self._start(following.schedule, i, now, begun + call.count)
            self._check_room(f"after {self._step(step)}")

    def _cold_due(self) -> list[int]:
        """For each cell, the step by whose read a cold start has brought it.

        A cold start brings a range of the boundary by the first read of any of its bytes, and a range that
        the call does not read by its last step.
        """
        call, boundary = self._calls[0], self._boundaries[0]
        first = [max(call.count - 1, 0)] * self._memory.cells
        for step in reversed(range(call.count)):
            for content, lo, hi in (place for _, place in call.reads[step]):
                first[lo:hi] = [step if boundary[c] == content else first[c] for c in range(lo, hi)]
        due = [NEVER] * self._memory.cells
        for piece in self._items:
            _, lo, hi = self._memory.place(piece)
            due[lo:hi] = [min(first[lo:hi])] * (hi - lo)
        return due

    def _read(self, s: int, place: Place, now: int, begun: int) -> None:
        owner, due = self._owner, self._due
        if _uniform(owner, place, place.content) and max(due[place.lo : place.hi]) <= now:
            return
        cell = next(c for c in range(place.lo, place.hi) if owner[c] != place.content or due[c] > now)
        if owner[cell] == ABSENT:
            state = "no transfer has brought"
        elif owner[cell] != place.content:
            state = f"then belong to storage {owner[cell]}"
        else:
            state = "a transfer may still be writing"
        raise self._fault(f"{self._step(now - begun)} reads storage {s}, of which {self._at(cell)} {state}")

    def _write(self, s: int, place: Place, now: int, begun: int) -> None:
        action = f"{self._step(now - begun)} writes storage {s} to"
        for cell in range(place.lo, place.hi):
            if self._owner[cell] != ABSENT and (self._memory.paged or self._due[cell] > now):
                raise self._fault(f"{action} {self._at(cell)}, which are not free")
        self._check_leaving(place, now - 1, action)
        self._fill(place, now)
        self._occupied += self._nbytes(place)
        self._check_room(f"in {self._step(now - begun)}")

    def _fill(self, place: Place, due: int) -> None:
        self._owner[place.lo : place.hi] = [place.content] * (place.hi - place.lo)
        self._due[place.lo : place.hi] = [due] * (place.hi - place.lo)

    def _nbytes(self, place: Place) -> int:
        return sum(extent.nbytes for extent in map(self._memory.extent, range(place.lo, place.hi)))

    def _check_leaving(self, place: Place, now: int, action: str) -> None:
        """Raise PlanError if a copy out may need bytes of these cells after the end of step `now`."""
        for cell in range(place.lo, place.hi):
            if self._leaving[cell] > now:
                raise self._fault(f"{action} {self._at(cell)} before a copy out of them is sure to be done")

    def _drop(self, i: int, now: int) -> None:
        drop = self._call.schedule.drops[i]
        place = self._memory.place(drop)
        action = f"drop {i} of bytes {drop.start}:{drop.stop} after {self._step(drop.step)}"
        if not _uniform(self._owner, place, place.content):
            cell = next(c for c in range(place.lo, place.hi) if self._owner[c] != place.content)
            raise self._fault(f"{action} takes {self._at(cell)}, which are not on the device")
        if max(self._due[place.lo : place.hi]) > now:
            cell = next(c for c in range(place.lo, place.hi) if self._due[c] > now)
            raise self._fault(f"{action} takes {self._at(cell)} before they are sure to have arrived")
        self._check_leaving(place, now, f"{action} takes")
        self._owner[place.lo : place.hi] = [ABSENT] * (place.hi - place.lo)
        self._occupied -= drop.stop - drop.start

    def _start(self, schedule: Schedule, i: int, now: int, begun: int) -> None:
        transfer = schedule.transfers[i]
        place = self._memory.place(transfer)
        lo, hi = place.lo, place.hi
        produced = self._memory.produced(transfer)
        if transfer.direction == "out":
            assert produced is not None
            self._start_out(schedule, i, now, begun, produced)
            return
        if produced is not None:
            self._check_saved(schedule, i, produced, now)
        self._check_leaving(place, now, f"{_transfer(schedule, i)} may write")
        for cell in range(lo, hi):
            if self._owner[cell] != ABSENT and self._due[cell] > now:
                raise self._fault(
                    f"{_transfer(schedule, i)} may write {self._at(cell)} while an earlier copy into "
                    "them is under way"
                )
        if self._memory.paged and not _uniform(self._owner, place, ABSENT):
            cell = next(c for c in range(lo, hi) if self._owner[c] != ABSENT)
            raise self._fault(
                f"{_transfer(schedule, i)} brings {self._at(cell)}, which are on the device already: "
                "drop them before it starts"
            )
        self._fill(place, begun + transfer.step)
        self._occupied += transfer.stop - transfer.start

    def _start_out(self, schedule: Schedule, i: int, now: int, begun: int, s: int) -> None:
        transfer = schedule.transfers[i]
        place = self._memory.place(transfer)
        for cell in range(place.lo, place.hi):
            if self._owner[cell] != place.content or self._due[cell] > now:
                raise self._fault(
                    f"{_transfer(schedule, i)} copies out {self._at(cell)}, which are not sure to be there"
                )
            self._saved[s, cell] = begun + transfer.step
            self._leaving[cell] = max(self._leaving[cell], begun + transfer.step)

    def _check_saved(self, schedule: Schedule, i: int, s: int, now: int) -> None:
        place = self._memory.place(schedule.transfers[i])
        for cell in range(place.lo, place.hi):
            if self._saved.get((s, cell), NEVER) > now:
                raise self._fault(
                    f"{_transfer(schedule, i)} brings {self._at(cell)} before they are sure to be in the "
                    "spill file"
                )

    def _check_room(self, when: str) -> None:
        if self._memory.paged and self._occupied > self._plan.arena_bytes:
            raise PlanError(
                f"graph {self._call.trace.graph}: {when} the ranges held may need {self._occupied} bytes, "
                f"more than the {self._plan.arena_bytes} of the arena"
            )

    def _check_boundary(self, boundary: Sequence[int]) -> None:
        """Raise PlanError unless exactly what the next call begins with is on the device or on its way."""
        if self._owner == boundary:
            return
        cell = next(c for c, content in enumerate(self._owner) if content != boundary[c])
        is_held, expected = self._owner[cell] != ABSENT, boundary[cell] != ABSENT
        relation = (
            "are not those of"
            if is_held and expected
            else "are missing from"
            if is_held
            else "are gone, but in"
        )
        raise PlanError(
            f"graph {self._call.trace.graph}: at the end of a pass {self._at(cell)} {relation} the boundary"
        )

    def _step(self, step: int) -> str:
        return f"step {step} ({self._call.trace.steps[step].name})"

    def _at(self, cell: int) -> str:
        extent = self._memory.extent(cell)
        return f"{'bytes' if self._memory.paged else 'arena bytes'} {extent.start}:{extent.stop}"

    def _fault(self, message: str) -> PlanError:
        pass_name = "second" if self._pass else "first"
        return PlanError(f"graph {self._call.trace.graph}, {pass_name} pass: {message}")


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
