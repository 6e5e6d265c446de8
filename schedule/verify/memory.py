"""The memory of a plan as cells, for the verifier: the bytes of the arena that a range or a storage fills.

This file shares no code with the planner. In a paged arena, the address of a byte is its layout offset. In a
contiguous arena it is the layout offset plus the shift of its storage, and several storages may share an
address. The edges of all ranges that the plan moves cut the addresses into cells, so that a cell is filled
and dropped as a whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Drop, Range, Storage, Transfer

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
        """Raise PlanError unless `item` is a run of granules inside a segment and, if contiguous, a slot."""
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
