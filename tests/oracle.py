"""A second opinion on plans: run them against adversaries, and look.

Knows nothing of the planner or the verifier. A plan is run for some passes in a machine whose
memory is cut into units, wherever anything in the plan begins or ends; a queue starts copies in
issue order, a scheduler chooses what legal thing happens next, and what a read finds is compared
with what it must find. Earliest starts with latest ends expose overwriting and lack of room, latest
starts expose data that nobody waits for, random ones the rest. Slow, and simple enough to be
believed. `pool_oracle.py` does the same for what is read by units.
"""

import random
from bisect import bisect_left
from itertools import pairwise

from penstock.schedule.facts.model import Range
from tests.pool_oracle import UnsafeError, arena_reads, check_pool, must

PASSES = 3


def check_plan(storages, traces, plan, seeds=range(3)):
    """Raise UnsafeError when `plan` can go wrong for any of its methods."""
    check_facts(storages, traces, plan)
    for schedule in plan.schedules:
        Machine(storages, plan, schedule.graph, eager).run()
        Machine(storages, plan, schedule.graph, lazy).run()
        for seed in seeds:
            Machine(storages, plan, schedule.graph, shuffled(seed)).run()


def peak_bytes(storages, plan):
    """The most bytes of a paged arena that `plan` ever holds, when copies start as soon as they may."""
    machines = []
    for schedule in plan.schedules:
        machines.append(Machine(storages, plan, schedule.graph, eager))
        machines[-1].run()
    return max((machine.peak for machine in machines), default=0)


# What can be seen without running anything.


def check_facts(storages, traces, plan):
    reads = {t.graph: [(arena_reads(s, plan.pool), s.writes, s.sparse) for s in t.steps] for t in traces}
    planned = {t.graph: [(s.reads, s.writes, s.sparse) for s in t.steps] for t in plan.traces}
    must(reads == planned, "made for other traces")
    check_pool(storages, plan)
    must(sorted(reads) == sorted(s.graph for s in plan.schedules), "not one schedule a trace")
    must(len(plan.outside) == len(set(plan.outside)), "a storage is outside twice")
    must(all(0 <= s < len(storages) for s in plan.outside), "no such storage outside")
    for s, storage in enumerate(storages):
        may = storage.kind in ("streamable", "produced")
        must(may or s in plan.outside, f"storage {s} may not be streamed")
    check_produced(storages, plan)
    outside = sum(storages[s].nbytes for s in plan.outside) + (plan.pool.nbytes if plan.pool else 0)
    must(0 <= plan.arena_bytes <= plan.budget - outside, "over budget")
    if plan.arena.kind == "paged":
        granules = [
            {g.start // plan.arena.granule, (g.stop - 1) // plan.arena.granule} for g in plan.arena.segments
        ]
        must(all(a.isdisjoint(b) for a, b in pairwise(granules)), "two segments in one granule")
    for piece in all_pieces(plan):
        check_range(storages, plan, piece)
    if plan.arena.kind == "contiguous":
        for s, storage in enumerate(storages):
            if s not in plan.outside and storage.nbytes and plan.arena.layout[s] >= 0:
                at = plan.addresses[s]
                must(0 <= at <= plan.arena_bytes - storage.nbytes, "a storage lies outside the arena")
                apart = at - plan.arena.layout[s]
                must(apart % plan.arena.granule == 0, "a storage is misaligned")
    must(sorted(map(trace_before, plan.traces)) == sorted(reads), "two calls that come after the same one")
    for trace in plan.traces:
        must(trace.follows is None or bool(trace.steps), "a call without steps that comes after another")
        must(trace.follows is None or plan.wrap == "overlap", "a call after another, which nothing crosses")
        schedule = next(s for s in plan.schedules if s.graph == trace.graph)
        check_order(schedule, trace, len(reads[trace_before(trace)]))


def check_produced(storages, plan):
    """What can be seen of storages that steps write."""
    writes = [s for t in plan.traces for step in t.steps for s in step.writes]
    must(len(writes) == len(set(writes)), "two steps write a storage")
    must(all(storages[s].kind == "produced" for s in writes), "a step writes what is not produced")
    for s in written_inside(storages, plan):
        start = plan.arena.layout[s]
        segment = next((g for g in plan.arena.segments if g.start <= start < g.stop), Range(0, 0))
        others = [at for at in placed(storages, plan) if segment.start <= at < segment.stop]
        must(others == [start], "a produced storage shares its segment")
    must(
        all(writer_of(storages, plan, r.start) is None for r in plan.resident), "resident bytes are produced"
    )
    by_graph = {t.graph: t for t in plan.traces}
    for schedule in plan.schedules:
        for t in schedule.transfers:
            inside = writer_of(storages, plan, t.start) is not None
            must(t.direction == "in" or inside, "bytes that no step writes are copied out")
        trace = by_graph[schedule.graph]
        own, before = (
            {s for step in t.steps for s in step.writes} for t in (trace, by_graph[trace_before(trace)])
        )
        for r in plan.boundary if schedule.boundary is None else schedule.boundary:
            s = writer_of(storages, plan, r.start)
            must(
                s is None or s in before - own, "the boundary holds bytes that the call before does not write"
            )


def written_inside(storages, plan):
    """The storages that steps write in the arena."""
    return [
        s
        for s, x in enumerate(storages)
        if x.kind == "produced" and x.nbytes and s not in plan.outside and plan.arena.layout[s] >= 0
    ]


def writer_of(storages, plan, offset):
    """The produced storage in whose segment an offset of the layout lies."""
    for s in written_inside(storages, plan):
        for g in plan.arena.segments:
            if g.start <= offset < g.stop and g.start <= plan.arena.layout[s] < g.stop:
                return s
    return None


def trace_before(trace):
    """The number of the method whose call comes before."""
    return trace.graph if trace.follows is None else trace.follows


def all_pieces(plan):
    pieces = [*plan.resident, *plan.boundary]
    for schedule in plan.schedules:
        pieces += [*schedule.transfers, *schedule.drops, *(schedule.boundary or ())]
    return pieces


def check_range(storages, plan, piece):
    start, stop, granule = piece.start, piece.stop, plan.arena.granule
    must(start < stop, "an empty range")
    segments = [g for g in plan.arena.segments if g.start <= start and stop <= g.stop]
    must(len(segments) == 1, "a range outside every segment")
    starts, stops = {segments[0].start}, {segments[0].stop}
    if plan.arena.kind == "contiguous":
        s = owner_of(storages, plan, start)
        if s is None:
            raise UnsafeError("a range of no storage")
        first = plan.arena.layout[s]
        end = first + storages[s].nbytes
        following = [at for at in placed(storages, plan) if at > first]
        limit = min([-(-end // granule) * granule, segments[0].stop, *following])
        must(first <= start and stop <= limit, "a range over the end of its storage's slot")
        starts, stops = starts | {first}, stops | {end}
        shift = plan.addresses[s] - first
        must(start + shift >= 0 and stop + shift <= plan.arena_bytes, "a range outside the arena")
    must(start % granule == 0 or start in starts, "a misaligned start")
    must(stop % granule == 0 or stop in stops, "a misaligned end")


def placed(storages, plan):
    """Where storages that live in the arena begin in the layout."""
    layout = plan.arena.layout
    return [
        layout[s] for s, x in enumerate(storages) if x.nbytes and s not in plan.outside and layout[s] >= 0
    ]


def owner_of(storages, plan, offset):
    """The storage of the last place in the layout at or before `offset`."""
    before = [at for at in placed(storages, plan) if at <= offset]
    if not before:
        return None
    owners = (s for s, at in enumerate(plan.arena.layout) if at == max(before))
    return next(s for s in owners if storages[s].nbytes and s not in plan.outside)


def check_order(schedule, trace, before):
    steps = len(trace.steps)
    for transfer in schedule.transfers:
        must(0 <= transfer.step < steps, "a transfer for no step")
        least = transfer.step - steps if trace_before(trace) == trace.graph else -before
        must(least <= transfer.after < transfer.step, "a transfer that waits too far")
    must(all(0 <= drop.step < steps for drop in schedule.drops), "a drop after no step")


# Schedulers: pick the next thing of those that may legally happen.


def eager(actions, needed):
    """Copies start as soon and end as late as they may."""
    starts = [a for a in actions if a[0] == "start"]
    steps = [a for a in actions if a[0] == "step"]
    finishes = [a for a in actions if a[1] in needed]
    return (starts or steps or finishes or actions)[0]


def lazy(actions, needed):
    """Copies start and end only when the next step cannot do without."""
    steps = [a for a in actions if a[0] == "step"]
    finishes = [a for a in actions if a[0] == "finish" and a[1] in needed]
    return (steps or finishes or actions)[0]


def shuffled(seed):
    dice = random.Random(seed)
    return lambda actions, needed: dice.choice(actions)


class Machine:
    """Memory, a queue of copies, and one step after the other, from a first call of method `graph` on."""

    def __init__(self, storages, plan, graph, choose):
        self.storages, self.plan, self.choose = storages, plan, choose
        self.paged = plan.arena.kind == "paged"
        self.traces = {t.graph: t for t in plan.traces}
        self.schedules = {s.graph: s for s in plan.schedules}
        following = {trace_before(t): t.graph for t in plan.traces}
        turn = [graph]
        while following[turn[-1]] != graph:
            turn.append(following[turn[-1]])
        self.passes = PASSES * len(turn)
        self.graphs = [turn[p % len(turn)] for p in range(self.passes + 1)]  # by pass
        self.lengths = [len(self.traces[g].steps) for g in self.graphs]
        self.begins = [sum(self.lengths[:p]) for p in range(self.passes + 1)]  # steps over all passes
        self.edges = sorted({edge for start, stop in self.all_spans() for edge in (start, stop)})
        self.ended = 0  # steps that have ended, over all passes
        # Copies that have not started, as (pass, transfer). Those that the first call finds under way
        # are replaced by the cold start.
        self.queue = self.in_line()
        # Copies under way: the step, over all passes, that waits for them, and what they bring.
        self.flying = {}
        # Copies out under way: the step whose end waits for them, and what they take.
        self.leaving = {}
        # By layout offset, the pass that wrote the bytes last, and the pass whose bytes the spill file has.
        self.written = {}
        self.spilled = {}
        self.running = False  # the next step to end has taken memory for what it writes, and reads
        self.numbered = 0
        self.holds = {}  # unit of memory -> layout offset of the data in it
        self.memory = set()  # units of memory that are taken
        self.peak = 0  # bytes of them
        self.resident = {u for r in plan.resident for u, _ in self.units(r.start, r.stop)}
        self.produced = {data for _, data in self.units_of(written_inside(storages, plan))}

    def in_line(self):
        transfers = ((p, t) for p, g in enumerate(self.graphs) for t in self.schedules[g].transfers)
        return [(p, t) for p, t in transfers if p > 0 or t.after >= 0]

    # Places.

    def all_spans(self):
        """The addresses of everything that the plan moves or a step reads."""
        spans = [(piece.start, piece.stop) for piece in all_pieces(self.plan)]
        for s, at in enumerate(self.plan.arena.layout):
            if at >= 0 and s not in self.plan.outside and self.storages[s].nbytes:
                spans.append((at, at + self.storages[s].nbytes))
        return [(start + self.shift(start), stop + self.shift(start)) for start, stop in spans]

    def shift(self, offset):
        """What is added to a layout offset to get the address of its byte."""
        s = owner_of(self.storages, self.plan, offset)
        if self.paged or s is None:
            return 0
        return self.plan.addresses[s] - self.plan.arena.layout[s]

    def units(self, start, stop):
        """The units that a range of the layout fills, each with its data."""
        shift = self.shift(start)
        lo, hi = bisect_left(self.edges, start + shift), bisect_left(self.edges, stop + shift)
        return {(u, self.edges[u] - shift) for u in range(lo, hi)}

    def units_read(self, graph, step):
        return self.units_of(self.traces[graph].steps[step].reads)

    def units_of(self, some):
        """The units of storages in the arena."""
        found = set()
        for s in some:
            if s not in self.plan.outside and self.storages[s].nbytes:
                start = self.plan.arena.layout[s]
                must(start >= 0, f"storage {s} is nowhere")
                found |= self.units(start, start + self.storages[s].nbytes)
        return found

    def loaded_or_flying(self):
        return set(self.holds.items()).union(*(units for _, units in self.flying.values()))

    # Running.

    def run(self):
        self.begin_cold()
        for number in range(self.passes):
            self.forget(number)
            while self.ended < self.begins[number + 1]:
                actions = self.legal_actions()
                must(bool(actions), f"everything waits at step {self.ended}")
                self.act(self.choose(actions, self.needed()))
            while self.next_may_start():
                self.start()
            late = [t for p, t in self.queue if p == number + 1 and t.after < 0]
            must(not late, "a copy that the next call finds under way cannot start before it")
            boundary = self.boundary_of(self.graphs[number + 1])
            expected = set().union(*(self.units(r.start, r.stop) for r in boundary))
            must(self.loaded_or_flying() == expected, f"pass {number} does not end at the boundary")

    def boundary_of(self, graph):
        own = self.schedules[graph].boundary
        return self.plan.boundary if own is None else own

    def begin_cold(self):
        """Every range of the boundary is on its way, and nobody knows how far."""
        graph, steps = self.graphs[0], self.lengths[0]
        for piece in self.boundary_of(graph):
            units = self.units(piece.start, piece.stop)
            must(not {u for u, _ in units} & self.memory, "the boundary holds bytes twice")
            readers = (k for k in range(steps) if self.units_read(graph, k) & units)
            self.fly(next(readers, steps - 1), units)
        must(self.resident <= self.memory, "resident bytes are not in the boundary")
        for one in self.traces[trace_before(self.traces[graph])].steps:
            for _, data in self.units_of(one.writes):
                self.spilled[data] = self.written[data] = -1

    def forget(self, number):
        """Nothing is left of what a pass writes when it begins."""
        for step in self.traces[self.graphs[number]].steps:
            for _, data in self.units_of(step.writes):
                self.spilled.pop(data, None)
                self.written.pop(data, None)

    def next_may_start(self):
        if not self.queue:
            return False
        number, transfer = self.queue[0]
        return self.ended > self.begins[number] + transfer.after

    def needed(self):
        """Copies that the next step waits for: those in before it runs, and those out before it ends."""
        waits = self.leaving if self.running else self.flying
        return {i for i, (step, _) in waits.items() if step <= self.ended}

    def legal_actions(self):
        actions = [("finish", i) for i in (*self.flying, *self.leaving)]
        if self.next_may_start():
            actions.append(("start", 0))
        way = "out" if self.running else "in"
        line = ((number, t) for number, t in self.queue if t.direction == way)
        to_come = any(self.begins[number] + t.step <= self.ended for number, t in line)
        if not self.needed() and not to_come:
            actions.append(("step", 0))
        return actions

    def act(self, action):
        kind, number = action
        if kind == "start":
            self.start()
        elif kind == "finish":
            self.finish(number)
        elif self.running:
            self.end_step()
        else:
            self.begin_step()

    def finish(self, number):
        if number in self.flying:
            self.holds.update(self.flying.pop(number)[1])
            return
        for unit, data in self.leaving.pop(number)[1]:
            must(self.holds.get(unit) == data, "bytes change while they are copied out")
            self.spilled[data] = self.written[data]

    def start(self):
        number, transfer = self.queue.pop(0)
        units = self.units(transfer.start, transfer.stop)
        places = {u for u, _ in units}
        if transfer.direction == "out":
            self.start_out(self.begins[number] + transfer.step, units)
            return
        must(not places & self.resident, "a transfer overwrites resident bytes")
        must(not (self.paged and places & self.memory), "a transfer brings bytes that are there")
        self.check_quiet(places)
        self.check_spilled(units)
        self.fly(self.begins[number] + transfer.step, units)

    def start_out(self, step, units):
        must(all(self.holds.get(u) == data for u, data in units), "bytes are copied out that are not there")
        for _, data in units:
            self.spilled.pop(data, None)  # until the copy ends, nobody knows what the file has
        self.leaving[self.numbered] = (step, units)
        self.numbered += 1

    def check_spilled(self, units):
        for data in {data for _, data in units} & self.produced:
            known = data in self.written and self.spilled.get(data) == self.written[data]
            must(known, "a transfer brings bytes that the spill file does not have")

    def check_quiet(self, places):
        """No copy is under way to or from these places."""
        flying = {u for _, others in self.flying.values() for u, _ in others}
        must(not places & flying, "two copies write the same bytes at once")
        leaving = {u for _, others in self.leaving.values() for u, _ in others}
        must(not places & leaving, "bytes go while they are copied out")

    def fly(self, step, units):
        self.take(units)
        self.flying[self.numbered] = (step, units)
        self.numbered += 1

    def take(self, units):
        for u, _ in units:
            self.holds.pop(u, None)  # poison: whoever reads it before it is filled, fails
            self.memory.add(u)
        taken = sum(self.edges[u + 1] - self.edges[u] for u in self.memory)
        self.peak = max(self.peak, taken)
        must(taken <= self.plan.arena_bytes, "more memory than the arena has")

    def now(self):
        """The pass, the method and the step that come next or run."""
        number = max(p for p in range(self.passes) if self.begins[p] <= self.ended and self.lengths[p])
        return number, self.graphs[number], self.ended - self.begins[number]

    def begin_step(self):
        number, graph, step = self.now()
        self.write(number, self.units_of(self.traces[graph].steps[step].writes))
        for unit, data in self.units_read(graph, step):
            must(self.holds.get(unit) == data, f"step {self.ended} reads other data than its own")
        self.running = True

    def write(self, number, units):
        places = {u for u, _ in units}
        must(not (self.paged and places & self.memory), "a step writes where bytes are")
        self.check_quiet(places)
        self.take(units)
        self.holds.update(units)
        self.written.update((data, number) for _, data in units)

    def end_step(self):
        _, graph, step = self.now()
        self.running = False
        self.ended += 1
        for drop in self.schedules[graph].drops:
            if drop.step == step:
                self.drop(drop)

    def drop(self, drop):
        for unit, data in self.units(drop.start, drop.stop):
            must(unit not in self.resident, "a drop takes resident bytes")
            must(self.holds.get(unit) == data, "a drop takes bytes that are not there")
            self.check_quiet({unit})
            del self.holds[unit]
            self.memory.discard(unit)
