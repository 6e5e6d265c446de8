"""A second opinion on engines: what one says that it did, compared with what its plan allows."""

from itertools import pairwise

from tests.oracle import Machine, UnsafeError, eager, must, placed, trace_before

Event = tuple[str, int, int]
"""("fill" | "filled" | "drop" | "out" | "outed", start, stop) of the layout, ("read" | "write" | "ended" |
"begin", graph, step). A step that writes logs that before its end, and "outed" when a copy out is done."""


def check_log(storages, traces, plan, log, *, readers):
    """Raise UnsafeError where an engine that ran `plan` without a miss did what the plan does not allow."""
    must({t.graph for t in traces} == {t.graph for t in plan.traces}, "made for other traces")
    Replay(storages, plan, log, readers).replay()


MOVES = ("fill", "filled", "drop", "out", "outed")


class Replay(Machine):
    """The memory of a machine that does what a log says."""

    def __init__(self, storages, plan, log, readers):
        self.log = log
        # One of several threads that fill may tell later of an earlier copy.
        self.strict = readers == 1 and plan.arena.backing != "mapped"
        graphs = [graph for what, graph, _ in log if what == "begin"]
        super().__init__(storages, plan, graphs[0], eager)
        # An engine expects calls in turn from the first schedule on; where another comes, it may start over,
        # unlogged.
        in_turn = all(trace_before(self.traces[b]) == a for a, b in pairwise(graphs))
        self.only = graphs[0] == plan.schedules[0].graph and in_turn
        following = {trace_before(t): t.graph for t in plan.traces}
        self.graphs = [*graphs, following[graphs[-1]]]
        self.lengths = [len(self.traces[graph].steps) for graph in self.graphs]
        self.begins = [sum(self.lengths[:p]) for p in range(len(self.graphs))]
        self.queue = self.in_line()
        cold = [*plan.resident, *self.boundary_of(graphs[0])]
        self.cold = set().union(*(self.parts(r.start, r.stop) for r in cold))
        self.left = {}  # by place in the queue: what has not started of a copy

    def all_spans(self):
        moved = [(a, b) for what, a, b in self.log if what in MOVES]
        cuts = [cut for start, stop in moved for cut in self.cuts(start, stop)]
        return super().all_spans() + [(a + self.shift(a), b + self.shift(a)) for a, b in cuts]

    def cuts(self, start, stop):
        """A range cut where storages begin, which lie anywhere in a contiguous arena."""
        begins = [] if self.paged else placed(self.storages, self.plan)
        return list(pairwise([start, *sorted({at for at in begins if start < at < stop}), stop]))

    def parts(self, start, stop):
        return set().union(*(self.units(a, b) for a, b in self.cuts(start, stop)))

    def replay(self):
        passes = -1
        for what, a, b in self.log:
            if what == "begin":
                passes += 1
                self.ended = self.begins[passes]
                self.forget(passes)
            elif what == "write":
                self.write(passes, self.units_of(self.traces[a].steps[b].writes))
            elif what == "read":
                held = all(self.holds.get(unit) == data for unit, data in self.units_read(a, b))
                must(held, f"step {b} of pass {passes} reads other data than its own")
            elif what == "ended":
                self.ended = self.begins[passes] + b + 1
            else:
                does = {"fill": self.fill, "filled": self.filled, "drop": self.leave}
                does |= {"out": self.out, "outed": self.outed}
                does[what](self.parts(a, b))

    def out(self, units):
        if self.only:
            self.start_of(units, "out")
        self.start_out(0, units)

    def outed(self, units):
        self.finish(next(n for n, (_, others) in self.leaving.items() if others == units))

    def fill(self, units):
        places = {u for u, _ in units}
        must(not (self.paged and places & self.memory), "a fill brings bytes that are there")
        self.check_quiet(places)
        if not units <= self.cold:
            self.check_spilled(units)
        if self.only and not units <= self.cold:
            self.start_of(units)
        self.cold -= units
        self.fly(0, units)

    def start_of(self, units, direction="in"):
        """Find the copies that a fill is a part of, which must be the next ones, and may start."""
        line = ((n, one) for n, one in enumerate(self.queue) if one[1].direction == direction)
        for place, (number, transfer) in line:
            left = self.left.setdefault(place, self.parts(transfer.start, transfer.stop))
            if units & left:
                late = self.ended > self.begins[number] + transfer.after
                must(late, "a copy starts before the step it waits for")
                self.left[place], units = left - units, units - left
            if not units:
                return
            must(not self.left[place] or not self.strict, "a copy overtakes another")
        raise UnsafeError("a fill of no copy of the plan")

    def filled(self, units):
        number = next((n for n, (_, others) in self.flying.items() if others == units), None)
        must(number is not None, "bytes came that were not asked for")
        self.holds.update(self.flying.pop(number or 0)[1])

    def leave(self, units):
        for unit, data in units:
            if self.holds.get(unit) == data:
                self.check_quiet({unit})
                del self.holds[unit]
                self.memory.discard(unit)
