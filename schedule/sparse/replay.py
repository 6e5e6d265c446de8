"""Replays recorded routes: the bytes that a pool moves and the time they take, and the least possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, groupby

from penstock.schedule.clock.event_graph import UnitCopy, launched_steps, simulate, stalls_of
from penstock.schedule.facts.errors import PayloadError, PlanError
from penstock.schedule.facts.model import Decisions, Pool, Range, SparseRead, Storage
from penstock.schedule.space.spans import merged
from penstock.schedule.sparse.pool import Expectation, Missed
from penstock.schedule.sparse.residency import Change, LeastFrequent, LeastRecent, Residency, Unit
from penstock.schedule.sparse.routes import Ask, Profile, Route, served_profile

Round = tuple[SparseRead, Sequence[int]]
"""Units of one read that have to be in a pool together."""


def least_missed(parts: Sequence[Round], pool: Pool, storages: Sequence[Storage]) -> tuple[int, bool]:
    """The least bytes to bring into an empty pool for these parts, and whether a policy brings so few."""
    pieces = _Pieces(pool, storages)
    asked = [list(dict.fromkeys(p for n in numbers for p in pieces.of(read, n))) for read, numbers in parts]
    exact, room = pieces.alike, pool.nbytes
    if exact and pieces.sizes:
        room -= room % pieces.sizes[0]
    return _missed(asked, pieces.sizes, room), exact


class _Pieces:
    """Units cut into pieces, so that the bytes which several units share are one piece."""

    def __init__(self, pool: Pool, storages: Sequence[Storage]) -> None:
        self.sizes: list[int] = []
        self.alike = True  # each piece is a unit of whole granules, and all have one size
        self._pool, self._storages = pool, storages
        self._numbers: dict[tuple[int, int], int] = {}  # by the granules: first, and behind the last
        self._of: dict[tuple[int, int], list[int]] = {}

    def of(self, read: SparseRead, number: int) -> list[int]:
        """The numbers of the pieces of a unit."""
        key = (read.storage, number)
        if key not in self._of:
            self._of[key] = [self._number(read, *cut) for cut in self._cuts(read, number)]
            self.alike &= not any(self._shares(read, number)) and self._whole(read, number)
        return self._of[key]

    def _cuts(self, read: SparseRead, number: int) -> Iterator[tuple[int, int]]:
        """The granules of a unit, cut where another unit has bytes in the first or the last of them."""
        first, stop = self._pool.granules(read, number)
        before, behind = self._shares(read, number)
        left, right = first + before, stop - behind
        if before:
            yield first, left
        if behind and (stop - 1 > first or not before):
            yield right, stop
        if left < right:
            yield left, right

    def _shares(self, read: SparseRead, number: int) -> tuple[bool, bool]:
        """Tells whether other units have bytes in the first and in the last granule of a unit."""
        first, stop = self._pool.granules(read, number)
        before = number > 0 and self._pool.granules(read, number - 1)[1] > first
        return before, number + 1 < read.count and self._pool.granules(read, number + 1)[0] < stop

    def _number(self, read: SparseRead, first: int, stop: int) -> int:
        if (first, stop) not in self._numbers:
            granule, place = self._pool.granule, self._pool.layout[read.storage]
            end = min(stop * granule, place + self._storages[read.storage].nbytes)
            self._numbers[first, stop] = len(self.sizes)
            self.sizes.append(end - max(first * granule, place))
        return self._numbers[first, stop]

    def _whole(self, read: SparseRead, number: int) -> bool:
        granules = self._pool.granules(read, number)
        start, stop = self._pool.bytes_in(granules, read.storage, self._storages[read.storage].nbytes)
        return (stop - start) % self._pool.granule == 0 and stop - start == self.sizes[0]


def _missed(asked: Sequence[Sequence[int]], sizes: Sequence[int], room: int) -> int:
    """Bytes that are brought if those leave first that are asked for last."""
    following = _following(asked, len(sizes))
    is_held, coming = [0] * len(sizes), [0] * len(sizes)
    leaving: list[tuple[int, int]] = []  # minus the part that asks next, and the piece; some are outdated
    total = missed = 0
    for part, later in zip(asked, following, strict=True):
        for piece, at in zip(part, later, strict=True):
            missed += sizes[piece] - is_held[piece]
            total += sizes[piece] - is_held[piece]
            is_held[piece], coming[piece] = sizes[piece], at
        while total > room:  # what this part needs is entered below, and so cannot leave yet
            at, piece = heappop(leaving)
            if -at != coming[piece]:
                continue
            gone = min(is_held[piece], total - room)
            is_held[piece], total = is_held[piece] - gone, total - gone
            if is_held[piece]:
                heappush(leaving, (at, piece))
        for piece, at in zip(part, later, strict=True):
            heappush(leaving, (-at, piece))
    return missed


def _following(asked: Sequence[Sequence[int]], pieces: int) -> list[list[int]]:
    """For each piece of each part, the number of the next part that asks for it."""
    coming = [len(asked)] * pieces
    following: list[list[int]] = []
    for k in range(len(asked) - 1, -1, -1):
        following.append([coming[piece] for piece in asked[k]])
        for piece in asked[k]:
            coming[piece] = k
    return following[::-1]


@dataclass(frozen=True)
class Moved:
    """Units that were brought, and the bytes that were read for them."""

    units: int
    nbytes: int


@dataclass(frozen=True)
class Replay:
    """What `calls` calls move through a pool of `pool_bytes`, by policy: penstock's own, LRU and LFU.

    `asked` is what they ask for: what a pool that keeps nothing moves. `cut` reads did not fit into the pool
    and ran in rounds. No policy that runs reads in the same rounds moves fewer bytes than `least_bytes`. If
    `exact`, there is one that moves no more: Belady's.
    """

    pool_bytes: int
    calls: int
    asked: Moved
    cut: int
    penstock: Moved
    lru: Moved
    lfu: Moved
    least_bytes: int
    exact: bool

    def hits(self, nbytes: int) -> float:
        """The share of the bytes asked for that did not have to be moved, if `nbytes` were moved."""
        return max(0.0, 1 - nbytes / self.asked.nbytes)


def replay(profile: Profile, pool: Pool) -> Replay:
    """What the calls of a profile move through an empty pool. Raises PayloadError if it has other tables."""
    tables = {read.storage for read in profile.reads()}
    if tables != {s for s, place in enumerate(pool.layout) if place >= 0}:
        raise PayloadError(
            "the routes were recorded of other tables than this plan reads by units: record them with a plan "
            "that keeps the same weights, on the same kind of machine"
        )
    driven = Driven(profile, pool)
    reads = [list(rounds) for rounds in driven.reads()]
    least, exact = least_missed([part for rounds in reads for part in rounds], pool, profile.storages)
    return Replay(
        pool_bytes=pool.nbytes,
        calls=len(profile.routes.calls),
        asked=driven.asked(),
        cut=sum(len(rounds) > 1 for rounds in reads),
        penstock=driven.moved(Residency(pool, profile.traces), ahead=True),
        lru=driven.moved(LeastRecent(pool, profile.traces), ahead=False),
        lfu=driven.moved(LeastFrequent(pool, profile.traces), ahead=False),
        least_bytes=least,
        exact=exact,
    )


def expectation(profile: Profile, graphs: Sequence[int]) -> Expectation:
    """What a pass of each of the methods `graphs` misses on average; nothing if no call was recorded."""

    def expect(pool: Pool) -> list[Missed]:
        driven = Driven(profile, pool)
        by_graph: dict[int, list[Moved]] = {graph: [] for graph in graphs}
        calls = driven.moves(Residency(pool, profile.traces), ahead=True)
        for call, moved in zip(profile.routes.calls, calls, strict=True):
            if call:
                by_graph[profile.routes.reads[call[0].read].graph].append(moved)
        return [_average(by_graph[graph]) for graph in graphs]

    return expect


def _sum(moves: Sequence[Moved]) -> Moved:
    return Moved(sum(moved.units for moved in moves), sum(moved.nbytes for moved in moves))


def _average(moves: Sequence[Moved]) -> Missed:
    total, calls = _sum(moves), max(1, len(moves))
    return Missed(total.units / calls, total.nbytes // calls)


class Driven:
    """The calls of a profile, as they drive the policy of a pool."""

    def __init__(self, profile: Profile, pool: Pool) -> None:
        self._profile, self._pool = profile, pool
        self._reads = profile.reads()
        self._read_of = {read.storage: read for read in self._reads}

    def asked(self) -> Moved:
        """What all reads ask for."""
        return self.asked_by([ask for call in self._profile.routes.calls for ask in call])

    def asked_by(self, asks: Sequence[Ask]) -> Moved:
        """What some reads ask for."""
        units = [[(self._reads[ask.read].storage, number) for number in ask.units] for ask in asks]
        places = ([self._bytes_in(unit, self.granules(unit)) for unit in of_ask] for of_ask in units)
        # Where two units share a granule it is read once.
        nbytes = sum(place.nbytes for of_ask in places for place in merged(of_ask))
        return Moved(sum(map(len, units)), nbytes)

    def reads(self) -> Iterator[Iterator[Round]]:
        """The rounds, one after another, in which each read runs."""
        cut = Residency(self._pool, self._profile.traces)
        for call in self._profile.routes.calls:
            for ask in call:
                read = self._reads[ask.read]
                parts = cut.parts(read.storage, ask.units)
                yield zip([read] * len(parts), parts, strict=True)

    def moved(self, residency: Residency, *, ahead: bool) -> Moved:
        """What is moved for all calls, where `residency` decides; `ahead` as far as it is known."""
        return _sum(list(self.moves(residency, ahead=ahead)))

    def moves(self, residency: Residency, *, ahead: bool) -> Iterator[Moved]:
        """Yields what is moved for each call."""
        for call in self.changes(residency, ahead=ahead):
            yield _sum([self.moved_by(change, [*change.bring, *change.ahead]) for _, _, change in call])

    def changes(self, residency: Residency, *, ahead: bool) -> Iterator[list[tuple[Ask, list[int], Change]]]:
        """Yields what happens before each part of each read of a call, as the policy says."""
        for call in self._profile.routes.calls:
            changes = []
            residency.begin()
            for ask in call:
                at = self._profile.routes.reads[ask.read]
                residency.ask(at.graph, at.step, ask.units)
                parts = residency.parts(self._reads[ask.read].storage, ask.units)
                for part in parts or [[]]:
                    change = residency.acquire(at.graph, at.step, part, alone=ahead and len(parts) < 2)
                    residency.release(at.graph, at.step, part)
                    changes.append((ask, part, change))
            yield changes

    def moved_by(self, change: Change, units: Sequence[Unit]) -> Moved:
        """What is read for some of the units that a change brings."""
        places = (self._bytes_in(unit, change.granules[unit]) for unit in units)
        return Moved(len(units), sum(place.nbytes for place in places))

    def read(self, ask: Ask) -> tuple[int, int]:
        """The step that asks, and the storage of which it asks for units."""
        return self._profile.routes.reads[ask.read].step, self._reads[ask.read].storage

    def granules(self, unit: Unit) -> tuple[int, int]:
        """The granules of a unit: the first, and one behind the last."""
        return self._pool.granules(self._read_of[unit[0]], unit[1])

    def _bytes_in(self, unit: Unit, granules: tuple[int, int]) -> Range:
        """The bytes in granules of a unit, of which there may be none."""
        if granules[0] >= granules[1]:
            return Range(0, 0)
        storage = unit[0]
        return Range(*self._pool.bytes_in(granules, storage, self._profile.storages[storage].nbytes))


def ladder_of(profile: Profile) -> Sequence[Pool]:
    """Pools of growing sizes, by about equal factors, from the largest read's units to all tables."""
    smallest, reads = profile.pool(0), profile.reads()
    asks = [(reads[ask.read], ask.units) for call in profile.routes.calls for ask in call]
    edges = ([smallest.granules(read, number) for number in units] for read, units in asks)
    least = max(sum(stop - first for first, stop in pieces) for pieces in edges) * smallest.granule
    most = sum(profile.storages[s].nbytes + smallest.granule for s in {read.storage for read in reads})
    sizes = (least * max(1.0, most / least) ** (k / 7) for k in range(8))
    return [profile.pool(-(-round(size) // smallest.granule) * smallest.granule) for size in sizes]


@dataclass(frozen=True)
class Call:
    """A call: its number among the recorded ones, the units that it asks for, and those that it misses.

    `missed` has the bytes that are read for units, and `copied_bytes` are those of the plan's transfers.
    `rounds` are the parts in which its reads run, where a read that does not fit into the pool has several.
    `stall_ns` of its `total_ns` nanoseconds it waits.
    """

    number: int
    method: str
    asked: Moved
    missed: Moved
    copied_bytes: int
    rounds: int
    stall_ns: int
    total_ns: int


def simulated_calls(plan: Decisions, profile: Profile) -> tuple[Call, ...]:
    """The recorded calls, one after another, from a cold start on, with an empty pool.

    A call of another method than the one before it begins as cold as the first one, but for the pool. A call
    that asked for nothing is left out, since nobody knows what it was a call of.

    Raises:
        PlanError: the plan has no pool, or is of methods whose calls come in turn.
        PayloadError: the pool serves reads of which the routes tell nothing.
    """
    if plan.pool is None:
        raise PlanError(
            f"the plan within {plan.budget} bytes reads all weights whole, so routes change nothing: give a "
            "smaller budget"
        )
    if any(trace.follows is not None for trace in plan.traces):
        raise PlanError("routes are simulated for calls of one method at a time, and this program is trained")
    driven_by = served_profile(profile, plan.traces, plan.pool, plan.names)
    reads, driven = driven_by.routes.reads, Driven(driven_by, plan.pool)
    changes = driven.changes(Residency(plan.pool, driven_by.traces), ahead=True)
    numbered = zip(count(), driven_by.routes.calls, changes, strict=False)
    recorded = (call for call in numbered if call[1])
    calls: list[Call] = []
    for graph, in_a_row in groupby(recorded, lambda call: reads[call[1][0].read].graph):
        calls += _in_a_row(plan, driven, graph, list(in_a_row))
    return tuple(calls)


_Changes = list[tuple[Ask, list[int], Change]]
_Made = tuple[int, Route, _Changes]


def _in_a_row(plan: Decisions, driven: Driven, graph: int, calls: Sequence[_Made]) -> Iterator[Call]:
    """Calls of one method, the first of which is cold."""
    index = next(k for k, trace in enumerate(plan.traces) if trace.graph == graph)
    trace, schedule = plan.traces[index], plan.schedules[index]
    copies = [tuple(_copies(plan, driven, changes)) for *_, changes in calls]
    facts = (trace, schedule, plan.hardware, plan.wrap)
    times = simulate(*facts, len(calls) + 1, launched=launched_steps(plan, index), units=copies)
    for (number, call, changes), now, behind in zip(calls, times, times[1:], strict=False):
        missed = [driven.moved_by(change, [*change.bring, *change.ahead]) for _, _, change in changes]
        yield Call(
            number,
            trace.method,
            driven.asked_by(call),
            _sum(missed),
            schedule.moved_bytes("in"),
            len(changes),
            sum(stalls_of(trace, now)),
            behind.call_start - now.call_start,
        )


def _copies(plan: Decisions, driven: Driven, changes: _Changes) -> Iterator[UnitCopy]:
    """The copies of units of one call: what a part needs, and behind it what is brought ahead of need."""
    copies: list[tuple[int, int, set[int]]] = []  # the step that asks, nanoseconds, and the steps that wait
    coming: dict[Unit, int] = {}
    edges: dict[int, int] = {}  # granules that another unit may share, and the copy that brings them
    for ask, part, change in changes:
        step, storage = driven.read(ask)
        for units in (change.bring, change.ahead):
            moved = driven.moved_by(change, units)
            if not moved.nbytes:
                continue
            for unit in units:
                first, stop = change.granules[unit]
                coming[unit] = len(copies)
                edges |= dict.fromkeys((first, stop - 1) if first < stop else (), len(copies))
            copies.append((step, Missed(moved.units, moved.nbytes).ns(plan.hardware), set()))
        for number in part:
            first, stop = driven.granules((storage, number))
            needed = {edges.get(first), edges.get(stop - 1), coming.get((storage, number))}
            for copy in needed:
                if copy is not None:
                    copies[copy][2].add(step)
    return (UnitCopy(step, ns, tuple(sorted(waits))) for step, ns, waits in copies)
