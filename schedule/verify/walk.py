"""The walk through two passes of a method, which covers every legal timing at once, for the verifier."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Drop, Range, Schedule, Storage, Trace, Transfer

ABSENT = -1
"""The content of a cell that holds nothing."""

LAYOUT = 0
"""The content of a filled cell of a paged arena. In a contiguous arena the content is a storage's index."""

Item = Range | Transfer | Drop


class Place(NamedTuple):
    """Cells `lo` to `hi`, and the content that they must hold."""

    content: int
    lo: int
    hi: int


class Memory:
    """The cells of a plan's arena. Raises PlanError for a range that lies outside it or is misaligned."""

    def __init__(self, storages: tuple[Storage, ...], plan: Decisions) -> None:
        self.paged = plan.arena.kind == "paged"
        self._plan = plan
        self._storages = storages
        self._segments = [s.start for s in plan.arena.segments]
        self._outside = set(plan.outside)
        self._check_arena()
        self._inside = [s for s, at in enumerate(plan.arena.layout) if at != -1 and self._takes_room(s)]
        self._slots = sorted((plan.arena.layout[s], s) for s in self._inside)
        self._produced: dict[int, int] = {}  # by the start of its segment, a storage that a step writes
        for s in self._inside:
            self._check_storage(s)
        self._check_produced()
        self._edges = self._cut()

    def place(self, move: Item) -> Place:
        """The cells that a range of the layout fills; the range was checked when this Memory was made."""
        content = LAYOUT if self.paged else self._owner(move)
        start = move.start + self._shift(content)
        return self._cells(content, start, start + move.stop - move.start)

    def place_storage(self, s: int) -> Place | None:
        """The cells of storage `s`, which a step reads; None if it is outside the arena or empty."""
        if not self._takes_room(s):
            return None
        if self._plan.arena.layout[s] == -1:
            raise PlanError(
                f"storage {s} is read, but has no place in the layout and is not listed as outside it"
            )
        content = LAYOUT if self.paged else s
        start = self._plan.arena.layout[s] + self._shift(content)
        return self._cells(content, start, start + self._storages[s].nbytes)

    def produced(self, move: Item) -> int | None:
        """The storage that a step writes in whose segment a range lies; None if the range is of weights."""
        segment = self._segment(move.start)
        return None if segment is None else self._produced.get(segment.start)

    @property
    def cells(self) -> int:
        return max(len(self._edges) - 1, 0)

    def extent(self, cell: int) -> Range:
        """The addresses of a cell."""
        return Range(self._edges[cell], self._edges[cell + 1])

    def check_item(self, move: Item, title: str) -> None:
        """Raise PlanError unless `move` is a run of granules inside a segment and, if contiguous, a slot."""
        arena = self._plan.arena
        span = f"{title} of bytes {move.start}:{move.stop}"
        segment = self._segment(move.start)
        if segment is None or not move.start < move.stop <= segment.stop:
            raise PlanError(f"{span} is not inside one segment of the layout, {_listed(arena.segments)}")
        starts, stops = {segment.start}, {segment.stop}
        if not self.paged:
            slot = self._slot(self._owner(move, span))
            if not slot.start <= move.start < move.stop <= slot.stop:
                raise PlanError(f"{span} is not inside one storage's slot, which is {slot.start}:{slot.stop}")
            owner = self._owner(move)
            starts.add(slot.start)
            stops.add(slot.start + self._storages[owner].nbytes)
            address = move.start + self._shift(owner)
            if address < 0 or address + move.stop - move.start > self._plan.arena_bytes:
                raise PlanError(
                    f"{span} lies at address {address}, which is not inside the arena of "
                    f"{self._plan.arena_bytes} bytes"
                )
        for offset, ends in ((move.start, starts), (move.stop, stops)):
            if offset % arena.granule and offset not in ends:
                raise PlanError(
                    f"{span} is cut at {offset}, which is no multiple of the granule {arena.granule}"
                )

    def _check_arena(self) -> None:
        arena, count = self._plan.arena, len(self._storages)
        if arena.kind not in ("paged", "contiguous") or arena.granule < 1:
            raise PlanError(
                f"expected a paged or contiguous arena of granule 1 or more, got {arena.kind!r}, "
                f"{arena.granule}"
            )
        reached = 0
        for segment in arena.segments:
            if not reached <= segment.start < segment.stop:
                raise PlanError(
                    f"expected ascending segments apart from each other, got {_listed(arena.segments)}"
                )
            if self.paged and reached > segment.start // arena.granule * arena.granule:
                # Memory is filled and dropped by granule, so one segment would drop bytes of the other.
                raise PlanError(
                    f"expected segments that share no granule of {arena.granule} bytes, got "
                    f"{_listed(arena.segments)}"
                )
            reached = segment.stop
        addresses = 0 if self.paged else count
        if len(arena.layout) != count or len(self._plan.addresses) != addresses:
            raise PlanError(
                f"expected {count} layout offsets and {addresses} addresses for {count} storages, got "
                f"{len(arena.layout)} and {len(self._plan.addresses)}"
            )

    def _check_storage(self, s: int) -> None:
        start, nbytes = self._plan.arena.layout[s], self._storages[s].nbytes
        segment = self._segment(start)
        if segment is None or start + nbytes > segment.stop:
            raise PlanError(
                f"storage {s}, bytes {start}:{start + nbytes}, is in the arena but not in one segment"
            )
        if self.paged:
            return
        following = bisect_right(self._slots, (start, s))
        if following < len(self._slots) and self._slots[following][0] < start + nbytes:
            raise PlanError(
                f"storages {s} and {self._slots[following][1]} overlap in the layout at byte {start + nbytes}"
            )
        address, granule = self._plan.addresses[s], self._plan.arena.granule
        if address < 0 or address + nbytes > self._plan.arena_bytes:
            raise PlanError(
                f"storage {s}, {nbytes} bytes at address {address}, is not inside the arena of "
                f"{self._plan.arena_bytes} bytes"
            )
        if (address - start) % granule:
            raise PlanError(
                f"storage {s} at address {address} is not where the layout has it in a granule of {granule} "
                f"bytes: at {start % granule}"
            )

    def _check_produced(self) -> None:
        """A storage that a step writes shares its segment with no other."""
        contents: dict[int, list[int]] = {}
        for s in self._inside:
            segment = self._segment(self._plan.arena.layout[s])
            assert segment is not None
            contents.setdefault(segment.start, []).append(s)
        for start, some in contents.items():
            for s in some:
                if self._storages[s].kind != "produced":
                    continue
                if len(some) > 1:
                    raise PlanError(
                        f"storage {s} is produced and shares a segment of the layout with {len(some) - 1} "
                        "others, expected one of its own"
                    )
                self._produced[start] = s

    def _takes_room(self, s: int) -> bool:
        return s not in self._outside and self._storages[s].nbytes > 0

    def _segment(self, offset: int) -> Range | None:
        at = bisect_right(self._segments, offset) - 1
        segment = self._plan.arena.segments[at] if at >= 0 else None
        return segment if segment is not None and offset < segment.stop else None

    def _owner(self, move: Item, span: str = "") -> int:
        at = bisect_right(self._slots, (move.start, len(self._storages))) - 1
        if at < 0:
            raise PlanError(f"{span} is not inside the slot of any storage in the arena")
        return self._slots[at][1]

    def _slot(self, s: int) -> Range:
        """The layout range of storage `s`, up to the end of its last granule or to the next storage."""
        start, granule = self._plan.arena.layout[s], self._plan.arena.granule
        stop = -(-(start + self._storages[s].nbytes) // granule) * granule
        segment = self._segment(start)
        following = bisect_right(self._slots, (start, s))
        limits = [stop] if segment is None else [stop, segment.stop]
        limits += [self._slots[following][0]] if following < len(self._slots) else []
        return Range(start, min(limits))

    def _shift(self, content: int) -> int:
        return 0 if self.paged else self._plan.addresses[content] - self._plan.arena.layout[content]

    def _cut(self) -> list[int]:
        """The edges of all cells, in ascending order, once every range of the plan has been checked."""
        plan = self._plan
        items: list[tuple[str, tuple[Item, ...]]] = [
            ("resident range", plan.resident),
            ("boundary range", plan.boundary),
        ]
        for schedule in plan.schedules:
            items += [("transfer", schedule.transfers), ("drop", schedule.drops)]
            items += [("boundary range", schedule.boundary or ())]
        edges = set()
        for title, group in items:
            for i, move in enumerate(group):
                self.check_item(move, f"{title} {i}")
                start = move.start + (0 if self.paged else self._shift(self._owner(move)))
                edges |= {start, start + move.stop - move.start}
        if self.paged:
            edges |= {edge for s in plan.arena.segments for edge in (s.start, s.stop)}
        else:
            for s in self._inside:
                edges |= {plan.addresses[s], plan.addresses[s] + self._storages[s].nbytes}
        return sorted(edges)

    def _cells(self, content: int, start: int, stop: int) -> Place:
        return Place(content, bisect_right(self._edges, start) - 1, bisect_left(self._edges, stop))


def _listed(ranges: tuple[Range, ...]) -> str:
    shown = ", ".join(f"{r.start}:{r.stop}" for r in ranges[:4])
    return shown + (", ..." if len(ranges) > 4 else "")


PASSES = 2
NEVER = 1 << 62
NEVER_YET = -1


def lay(items: Sequence[Item], memory: Memory, title: str) -> list[int]:
    """The content of each cell if it holds `items`, called `title`. Raises PlanError if two overlap."""
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
    """What starts and leaves when steps of a call end; `opened` counts them, negative in the call before."""

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

    The first of `calls` begins from a cold device, and is called again after the last.
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
        written = [storage_place for step in self._calls[-1].writes for storage_place in step]
        self._saved = {(s, c): NEVER_YET for s, place in written for c in range(place.lo, place.hi)}
        self._leaving = [NEVER_YET] * memory.cells

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
        self._occupied += sum(self._memory.extent(cell).nbytes for cell in range(place.lo, place.hi))
        self._check_room(f"in {self._step(now - begun)}")

    def _fill(self, place: Place, due: int) -> None:
        self._owner[place.lo : place.hi] = [place.content] * (place.hi - place.lo)
        self._due[place.lo : place.hi] = [due] * (place.hi - place.lo)

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
            for cell in range(lo, hi):
                if self._saved.get((produced, cell), NEVER) > now:
                    raise self._fault(
                        f"{_transfer(schedule, i)} brings {self._at(cell)} before they are sure to be in the "
                        "spill file"
                    )
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
