"""Random plans, most of them safe, and random ways to spoil one; no code of the planner."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from penstock.schedule.facts.model import (
    Arena,
    Drop,
    Hardware,
    Range,
    Schedule,
    Step,
    Storage,
    Trace,
    Transfer,
)
from penstock.schedule.plan import Plan

GRANULE = 4
HARDWARE = Hardware("toy", 1e9, 1e9, 1e9, 0)


@dataclass(frozen=True)
class Case:
    storages: tuple[Storage, ...]
    traces: tuple[Trace, ...]
    plan: Plan


def random_case(dice):
    """Storages, one or two traces, and a plan whose arena is as big as the layout."""
    kind = dice.choice(["paged", "paged", "contiguous"])
    storages = tuple(Storage(dice.randint(0, 5 * GRANULE), "streamable") for _ in range(dice.randint(2, 6)))
    arena = _arena(dice, kind, storages)
    traces = tuple(_trace(dice, graph, len(storages)) for graph in range(dice.randint(1, 2)))
    wrap = dice.choice(["overlap", "barrier"])
    if len(traces) == 2 and wrap == "overlap" and dice.random() < 0.5:
        traces = tuple(replace(trace, follows=1 - trace.graph) for trace in traces)
    pieces = _pieces(dice, arena, storages)
    resident = [p for p in pieces if dice.random() < 0.2]
    boundary, schedules = list(resident), []
    moving = [p for p in pieces if p not in resident]
    at_zero = {s for t in traces for s in t.steps[0].reads}
    boundary += [p for p in moving if dice.random() < 0.5 or _touches(p, arena, storages, at_zero)]
    for trace in traces:
        reads = {p: _readers(p, trace, arena, storages) for p in moving}
        schedules.append(_schedule(dice, trace, reads, boundary))
    arena_bytes = max((r.stop for r in arena.segments), default=0)
    addresses = () if kind == "paged" else _addresses(dice, arena, storages)
    if kind == "contiguous":
        arena_bytes = -(-arena_bytes // GRANULE) * GRANULE
    plan = Plan(
        budget=arena_bytes,
        arena=arena,
        arena_bytes=arena_bytes,
        outside=(),
        addresses=addresses,
        resident=tuple(resident),
        boundary=tuple(boundary),
        wrap=wrap,
        schedules=tuple(schedules),
        traces=traces,
        hardware=HARDWARE,
    )
    return Case(storages, traces, plan)


def _arena(dice, kind, storages):
    layout, end, segments = [], 0, []
    start = end = dice.choice([0, 3, 4]) if kind == "paged" else 0
    for storage in storages:
        if kind == "contiguous":
            end = -(-end // GRANULE) * GRANULE
        elif end > start and dice.random() < 0.2:
            segments.append(Range(start, end))
            # seldom in the granule of the segment before, which is unsafe
            end = end if dice.random() < 0.1 else -(-end // GRANULE) * GRANULE
            start = end = end + dice.choice([1, GRANULE])
        layout.append(end)
        end += storage.nbytes
    if end > start:
        segments.append(Range(start, end))
    return Arena(kind, "anonymous", GRANULE, tuple(layout), tuple(segments))


def _addresses(dice, arena, storages):
    """Often those of the layout, else some storages moved onto others."""
    addresses = list(arena.layout)
    if dice.random() < 0.7:
        for s in range(len(addresses)):
            if dice.random() < 0.4:
                most = (arena.segments[-1].stop - storages[s].nbytes) if arena.segments else 0
                addresses[s] = dice.randint(0, most) // GRANULE * GRANULE
    return tuple(addresses)


def _trace(dice, graph, storages):
    steps = tuple(
        Step(f"step.{k}", tuple(sorted(dice.sample(range(storages), dice.choice([1, 1, 2])))), 1, 1)
        for k in range(dice.randint(1, 6))
    )
    return Trace(f"method{graph}", graph, "", steps, 0, 0, "modelled")


def _pieces(dice, arena, storages):
    """Everything that exists, in runs of one to three granules that stay in a slot where they must."""
    runs = list(arena.segments)
    if arena.kind == "contiguous":
        runs = [Range(at, at + s.nbytes) for at, s in zip(arena.layout, storages, strict=True) if s.nbytes]
    pieces = []
    for run in runs:
        start = run.start
        while start < run.stop:
            stop = min((start // GRANULE + dice.randint(1, 3)) * GRANULE, run.stop)
            pieces.append(Range(start, stop))
            start = stop
    return pieces


def _touches(piece, arena, storages, reads):
    return any(
        max(piece.start, arena.layout[s]) < min(piece.stop, arena.layout[s] + storages[s].nbytes)
        for s in reads
    )


def _readers(piece, trace, arena, storages):
    """The steps that read a byte of `piece`."""
    steps = enumerate(trace.steps)
    return [k for k, step in steps if _touches(piece, arena, storages, set(step.reads))]


def _schedule(dice, trace, readers, boundary):
    n = len(trace.steps)
    transfers = []
    drops = []
    for piece, reads in readers.items():
        if not reads:
            continue
        for before, after in itertools.pairwise(reads):
            if after - before > 1 and dice.random() < 0.6:
                drops.append(Drop(piece.start, piece.stop, before))
                transfers.append(Transfer(piece.start, piece.stop, after, dice.randint(before, after - 1)))
        if piece not in boundary:
            drops.append(Drop(piece.start, piece.stop, reads[-1]))
            transfers.append(Transfer(piece.start, piece.stop, reads[0], dice.randint(0, reads[0] - 1)))
        elif reads[0] and dice.random() < 0.05:
            # unsafe: nobody has waited for these bytes when they are dropped in the first pass
            early = dice.randrange(reads[0])
            drops.append(Drop(piece.start, piece.stop, early))
            transfers.append(Transfer(piece.start, piece.stop, reads[0], early))
        elif dice.random() < 0.6:
            drops.append(Drop(piece.start, piece.stop, reads[-1]))
            transfers.append(Transfer(piece.start, piece.stop, reads[0], dice.randint(reads[-1] - n, -1)))
    dice.shuffle(transfers)
    transfers.sort(key=lambda t: t.after)
    return Schedule(trace.graph, tuple(transfers), tuple(sorted(drops, key=lambda d: d.step)), 0)


# Ways to spoil a plan. Each returns it changed, or as it was where there is nothing to change.


def spoil(dice, plan):
    """One random change to `plan`."""
    ways = [_spoil_transfers, _spoil_transfers, _spoil_transfers, _spoil_drops, _spoil_state, _spoil_sizes]
    return dice.choice(ways)(dice, plan)


def _shifted(dice, granule, start, stop):
    by = dice.choice([1, granule, -1, -granule])
    return dice.choice([(start + by, stop + by), (start + by, stop), (start, stop + by)])


def _spoil_transfers(dice, plan):
    number = dice.randrange(len(plan.schedules))
    items = list(plan.schedules[number].transfers)
    if not items:
        return plan
    i, j = dice.randrange(len(items)), dice.randrange(len(items))
    item = items[i]
    way = dice.choice(["after", "after", "step", "both", "range", "remove", "move", "repeat"])
    by = dice.choice([-2, -1, 1, 2])
    if way == "after":
        items[i] = replace(item, after=item.after + by)
    elif way == "step":
        items[i] = replace(item, step=item.step + by)
    elif way == "both":
        items[i] = replace(item, step=item.step + by, after=item.after + by)
    elif way == "range":
        start, stop = _shifted(dice, plan.arena.granule, item.start, item.stop)
        items[i] = replace(item, start=start, stop=stop)
    elif way == "remove":
        del items[i]
    elif way == "move":
        items.insert(j, items.pop(i))
    else:
        items.insert(j, item)
    return _with_schedule(plan, number, replace(plan.schedules[number], transfers=tuple(items)))


def _spoil_drops(dice, plan):
    number = dice.randrange(len(plan.schedules))
    items = list(plan.schedules[number].drops)
    if not items:
        return plan
    i = dice.randrange(len(items))
    item = items[i]
    way = dice.choice(["step", "range", "remove", "repeat"])
    if way == "step":
        items[i] = replace(item, step=item.step + dice.choice([-1, 1]))
    elif way == "range":
        start, stop = _shifted(dice, plan.arena.granule, item.start, item.stop)
        items[i] = replace(item, start=start, stop=stop)
    elif way == "remove":
        del items[i]
    else:
        items.append(item)
    items.sort(key=lambda d: d.step)
    return _with_schedule(plan, number, replace(plan.schedules[number], drops=tuple(items)))


def _with_schedule(plan, number, schedule):
    schedules = (*plan.schedules[:number], schedule, *plan.schedules[number + 1 :])
    return replace(plan, schedules=schedules)


def _spoil_state(dice, plan):
    """The boundary, what is resident, what is outside, the addresses."""
    way = dice.choice(["boundary", "resident", "promote", "order", "outside", "address", "own", "turns"])
    boundary, resident = list(plan.boundary), list(plan.resident)
    if way == "boundary" and boundary:
        boundary.pop(dice.randrange(len(boundary)))
    elif way == "own" and (plan.schedules[-1].boundary or ()):
        own = list(plan.schedules[-1].boundary or ())
        own.pop(dice.randrange(len(own)))
        number = len(plan.schedules) - 1
        return _with_schedule(plan, number, replace(plan.schedules[-1], boundary=tuple(own)))
    elif way == "turns" and len(plan.traces) > 1:
        follows = (1, 0) if plan.traces[0].follows is None else (None, None)
        found = (replace(t, follows=f) for t, f in zip(plan.traces, follows, strict=True))
        return replace(plan, traces=tuple(found))
    elif way == "resident" and resident:
        resident.pop(dice.randrange(len(resident)))
    elif way == "promote" and boundary:
        resident = sorted({*resident, dice.choice(boundary)})
    elif way == "order":
        dice.shuffle(boundary)
    elif way == "outside":
        return replace(plan, outside=(dice.randrange(len(plan.arena.layout)),))
    elif way == "address" and plan.addresses:
        s, by = dice.randrange(len(plan.addresses)), dice.choice([1, plan.arena.granule, -plan.arena.granule])
        moved = (*plan.addresses[:s], plan.addresses[s] + by, *plan.addresses[s + 1 :])
        return replace(plan, addresses=moved)
    return replace(plan, boundary=tuple(boundary), resident=tuple(resident))


def _spoil_sizes(dice, plan):
    by = dice.choice([-1, 1, -plan.arena.granule])
    way = dice.choice(["budget", "arena", "both"])
    arena_bytes = plan.arena_bytes + (by if way != "budget" else 0)
    return replace(plan, arena_bytes=arena_bytes, budget=plan.budget + (by if way != "arena" else 0))
