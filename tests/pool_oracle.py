"""A second opinion on pools: what a plan says of one, and what a policy does with it call by call.

Knows nothing of the planner, the verifier or the policy. A unit is a set of bytes, its granules are those
that have one of the bytes, and memory is the granules of what is there: nothing is cleverer than sets. A
policy is asked as an engine asks it, and what it says is done, in order, and looked at after every change.
"""

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Protocol

from penstock.schedule.facts.model import Pool, Trace

SIZES = {"int8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}
Unit = tuple[int, int]


class UnsafeError(Exception):
    """What went wrong, or what cannot be."""


def must(fact, sentence):
    if not fact:
        raise UnsafeError(sentence)


@cache
def bytes_of(read, number):
    """The bytes of a unit in its storage, from the first to the last."""
    view, item = read.view, SIZES[read.view.dtype]
    begins = [
        sum(i * s for i, s in zip((number, *place), view.stride, strict=True)) * item
        for place in product(*map(range, view.shape[1:]))
    ]
    return range(view.offset + min(begins), view.offset + max(begins) + item)


@cache
def granules_of(pool, read, number):
    place = pool.layout[read.view.storage]
    return frozenset((place + byte) // pool.granule for byte in bytes_of(read, number))


def served(step, pool):
    """The reads of a step that a pool serves."""
    some = [one for one in step.sparse if pool and pool.layout[one.view.storage] >= 0]
    some = [one for one in some if not one.tiles or (pool and pool.tiles)]
    return [one for one in some if one.tiles or one.asked < (*one.view.shape, 0)[0] or (pool and pool.dense)]


def arena_reads(step, pool):
    away = [one.view.storage for one in served(step, pool)]
    return tuple(s for s in step.reads if s not in away)


def check_pool(storages, plan):
    """What can be seen of a plan's pool without running anything."""
    pool = plan.pool
    if pool is None:
        return
    must(pool.granule > 0 and len(pool.layout) == len(storages), "a pool without granules or places")
    taken = set()
    for s, place in enumerate(pool.layout):
        if place >= 0:
            must(storages[s].kind == "streamable", "units of what is not streamable")
            must(place % 64 == storages[s].phase, "a storage of the pool is not at its phase")
            own = {(place + byte) // pool.granule for byte in range(storages[s].nbytes)}
            must(not taken & own, "two storages of the pool in one granule")
            taken |= own
    known = {}
    for step in (step for trace in plan.traces for step in trace.steps):
        must(len(served(step, pool)) < 2, "a step reads units of two storages")
        for read in served(step, pool):
            units = check_units(storages, pool, read)
            must(known.setdefault(read.view.storage, units) == units, "two kinds of units of one storage")


def check_units(storages, pool, read):
    view = read.view
    must(view.dtype in SIZES and len(view.shape) == len(view.stride) > 0, "units of no tensor")
    must(min(view.shape) > 0, "units without bytes")
    units = [bytes_of(read, number) for number in range(view.shape[0])]
    if read.computed is not None:
        must(len(read.computed.shape) > 0 and read.computed.shape[0] == len(units), "slices of no unit")
        must(not read.tiles and read.slices == 1, "tiles that are computed")
    seen = set()
    for number, unit in enumerate(units):
        must(unit.start >= 0 and unit.stop <= storages[view.storage].nbytes, "a unit outside its storage")
        must(seen.isdisjoint(unit), "two units share a byte")
        seen.update(unit)
        nbytes = len(granules_of(pool, read, number)) * pool.granule
        must(nbytes <= pool.nbytes, "a unit does not fit into the pool")
    return units


class Change(Protocol):
    drop: list[Unit]
    bring: list[Unit]
    ahead: list[Unit]
    granules: dict[Unit, tuple[int, int]]


@dataclass
class PoolMachine:
    """The units that are in a pool, and the granules that hold them."""

    pool: Pool
    traces: tuple[Trace, ...]
    there: dict[Unit, frozenset[int]] = field(default_factory=dict)
    used: set[Unit] = field(default_factory=set)
    moved: int = 0
    peak: int = 0

    def __post_init__(self):
        self.reads = {
            read.view.storage: read
            for trace in self.traces
            for step in trace.steps
            for read in served(step, self.pool)
        }

    @property
    def nbytes(self):
        return len(self.granules) * self.pool.granule

    @property
    def granules(self):
        return frozenset().union(*self.there.values())

    def check_reads(self, change, before):
        """No granule of a unit that stays is read again, and all others of what comes are, each once."""
        coming = [*change.bring, *change.ahead]
        must(set(change.granules) == set(coming), "granules are read for units that do not come")
        read = set()
        for unit in coming:
            some = set(range(*change.granules[unit]))
            must(some.isdisjoint(self.granules), "a granule is read again that a unit in memory has bytes in")
            must(some.isdisjoint(read), "a granule is read twice")
            read |= some
            own = granules_of(self.pool, self.reads[unit[0]], unit[1])
            must(some <= own <= read | before, "a granule of a unit that comes is not read")

    def drop(self, units, policy):
        for unit in units:
            must(unit in self.there, "a unit leaves that is not there")
            must(unit not in self.used, "a unit leaves that is in use")
        gone = [self.there.pop(unit) for unit in units]
        kept = frozenset().union(*self.there.values())
        for granules in gone:
            edges = {min(granules), max(granules)}
            coming = {g for g in edges if policy.in_use(g)}
            must(coming >= edges & kept, "a granule is given back that another unit has bytes in")

    def bring(self, units):
        for unit in units:
            must(unit not in self.there, "a unit is brought that is there")
            self.there[unit] = granules_of(self.pool, self.reads[unit[0]], unit[1])
            self.moved += 1
        self.peak = max(self.peak, self.nbytes)
        must(self.nbytes <= self.pool.nbytes, "more memory than the pool has")

    def check_parts(self, read, numbers, parts):
        """Parts are what is asked for, in order, and each is as long as it can be."""
        must([n for part in parts for n in part] == list(numbers), "parts are not what is asked for")
        for part, after in zip(parts, [*parts, []][1:], strict=True):
            must(bool(part), "a part without units")
            must(self.size_of(read, part) <= self.pool.nbytes, "a part does not fit")
            longer = [*part, *after[:1]]
            must(not after or self.size_of(read, longer) > self.pool.nbytes, "a part is cut too early")

    def size_of(self, read, numbers):
        granules = set()
        for number in numbers:
            granules |= granules_of(self.pool, read, number)
        return len(granules) * self.pool.granule

    def check_counts(self, policy):
        must(policy.held_bytes == self.nbytes, "the policy counts other bytes than there are")
        must(policy.peak_bytes >= self.peak, "the policy has seen a lower peak")
        must(policy.peak_bytes <= self.pool.nbytes, "the policy has seen more than the pool has")
        held = frozenset().union(*self.there.values())
        for granules in self.there.values():
            must(all(policy.in_use(g) for g in (min(granules), max(granules))), "an edge counts as free")
        some = {g for granules in self.there.values() for g in (min(granules) - 1, max(granules) + 1)}
        must(not any(policy.in_use(g) for g in some - held), "a granule counts that no unit is in")


def run_step(policy, machine, graph, k, numbers):
    """Have a step read units as an engine does."""
    trace = next(t for t in machine.traces if t.graph == graph)
    read = served(trace.steps[k], machine.pool)[0]
    storage = read.view.storage
    later = {
        one.view.storage
        for step in trace.steps[k + 1 :]
        for one in served(step, machine.pool)
        if one.route == read.route
    }
    policy.ask(graph, k, numbers)
    parts = policy.parts(storage, numbers)
    machine.check_parts(read, numbers, parts)
    for part in parts or [[]]:
        machine.used = {(storage, n) for n in part}
        change = policy.acquire(graph, k, part, alone=len(parts) < 2)
        before = machine.granules
        machine.drop(change.drop, policy)
        machine.check_reads(change, before)
        must(set(change.bring) <= machine.used, "units are brought that the part does not need")
        ahead = {s for s, n in change.ahead}
        must(ahead <= later, "units are brought ahead that no later step of the turn reads")
        must({n for _, n in change.ahead} <= set(numbers), "units are brought ahead that nobody asks for")
        machine.bring([*change.bring, *change.ahead])
        must(machine.used <= machine.there.keys(), "a unit is not there while its part runs")
        machine.check_counts(policy)
        machine.used = set()
        policy.release(graph, k, part)


def replay(policy, pool, traces, dice, calls):
    """Have a policy serve random calls; some end in the middle, and after some everything is lost."""
    machine = PoolMachine(pool, traces)
    for _ in range(calls):
        policy.begin()
        trace = dice.choice(traces)
        reads = [(k, one) for k, step in enumerate(trace.steps) for one in served(step, pool)]
        named = {}
        for route in {one.route for _, one in reads}:
            count = min(one.view.shape[0] for _, one in reads if one.route == route)
            some = dice.sample(range(count), dice.randint(0, min(count, 8)))
            named[route] = sorted(
                {n // 2 if dice.random() < 0.5 else n for n in some}
            )  # the first more often
        ends = dice.randrange(len(reads) + 1) if dice.random() < 0.1 else len(reads)
        for k, one in reads[:ends]:
            run_step(policy, machine, trace.graph, k, named[one.route])
        if dice.random() < 0.1 and machine.there:
            policy.reset()  # a read has failed, or an interrupt came
            machine.drop([*machine.there], policy)
            machine.check_counts(policy)
    return machine
