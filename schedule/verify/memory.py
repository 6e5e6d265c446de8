"""The memory of a plan as cells, for the verifier: which bytes a range or a storage stands for.

Shares no code with the planner. In a paged arena a byte's address is its layout offset; in a
contiguous one it is the offset plus its storage's shift, and several storages may share it. The
edges of everything that the plan moves cut the addresses into cells, each of them all there or not
there at all.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Decisions, Drop, Range, Storage, Transfer

ABSENT = -1
LAYOUT = 0
"""What every byte of a paged arena holds: the layout's own. In a contiguous arena a storage's index."""

Piece = Range | Transfer | Drop


class Place(NamedTuple):
    """Cells `lo` to `hi`, and the content that they must hold."""

    content: int
    lo: int
    hi: int


class Memory:
    """The cells of `plan`'s arena. Raises PlanError for what lies outside it or is misaligned."""

    def __init__(self, storages: tuple[Storage, ...], plan: Decisions) -> None:
        self.paged = plan.arena.kind == "paged"
        self._plan = plan
        self._storages = storages
        self._segments = [s.start for s in plan.arena.segments]
        self._outside = set(plan.outside)
        self._check_arena()
        self._inside = [s for s, at in enumerate(plan.arena.layout) if at != -1 and self._takes_room(s)]
        self._slots = sorted((plan.arena.layout[s], s) for s in self._inside)
        for s in self._inside:
            self._check_storage(s)
        self._edges = self._cut()

    def place(self, piece: Piece) -> Place:
        """The cells that a range of the layout fills, checked when the memory was made."""
        content = LAYOUT if self.paged else self._owner(piece)
        start = piece.start + self._shift(content)
        return self._cells(content, start, start + piece.stop - piece.start)

    def place_storage(self, s: int) -> Place | None:
        """The cells of storage `s`, which a step reads; None where it needs none."""
        if not self._takes_room(s):
            return None
        if self._plan.arena.layout[s] == -1:
            raise PlanError(
                f"storage {s} is read, but has no place in the layout and is not listed as outside it"
            )
        content = LAYOUT if self.paged else s
        start = self._plan.arena.layout[s] + self._shift(content)
        return self._cells(content, start, start + self._storages[s].nbytes)

    @property
    def cells(self) -> int:
        return max(len(self._edges) - 1, 0)

    def extent(self, cell: int) -> Range:
        """The addresses of a cell."""
        return Range(self._edges[cell], self._edges[cell + 1])

    def check_piece(self, piece: Piece, what: str) -> None:
        """Raise PlanError unless `piece` is a run of granules inside a segment (and slot)."""
        arena = self._plan.arena
        span = f"{what} of bytes {piece.start}:{piece.stop}"
        segment = self._segment(piece.start)
        if segment is None or not piece.start < piece.stop <= segment.stop:
            raise PlanError(f"{span} is not inside one segment of the layout, {_listed(arena.segments)}")
        starts, stops = {segment.start}, {segment.stop}
        if not self.paged:
            slot = self._slot(self._owner(piece, span))
            if not slot.start <= piece.start < piece.stop <= slot.stop:
                raise PlanError(f"{span} is not inside one storage's slot, which is {slot.start}:{slot.stop}")
            owner = self._owner(piece)
            starts.add(slot.start)
            stops.add(slot.start + self._storages[owner].nbytes)
            address = piece.start + self._shift(owner)
            if address < 0 or address + piece.stop - piece.start > self._plan.arena_bytes:
                raise PlanError(
                    f"{span} lies at address {address}, which is not inside the arena of "
                    f"{self._plan.arena_bytes} bytes"
                )
        for offset, ends in ((piece.start, starts), (piece.stop, stops)):
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
                # What one segment drops the other would lose: memory comes and goes by granule.
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
        address = self._plan.addresses[s]
        if address < 0 or address % self._plan.arena.granule or address + nbytes > self._plan.arena_bytes:
            raise PlanError(
                f"storage {s}, {nbytes} bytes at address {address}, is not inside the arena of "
                f"{self._plan.arena_bytes} bytes, or not at a multiple of its granule"
            )

    def _takes_room(self, s: int) -> bool:
        return s not in self._outside and self._storages[s].nbytes > 0

    def _segment(self, offset: int) -> Range | None:
        at = bisect_right(self._segments, offset) - 1
        segment = self._plan.arena.segments[at] if at >= 0 else None
        return segment if segment is not None and offset < segment.stop else None

    def _owner(self, piece: Piece, span: str = "") -> int:
        at = bisect_right(self._slots, (piece.start, len(self._storages))) - 1
        if at < 0:
            raise PlanError(f"{span} is not inside the slot of any storage in the arena")
        return self._slots[at][1]

    def _slot(self, s: int) -> Range:
        """From the first byte of storage `s` to the next granule or storage after its last."""
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
        plan = self._plan
        pieces: list[tuple[str, tuple[Piece, ...]]] = [
            ("resident range", plan.resident),
            ("boundary range", plan.boundary),
        ]
        for schedule in plan.schedules:
            pieces += [("transfer", schedule.transfers), ("drop", schedule.drops)]
            pieces += [("boundary range", schedule.boundary or ())]
        edges = set()
        for what, group in pieces:
            for i, piece in enumerate(group):
                self.check_piece(piece, f"{what} {i}")
                start = piece.start + (0 if self.paged else self._shift(self._owner(piece)))
                edges |= {start, start + piece.stop - piece.start}
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
