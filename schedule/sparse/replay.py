"""Replays recorded routes: the bytes that a pool moves, by its size and policy, and the least possible.

The replay of penstock's own policy calls `Residency` as a run does (`runtime/sparse/units.py`), and so moves
the bytes that the run moved, if the run began with the first recorded call and no read failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import Pool, Range
from penstock.schedule.space.spans import merged
from penstock.schedule.sparse.division import Expectation, Missed
from penstock.schedule.sparse.optimum import Round, least_missed
from penstock.schedule.sparse.policies import LeastFrequent, LeastRecent
from penstock.schedule.sparse.residency import Change, Residency, Unit
from penstock.schedule.sparse.routes import Ask, Profile


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
    """What the calls of a profile move through a pool that is empty at first.

    Raises PayloadError if the pool is for other tables than those of the profile.
    """
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


def replay_own(profile: Profile, pool: Pool) -> Moved:
    """What the calls of a profile move through a pool that is empty at first, by penstock's own policy."""
    return Driven(profile, pool).moved(Residency(pool, profile.traces), ahead=True)


def expectation(profile: Profile, graphs: Sequence[int]) -> Expectation:
    """What a pass of each of the methods `graphs` misses, as the recorded calls of it do on the average.

    A method of which no call was recorded misses nothing.
    """

    def expect(pool: Pool) -> list[Missed]:
        driven = Driven(profile, pool)
        by_graph: dict[int, list[Moved]] = {graph: [] for graph in graphs}
        calls = driven.moves(Residency(pool, profile.traces), ahead=True)
        for call, moved in zip(profile.routes.calls, calls, strict=True):
            if call:
                by_graph[profile.routes.reads[call[0].read].graph].append(moved)
        return [_average(by_graph[graph]) for graph in graphs]

    return expect


def _average(moves: Sequence[Moved]) -> Missed:
    calls = max(1, len(moves))
    return Missed(sum(moved.units for moved in moves) / calls, sum(moved.nbytes for moved in moves) // calls)


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
        nbytes = sum(self._nbytes((self._reads[a.read].storage, n) for n in a.units) for a in asks)
        return Moved(sum(len(ask.units) for ask in asks), nbytes)

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
        moves = list(self.moves(residency, ahead=ahead))
        return Moved(sum(moved.units for moved in moves), sum(moved.nbytes for moved in moves))

    def moves(self, residency: Residency, *, ahead: bool) -> Iterator[Moved]:
        """Yields what is moved for each call."""
        for call in self.changes(residency, ahead=ahead):
            moved = [self.moved_by(change, [*change.bring, *change.ahead]) for _, _, change in call]
            yield Moved(
                sum(change_moved.units for change_moved in moved),
                sum(change_moved.nbytes for change_moved in moved),
            )

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

    def _nbytes(self, units: Iterable[Unit]) -> int:
        """The bytes that are read to bring units at once; where two share a granule it is read once."""
        return sum(place.nbytes for place in merged(map(self._place, units)))

    def _place(self, unit: Unit) -> Range:
        return self._bytes_in(unit, self.granules(unit))

    def _bytes_in(self, unit: Unit, granules: tuple[int, int]) -> Range:
        """The bytes in granules of a unit, of which there may be none."""
        if granules[0] >= granules[1]:
            return Range(0, 0)
        storage = unit[0]
        return Range(*self._pool.bytes_in(granules, storage, self._profile.storages[storage].nbytes))


def ladder_of(profile: Profile, rungs: int = 8) -> Sequence[Pool]:
    """Pools of growing sizes, each about the same multiple of the one before.

    The smallest holds what any one read asked for, and the largest all tables.
    """
    smallest, reads = profile.pool(0), profile.reads()
    asks = [(reads[ask.read], ask.units) for call in profile.routes.calls for ask in call]
    edges = ([smallest.granules(read, number) for number in units] for read, units in asks)
    least = max(sum(stop - first for first, stop in pieces) for pieces in edges) * smallest.granule
    most = sum(profile.storages[s].nbytes + smallest.granule for s in {read.storage for read in reads})
    sizes = (least * max(1.0, most / least) ** (k / (rungs - 1)) for k in range(rungs))
    return [profile.pool(-(-round(size) // smallest.granule) * smallest.granule) for size in sizes]
