"""Which units are in a pool, and which of them leave when others need room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.schedule.facts.model import Pool, SparseRead, Trace

QUICK, SLOW = 0.5, 0.5 ** (1 / 32)
"""By how much a turn's weight in the two averages shrinks with each later turn: half-lives of 1 and 32."""

_FORGOTTEN = 2048
"""After this many turns a turn's weight in the averages is below 2 ** -64, so it is no longer halved."""


def _powers(base: float) -> np.ndarray:
    """The powers of a number as products, which have the same bits everywhere; those of libraries differ."""
    factors = np.full(_FORGOTTEN + 1, base)
    factors[0] = 1.0
    return np.multiply.accumulate(factors)


_QUICK, _SLOW = _powers(QUICK), _powers(SLOW)

Unit = tuple[int, int]
"""A storage, and the number of one of its units."""


@dataclass
class Change:
    """What has to happen before a read.

    Two units can share a granule. Reading either one loads the whole granule, so the second does not read it
    again.

    Attributes:
        drop: Units to drop first.
        bring: Units to read then.
        ahead: Units that later steps will ask for; no step before them waits for these.
        granules: The granules to read for each unit: the first, and the one behind the last.
    """

    drop: list[Unit] = field(default_factory=list)
    bring: list[Unit] = field(default_factory=list)
    ahead: list[Unit] = field(default_factory=list)
    granules: dict[Unit, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Read:
    """A step that reads by units: the read, its turn in the method, and the reads behind it of that turn."""

    read: SparseRead
    turn: int
    behind: tuple[SparseRead, ...]


class Residency:
    """The units that are in a pool, of all methods whose traces are given.

    A unit counts from when it is to be brought until it is dropped. Units of a read in progress never leave.
    Units that a later read of the turn will ask for leave last, and only for units that a read asks for now.
    """

    def __init__(self, pool: Pool, traces: Sequence[Trace]) -> None:
        self._pool = pool
        self._reads = {trace.graph: _reads_of(trace, pool) for trace in traces}
        reads_of_steps = (read for steps in self._reads.values() for read in steps.values())
        self._read_of = reads = {step_read.read.storage: step_read.read for step_read in reads_of_steps}
        self._tables = sorted(reads)
        counts = [reads[s].count for s in self._tables]
        self._first = dict(zip(self._tables, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
        self._table = np.repeat(np.arange(len(counts)), counts)
        share = np.repeat([max(1, reads[s].asked) / max(1, reads[s].count) for s in self._tables], counts)
        self._quick, self._slow = np.minimum(share, 1.0), np.minimum(share, 1.0)
        self._seen = np.zeros(len(self._table), np.int64)  # the read of its table at which a unit was noted
        self._turns = np.zeros(len(counts), np.int64)  # how often each table was read
        self._held = np.zeros(len(self._table), bool)
        self._used = np.zeros(len(self._table), bool)  # by the read in progress
        self._soon = np.zeros(len(self._table), bool)  # by later reads, or parts of one, of the turn
        self._users: dict[int, int] = {}  # units held in granules at the edge of a unit
        self._partners = _partners(self._reads)
        self._until = {graph: self._distances(steps) for graph, steps in self._reads.items()}
        self.held_bytes = self.peak_bytes = 0

    def parts(self, storage: int, numbers: Sequence[int]) -> list[list[int]]:
        """Cut the ascending units of one read into runs of which each fits into the pool."""
        parts: list[list[int]] = []
        taken, last = 0, -1
        for number in numbers:
            first, stop = self._pool.granules(self._read_of[storage], number)
            more = (stop - max(first, last)) * self._pool.granule
            if not parts or taken + more > self._pool.nbytes:
                parts.append([])
                taken, more = 0, (stop - first) * self._pool.granule
            parts[-1].append(number)
            taken, last = taken + more, stop
        return parts

    def begin(self) -> None:
        """Begin a pass: no read is in progress, and no unit has been brought ahead of need."""
        self._used[:] = self._soon[:] = False

    def ask(self, graph: int, step: int, numbers: Sequence[int]) -> None:
        """Note all units that a step's read asks for, in parts of which `acquire` will be told."""
        table_read = self._reads[graph][step]
        self._soon[:] = False
        for read in (table_read.read, *table_read.behind):
            self._soon[self._index(read.storage, numbers)] = True
        table, wanted = self._tables.index(table_read.read.storage), self._asked(graph, step, numbers)
        self._turns[table] += 1
        passed = np.minimum(self._turns[table] - self._seen[wanted], _FORGOTTEN)
        self._quick[wanted] = self._quick[wanted] * _QUICK[passed] + 1 - QUICK
        self._slow[wanted] = self._slow[wanted] * _SLOW[passed] + 1 - SLOW
        self._seen[wanted] = self._turns[table]

    def acquire(self, graph: int, step: int, numbers: Sequence[int], *, alone: bool = True) -> Change:
        """Have units of a step's read in the pool, where they stay until `release`.

        They fit into the pool together. If they are all that the read asks for (`alone`), the same units of
        later reads with the same operand are brought ahead, as far as there is room.
        """
        table_read = self._reads[graph][step]
        wanted = self._index(table_read.read.storage, numbers)
        self._used[wanted], self._soon[wanted] = True, False
        behind = [self._index(read.storage, numbers) for read in table_read.behind] if alone else []
        change, until = Change(), self._until[graph][table_read.turn]
        self._admit(wanted[~self._held[wanted]], until, change, needed=True)
        for later in behind:
            self._admit(later[~self._held[later]], until, change, needed=False)
        return change

    def release(self, graph: int, step: int, numbers: Sequence[int]) -> None:
        """Let the units of a step's read leave when room is needed."""
        self._used[self._asked(graph, step, numbers)] = False

    def reset(self) -> None:
        """Count nothing as held or in use, whatever an interrupted change has left; what was noted stays."""
        self._held[:] = self._used[:] = self._soon[:] = False
        self._users.clear()
        self.held_bytes = 0

    def in_use(self, granule: int) -> bool:
        """Tells whether a unit that is held has bytes in a granule at the edge of a unit."""
        return granule in self._users

    @property
    def held(self) -> list[Unit]:
        """The units that are in the pool."""
        return [self._unit(index) for index in np.flatnonzero(self._held).tolist()]

    def _asked(self, graph: int, step: int, numbers: Sequence[int]) -> np.ndarray:
        return self._index(self._reads[graph][step].read.storage, numbers)

    def _index(self, storage: int, numbers: Sequence[int]) -> np.ndarray:
        indices: np.ndarray = np.asarray(numbers, np.int64) + self._first[storage]
        return indices

    def _unit(self, index: int) -> Unit:
        storage = self._tables[self._table[index]]
        return storage, index - self._first[storage]

    def _distances(self, steps: dict[int, _Read]) -> dict[int, np.ndarray]:
        """For each turn of a method, how many turns lie between it and the next read of each table."""
        turns = 1 + max((table_read.turn for table_read in steps.values()), default=0)
        turns_until = np.full((turns, len(self._tables)), turns, np.int64)
        for table_read in steps.values():
            table = self._tables.index(table_read.read.storage)
            for now in range(turns):
                following = (table_read.turn - now) % turns or turns
                turns_until[now, table] = min(turns_until[now, table], following)
        return dict(enumerate(turns_until))

    def _admit(self, missing: np.ndarray, until: np.ndarray, change: Change, *, needed: bool) -> None:
        """Make room for missing units, one after another, and count them as held."""
        leaving: Iterator[int] | None = None
        for index in missing.tolist():
            while self.held_bytes + self._cost(index) > self._pool.nbytes:
                if leaving is None:
                    leaving = iter(self._by_key(until, needed=needed))
                last = next((candidate for candidate in leaving if self._held[candidate]), None)
                if last is None:
                    assert not needed, "the units of one read do not fit into their pool"
                    return
                for leaver in self._leaving(last):
                    self._drop(leaver)
                    change.drop.append(self._unit(leaver))
            unit = self._unit(index)
            change.granules[unit] = self._take(index)
            (change.bring if needed else change.ahead).append(unit)

    def _leaving(self, index: int) -> list[int]:
        """A unit, and the units that are asked for whenever it is, as far as they are held and not in use."""
        storage, number = self._unit(index)
        partners = (self._first[other] + number for other in self._partners[storage])
        return [index, *(i for i in partners if self._held[i] and not (self._used[i] or self._soon[i]))]

    def _by_key(self, until: np.ndarray, *, needed: bool) -> list[int]:
        """The units that may leave, the one first that is expected to be asked for last.

        The units that this turn will ask for come last, and only if `needed` says that others are needed now.
        """
        some = np.flatnonzero(self._held & ~self._used & (needed | ~self._soon))
        ordered: list[int] = some[np.argsort(-self.keys(some, until), kind="stable")].tolist()
        return ordered

    def keys(self, some: np.ndarray, until: np.ndarray) -> np.ndarray:
        """The turns until each of some units is expected to be asked for; `until` has those of its table.

        They depend on what was asked for, and never on what is held. So a larger pool misses no more than a
        smaller one, if what leaves together has the same bytes everywhere and both hold what a turn asks for.
        """
        table = self._table[some]
        passed = np.minimum(self._turns[table] - self._seen[some], _FORGOTTEN)
        chance = (self._quick[some] * _QUICK[passed] + 7 * (self._slow[some] * _SLOW[passed])) / 8
        between = int(until.max(initial=1))
        key = until[table] + between * (1 / np.maximum(chance, 1e-12) - 1)
        return np.where(self._soon[some], 0.0, key)

    # Bytes: granules inside of a unit are its own, and those at its edges may be shared.

    def _edges(self, index: int) -> tuple[int, int]:
        storage, number = self._unit(index)
        return self._pool.granules(self._read_of[storage], number)

    def _own(self, index: int) -> tuple[int, int]:
        """The granules of a unit in which no held unit has bytes: the first, and one behind the last."""
        first, stop = self._edges(index)
        last = stop - 1
        return first + (first in self._users), stop - (last > first and last in self._users)

    def _cost(self, index: int) -> int:
        first, stop = self._own(index)
        return (stop - first) * self._pool.granule

    def _take(self, index: int) -> tuple[int, int]:
        """Count a unit as held, and return the granules that it adds."""
        granules = self._own(index)
        self.held_bytes += self._cost(index)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        first, stop = self._edges(index)
        for granule in {first, stop - 1}:
            self._users[granule] = self._users.get(granule, 0) + 1
        self._held[index] = True
        return granules

    def _drop(self, index: int) -> None:
        first, stop = self._edges(index)
        for granule in {first, stop - 1}:
            self._users[granule] -= 1
            if not self._users[granule]:
                del self._users[granule]
        self._held[index] = False
        self.held_bytes -= self._cost(index)


def _reads_of(trace: Trace, pool: Pool) -> dict[int, _Read]:
    reads = [(k, read) for k, step in enumerate(trace.steps) for read in step.sparse if pool.has(read)]
    turns = {route: turn for turn, route in enumerate(dict.fromkeys(read.route for _, read in reads))}
    reads_of_steps: dict[int, _Read] = {}
    for place, (k, read) in enumerate(reads):
        behind = tuple(
            other
            for _, other in reads[place + 1 :]
            if other.route == read.route and other.storage != read.storage and other.count == read.count
        )
        reads_of_steps[k] = _Read(read, turns[read.route], behind)
    return reads_of_steps


def _partners(reads: dict[int, dict[int, _Read]]) -> dict[int, list[int]]:
    """For each storage that is read by units, the others of which the same turns ask for the same units."""
    turns: dict[int, set[tuple[int, int, int]]] = {}
    for graph, steps in reads.items():
        for table_read in steps.values():
            turns.setdefault(table_read.read.storage, set()).add(
                (graph, table_read.turn, table_read.read.count)
            )
    return {
        s: [other for other, of in turns.items() if of == own_turns and other != s]
        for s, own_turns in turns.items()
    }


class LeastRecent(Residency):
    """The units that were asked for least recently leave first (LRU)."""

    def __init__(self, pool: Pool, traces: Sequence[Trace]) -> None:
        super().__init__(pool, traces)
        self._clock = 0
        self._last = np.zeros(len(self._table), np.int64)  # the read of any table that asked for a unit last

    def ask(self, graph: int, step: int, numbers: Sequence[int]) -> None:
        super().ask(graph, step, numbers)
        self._clock += 1
        self._last[self._asked(graph, step, numbers)] = self._clock

    def keys(self, some: np.ndarray, until: np.ndarray) -> np.ndarray:
        order: np.ndarray = -self._last[some]
        return order

    def _leaving(self, index: int) -> list[int]:
        return [index]


class LeastFrequent(LeastRecent):
    """The units that were asked for least often so far leave first (LFU); of equal ones the least recent."""

    def __init__(self, pool: Pool, traces: Sequence[Trace]) -> None:
        super().__init__(pool, traces)
        self._often = np.zeros(len(self._table), np.int64)

    def ask(self, graph: int, step: int, numbers: Sequence[int]) -> None:
        super().ask(graph, step, numbers)
        self._often[self._asked(graph, step, numbers)] += 1

    def keys(self, some: np.ndarray, until: np.ndarray) -> np.ndarray:
        once = 1 << 32  # more than the reads of any recording
        order: np.ndarray = -(self._often[some] * once + self._last[some])
        return order
