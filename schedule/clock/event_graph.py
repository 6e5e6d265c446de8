"""The event graph of a call: steps, transfers and waits, and the time at which each of them ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Arena, Decisions, Hardware, Range, Schedule, Trace, Wrap
from penstock.schedule.space.spans import merged, subtract

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True)
class UnitCopy:
    """Units that step `step` has brought in `ns` nanoseconds; the reads of the steps in `waits` need them."""

    step: int
    ns: int
    waits: tuple[int, ...]


UnitCopies = Sequence[UnitCopy]
"""The copies of units of one pass, in the order in which they are asked for."""


def unit_edges(
    facts: tuple[Trace, Schedule, Hardware],
    line: Sequence[int],
    copies: tuple[UnitCopies, UnitCopies],
    begin: int,
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the edges that the units of a pass add to the event graph: source, target, ns and height.

    `line` has the transfers in issue order, those out too where they share the link. `copies` are those of
    the pass before and of this one. The latter are numbered from `begin` on; so are the former, among the
    events of their own pass.
    """
    trace, schedule, hardware = facts
    n, (before, now) = len(trace.steps), copies
    arrived = {schedule.transfers[i].step: n + i for i in line if schedule.transfers[i].direction == "in"}
    for node, copy in enumerate(now, begin):
        asked = trace.steps[copy.step].lead_ns
        yield (copy.step - 1 if copy.step else n + len(schedule.transfers)), node, asked + copy.ns, 0
        if copy.step in arrived:
            yield arrived[copy.step], node, copy.ns, 0
        if node > begin:
            yield node - 1, node, copy.ns, 0
        elif before:
            yield begin + len(before) - 1, node, copy.ns, 1
        for step in copy.waits:
            yield node, step, trace.steps[step].read_ns, 0
    made_up: Counter[int] = Counter()
    for height, some in ((1, before), (0, now)):
        for node, copy in enumerate(some, begin):
            late, place = _next_place(schedule, line, copy.step, n)
            if line and late == height:
                made_up[place] += copy.ns
                yield node, n + line[place], hardware.moving_ns(schedule.transfers[line[place]]), height
    for place, ns in made_up.items():
        copy_ns = hardware.moving_ns(schedule.transfers[line[place]])
        yield n + line[place - 1], n + line[place], ns + copy_ns, int(place == 0)


def _next_place(schedule: Schedule, line: Sequence[int], step: int, n: int) -> tuple[int, int]:
    """The pass (0: this, 1: the next) and the place in a line of the first transfer that waits for `step`."""
    afters = [schedule.transfers[i].after for i in line]
    places = [
        (height, place)
        for height, reached in ((0, step), (1, step - n))
        for place, after in enumerate(afters)
        if after >= reached
    ]
    return next(iter(places), (1, 0))


def launch_edges(
    trace: Trace, hardware: Hardware, streamed: Sequence[int], begin: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield edges (source, target, ns, height) of launches of `streamed` steps, numbered from `begin` on."""
    for place, step in enumerate(streamed):
        node = begin + place
        yield begin + (place - 1) % len(streamed), node, hardware.host_step_ns, int(place == 0)
        yield node, step, trace.steps[step].read_ns, 0


def leaving_storages(
    arena: Arena, sizes: Sequence[int], outside: Collection[int], resident: Sequence[Range]
) -> frozenset[int]:
    """The storages of the arena of which some bytes are not in `resident`."""
    whole = merged(resident)  # neighbouring ranges may cover a storage together
    return frozenset(
        s
        for s, (start, nbytes) in enumerate(zip(arena.layout, sizes, strict=True))
        if start >= 0 and s not in outside and subtract([Range(start, start + nbytes)], whole)
    )


def streamed_steps(
    trace: Trace, schedule: Schedule, following: Schedule, leaving: Collection[int]
) -> tuple[int, ...]:
    """The steps at which a schedule waits for a transfer, starts one, or drops a range, ascending.

    All other steps read and write only bytes that never leave the device. `following` is the schedule of the
    call that comes next, and `leaving` are the storages that do not stay whole.
    """
    acting = {drop.step for drop in schedule.drops} | {transfer.step for transfer in schedule.transfers}
    # A negative `after` is a step of the pass before; numbers beyond a trace are those of no step below.
    acting |= {transfer.after for transfer in schedule.transfers}
    acting |= {len(trace.steps) + transfer.after for transfer in following.transfers}
    return tuple(
        k
        for k, step in enumerate(trace.steps)
        if k in acting or any(s in leaving for s in (*step.reads, *step.writes))
    )


def acting_steps(plan: Decisions, graph: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The streamed steps of method number `graph`; `sizes` are the bytes of the storages."""
    trace = next(candidate for candidate in plan.traces if candidate.graph == graph)
    schedules = {schedule.graph: schedule for schedule in plan.schedules}
    follows = {
        candidate.graph if candidate.follows is None else candidate.follows: candidate.graph
        for candidate in plan.traces
    }
    leaving = leaving_storages(plan.arena, sizes, plan.outside, plan.resident)
    return streamed_steps(trace, schedules[graph], schedules[follows[graph]], leaving)


def launched_steps(plan: Decisions, number: int) -> tuple[int, ...]:
    """The streamed steps of trace number `number` whose launches take time; none if no launch does.

    In a plan without `sizes`, the first byte of a storage stands for all.
    """
    if not plan.hardware.host_step_ns:
        return ()
    return acting_steps(plan, plan.traces[number].graph, plan.sizes or (1,) * len(plan.arena.layout))


def launches_ns(plan: Decisions, number: int) -> int:
    """Nanoseconds of the calling thread for the streamed steps of a pass of trace number `number`."""
    return plan.hardware.host_step_ns * len(launched_steps(plan, number))


Edge = tuple[int, int, int, int]
"""Source, target, weight in ns, height in passes."""

_SETTLING = 24
"""Passes that are simulated before the steady ones: the link usually settles within two passes."""

_WINDOW = 12
"""Passes over which the steady period is averaged.

Steady times repeat after a few passes; this number is a multiple of 1, 2, 3, 4 and 6.
"""


@dataclass(frozen=True)
class PassTimes:
    """The times of one pass, in nanoseconds since the first call began: a pair (start, end) for each event.

    A read starts when the lead of its step has ended, its spans have arrived, and the step has been launched.
    It takes the time of its step, and longer where the end of the step waits for copies out. `transfers` are
    those for the reads of this pass, some of which start during the pass before. `stages` are the reads of
    the disk for these transfers, in order. `units` are the copies of units that the pass asked for, within
    the time of whose steps it waited for them. `launches` are those of its streamed steps, in order.
    """

    call_start: int
    reads: tuple[tuple[int, int], ...]
    transfers: tuple[tuple[int, int], ...]
    stages: tuple[tuple[int, int], ...] = ()
    units: tuple[tuple[int, int], ...] = ()
    launches: tuple[tuple[int, int], ...] = ()


def build_graph(
    trace: Trace, schedule: Schedule, hardware: Hardware, wrap: Wrap, *, launched: Sequence[int] = ()
) -> networkx.DiGraph:
    """The event graph with attributes `weight` (ns) and `height` (passes, 0 or 1) on its edges.

    A node is the moment at which an event ends: ("step", k) the read of step k, ("transfer", i) transfer i,
    ("stage", q) the disk's read number q, ("launch", k) the launch of step k, which is in `launched`. At
    ("call", 0) a pass begins.
    """
    import networkx

    counts = {"step": len(trace.steps), "transfer": len(schedule.transfers), "call": 1}
    counts["stage"] = len(_staged(schedule))
    nodes = [(kind, number) for kind, count in counts.items() for number in range(count)]
    edges = [*_edges(trace, schedule, hardware, wrap), *launch_edges(trace, hardware, launched, len(nodes))]
    nodes += [("launch", k) for k in launched]
    graph = networkx.DiGraph()
    graph.add_nodes_from(nodes)
    for source, target, weight, height in edges:
        graph.add_edge(nodes[source], nodes[target], weight=weight, height=height)
    return graph


def steady_period_ns(
    trace: Trace,
    schedule: Schedule,
    hardware: Hardware,
    wrap: Wrap,
    *,
    enough: float = math.inf,
    launched: Sequence[int] = (),
) -> int:
    """The exact maximum cycle ratio of the event graph, rounded up to whole nanoseconds.

    Of a ratio above `enough`, the result is only some number above `enough` that the ratio is not below. No
    launch of the steps in `launched` waits for another event: their only cycle is that of all launches.

    This is Lawler's parametric search, driven by the cycles that are found (Lawler, Combinatorial
    Optimization, 1976, section 3.13; compared with Howard's algorithm and others by Dasdan, ACM
    TODAES 9(4), 2004). For a ratio num / den that some cycle has, every edge is worth
    den * weight - num * height. Either the longest paths settle, and no cycle has a larger ratio; or
    their predecessors close a cycle that has a larger one, with which the search goes on. Every ratio is
    that of a real cycle and larger than the last, so the search ends, and it is exact in integers.

    Raises:
        PlanError: transfers and steps wait for each other within one pass.
    """
    edges = list(_edges(trace, schedule, hardware, wrap))
    count = _count(trace, schedule)
    order = _topological_order(edges, count, schedule.graph)
    rank = {node: position for position, node in enumerate(order)}
    edges.sort(key=lambda edge: rank[edge[1]])
    lines = _lines(schedule, hardware)
    copying = max((sum(hardware.moving_ns(schedule.transfers[i]) for i in line) for line in lines), default=0)
    staging = sum(hardware.disk_ns(schedule.staged[i]) for i in _staged(schedule))
    weight, height = max(trace.compute_ns, copying, staging, hardware.host_step_ns * len(launched)), 1
    while True:
        cycle = None if weight > enough * height else _heavier_cycle(edges, count, weight, height)
        if cycle is None:
            return -(-weight // height)
        weight, height = sum(e[2] for e in cycle), sum(e[3] for e in cycle)


def simulate(
    trace: Trace,
    schedule: Schedule,
    hardware: Hardware,
    wrap: Wrap,
    passes: int,
    *,
    launched: Sequence[int] = (),
    units: Sequence[UnitCopies] = (),
) -> tuple[PassTimes, ...]:
    """The times at which every read and transfer of the first `passes` passes starts and ends.

    At time 0 the first call begins, and only the resident ranges are on the device. Transfers that a steady
    pass has in flight when its call begins start at time 0, too. `launched` are the streamed steps, if their
    launches take time. `units` are the copies of units of the first passes; later ones have none.

    Raises:
        PlanError: transfers and steps wait for each other within one pass.
    """
    edges = list(_edges(trace, schedule, hardware, wrap))
    steps, transfers = trace.steps, schedule.transfers
    call, begin = len(steps) + len(transfers), _count(trace, schedule)
    edges += launch_edges(trace, hardware, launched, begin)
    count = begin + len(launched)
    alone = _System(edges, count, schedule.graph)
    copy_ns = [hardware.moving_ns(t) for t in transfers]
    disk_ns = [hardware.disk_ns(schedule.staged[i]) for i in _staged(schedule)]
    launch_ns = [hardware.host_step_ns] * len(launched)
    least = [0] * len(steps) + [hardware.link_fill_ns + ns for ns in copy_ns] + [0] + disk_ns + launch_ns
    lines = _lines(schedule, hardware)
    line = next(
        (candidate for candidate in lines if any(transfers[i].direction == "in" for i in candidate)), []
    )
    before: list[int] | None = None
    result: list[PassTimes] = []
    last: UnitCopies = ()
    for unit_calls in (*units[:passes], *[()] * (passes - len(units))):
        system = alone
        if unit_calls or last:
            added = unit_edges((trace, schedule, hardware), line, (last, unit_calls), count)
            system = _System([*edges, *added], count + len(unit_calls), schedule.graph)
        now = system.next([*least, *(copy.ns for copy in unit_calls)], before)
        reads = _reads(trace, schedule, now, zip(launched, now[begin:count], strict=True))
        spans = [
            tuple((end - ns, end) for end, ns in zip(ends, taken, strict=True))
            for ends, taken in (
                (now[len(steps) : call], copy_ns),
                (now[call + 1 : begin], disk_ns),
                (now[count:], [copy.ns for copy in unit_calls]),
                (now[begin:count], launch_ns),
            )
        ]
        result.append(PassTimes(now[call], reads, *spans))
        before, last = now, unit_calls
    return tuple(result)


class _System:
    """The events of a pass in an order in which they can happen, and what each of them waits for."""

    def __init__(self, edges: list[Edge], count: int, graph: int) -> None:
        self._order = _topological_order(edges, count, graph)
        self._incoming: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for source, target, weight, height in edges:
            self._incoming[target].append((source, weight, height))

    def next(self, least: Sequence[int], before: Sequence[int] | None) -> list[int]:
        """The times of a pass from those of the pass before, or `least` where there was none."""
        now = [0] * len(self._order)
        for node in self._order:
            times = [least[node]] if before is None else []
            for source, weight, height in self._incoming[node]:
                if height == 0:
                    times.append(now[source] + weight)
                elif before is not None:
                    times.append(before[source] + weight)
            now[node] = max(times)
        return now


def _reads(
    trace: Trace, schedule: Schedule, now: list[int], launches: Iterable[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """When the reads of a pass begin, and when their steps end; `launches` are steps and ends of launches."""
    n, began = len(trace.steps), []
    ended = now[n + len(schedule.transfers)]
    for k, step in enumerate(trace.steps):
        began.append(ended + step.lead_ns)
        ended = now[k]
    for i, t in enumerate(schedule.transfers):
        if t.direction == "in":
            began[t.step] = max(began[t.step], now[n + i])
    for k, launched_at in launches:
        began[k] = max(began[k], launched_at)
    return tuple(zip(began, now[:n], strict=True))


@dataclass(frozen=True)
class Simulation:
    """The first pass and a steady pass of a schedule, and how long they take.

    `first_ns` is the time from a cold start to the start of the second call. `period_ns` is what one more
    pass costs in the steady state, rounded up.
    """

    first: PassTimes
    steady: PassTimes
    first_ns: int
    period_ns: int


def settle(
    trace: Trace, schedule: Schedule, hardware: Hardware, wrap: Wrap, *, launched: Sequence[int] = ()
) -> Simulation:
    """Simulate a fixed number of passes, after which they are steady as a rule."""
    passes = simulate(trace, schedule, hardware, wrap, _SETTLING + _WINDOW + 1, launched=launched)
    period = -(-(passes[-1].call_start - passes[-1 - _WINDOW].call_start) // _WINDOW)
    return Simulation(passes[0], passes[-2], passes[1].call_start - passes[0].call_start, period)


def stalls_of(trace: Trace, times: PassTimes) -> list[int]:
    """Nanoseconds for which each step of a pass waits: for its spans, its launch, and copies out."""
    ended, waits = times.call_start, []
    for step, (_, end) in zip(trace.steps, times.reads, strict=True):
        waits.append(end - ended - step.lead_ns - step.read_ns)
        ended = end
    return waits


def _edges(trace: Trace, schedule: Schedule, hardware: Hardware, wrap: Wrap) -> Iterator[Edge]:
    """Yield the edges of the event graph, with events as numbers.

    The steps are numbered from 0, and then the transfers, the start of the call, and the reads of the disk.
    Transfers of one line run in issue order, so a step waits only for the last of those made for it: its read
    for copies in, and its end for copies out. The bytes of a transfer flow when those of the one before it in
    its line have come, and when the link's time to fill has passed since the transfer might start. The copies
    in and out are two lines where the link carries both at once.
    """
    steps, transfers = trace.steps, schedule.transfers
    n, m = len(steps), len(transfers)
    call = n + m
    last_for_step = {(t.step, str(t.direction)): n + i for i, t in enumerate(transfers)}
    yield n - 1 if n else call, call, trace.tail_ns + trace.gap_ns, 1
    for k, step in enumerate(steps):
        yield (k - 1 if k else call), k, step.lead_ns + step.read_ns, 0
        for way, waits_ns in (("in", step.read_ns), ("out", 0)):
            if (k, way) in last_for_step:
                yield last_for_step[k, way], k, waits_ns, 0
    for line in _lines(schedule, hardware):
        in_flight = None
        for place, i in enumerate(line):
            transfer, node = transfers[i], n + i
            copy_ns = hardware.moving_ns(transfer)
            yield n + line[place - 1], node, copy_ns, int(place == 0)
            early = transfer.after < 0
            yield transfer.after + n * early, node, hardware.link_fill_ns + copy_ns, int(early)
            in_flight = node if early else in_flight
        if wrap == "barrier" and in_flight is not None:
            yield in_flight, call, trace.gap_ns, 0
    yield from _stage_edges(schedule, hardware, n)


def _lines(schedule: Schedule, hardware: Hardware) -> list[list[int]]:
    """The indices of the transfers that share a line of the link, in issue order."""
    ways = [t.direction if hardware.duplex else "both" for t in schedule.transfers]
    return [[i for i, way in enumerate(ways) if way == direction] for direction in dict.fromkeys(ways)]


def _stage_edges(schedule: Schedule, hardware: Hardware, n: int) -> Iterator[Edge]:
    """Yield the edges of the disk's reads, which are numbered after the `n` steps, transfers and call.

    The disk reads in order. A read starts when the bytes of earlier reads that do not fit into the ring
    beside its own have been copied to the device. A transfer starts when its bytes have been read.
    """
    staged = _staged(schedule)
    sizes, first, count = [schedule.staged[i] for i in staged], n + len(schedule.transfers) + 1, len(staged)
    # The reads from `back - count` to q are in the ring together; negative ones are of the pass before.
    back, in_ring = 0, 0
    for q in range(-count, count):
        in_ring += sizes[q]
        while in_ring > schedule.staging_bytes or q - (back - count) >= count:
            in_ring -= sizes[back % count]
            back += 1
        if q < 0:
            continue
        transfer, node, disk_ns = schedule.transfers[staged[q]], first + q, hardware.disk_ns(sizes[q])
        copied = back - count - 1
        yield first + (q - 1) % count, node, disk_ns, int(q == 0)
        yield n + staged[copied % count], node, disk_ns, int(copied < 0)
        copy_ns = hardware.link_fill_ns + hardware.copy_ns(transfer.stop - transfer.start)
        yield node, n + staged[q], copy_ns, 0


def _staged(schedule: Schedule) -> list[int]:
    return [i for i, nbytes in enumerate(schedule.staged) if nbytes]


def _count(trace: Trace, schedule: Schedule) -> int:
    return len(trace.steps) + len(schedule.transfers) + 1 + len(_staged(schedule))


def _topological_order(edges: list[Edge], count: int, graph: int) -> list[int]:
    """The events in an order in which one pass can happen. Raises PlanError if there is none."""
    waiting = [0] * count
    following: list[list[int]] = [[] for _ in range(count)]
    for source, target, _, height in edges:
        if height == 0:
            waiting[target] += 1
            following[source].append(target)
    order = [node for node in range(count) if not waiting[node]]
    for node in order:
        for target in following[node]:
            waiting[target] -= 1
            if not waiting[target]:
                order.append(target)
    if len(order) < count:
        raise PlanError(
            f"schedule of graph {graph}: {count - len(order)} events wait for each other within one pass; "
            f"expected every transfer to wait for steps before its own only; plan again"
        )
    return order


def _heavier_cycle(edges: list[Edge], count: int, weight: int, height: int) -> list[Edge] | None:
    """A cycle with more than weight / height, or None when there is none.

    The search computes longest paths by relaxation in topological order (Bellman and Ford). One sweep carries
    the paths up to the next edge of height 1, of which a path without cycles has few.
    """
    worth = [(s, t, height * w - weight * h, e) for e, (s, t, w, h) in enumerate(edges)]
    length = [0] * count
    via = [-1] * count
    changed = True
    while changed:
        changed = False
        for source, target, gain, edge in worth:
            path = length[source] + gain
            if path > length[target]:
                length[target] = path
                via[target] = edge
                changed = True
        if changed and (cycle := _cycle(edges, via)):
            return cycle
    return None


def _cycle(edges: list[Edge], via: list[int]) -> list[Edge] | None:
    """A cycle of the graph in which every node has at most one incoming edge, `via[node]`."""
    walk_of = [-1] * len(via)
    for start in range(len(via)):
        node = start
        while walk_of[node] == -1 and via[node] >= 0:
            walk_of[node] = start
            node = edges[via[node]][0]
        if via[node] < 0 or walk_of[node] != start:
            continue
        cycle = [edges[via[node]]]
        while cycle[-1][0] != node:
            cycle.append(edges[via[cycle[-1][0]]])
        return cycle
    return None
