"""A plan by which each kept value leaves memory right after it was written, and comes back to be read."""

from dataclasses import dataclass

from penstock.passes.trace import PRESET_CPU
from penstock.schedule.facts.model import Arena, Drop, Range, Schedule, Transfer
from penstock.schedule.plan import Plan

GRANULE = 4096


@dataclass(frozen=True)
class _Life:
    """A kept value: the steps of the forward and of the backward that write it, read it first, and last."""

    storage: int
    written: int
    first: int
    last: int


def spilling_plan(payload):
    """Weights stay, values leave; a value that the last step writes has no time to leave, and stays."""
    forward, backward = payload.traces
    n, storages = len(forward.steps), payload.storages
    lives = [
        _Life(s, k, *_first_and_last([j for j, one in enumerate(backward.steps) if s in one.reads]))
        for k, step in enumerate(forward.steps)
        for s in step.writes
    ]
    staying = [life for life in lives if life.written == n - 1]
    leaving = [life for life in lives if life.written < n - 1]
    layout, end = [-1] * len(storages), 0
    read = {s for trace in payload.traces for step in trace.steps for s in step.reads}
    for s in sorted(read, key=lambda s: storages[s].kind == "produced"):
        layout[s], end = end, end + _whole(storages[s].nbytes)
    kept = [layout[s] for s in read if storages[s].kind == "produced"]
    segments = [
        Range(0, min(kept)),
        *(Range(at, at + storages[layout.index(at)].nbytes) for at in sorted(kept)),
    ]
    addresses, arena_bytes = _addresses(payload, layout, lives, n)
    ranges = {s: Range(layout[s], layout[s] + storages[s].nbytes) for s in read}
    resident = tuple(ranges[s] for s in sorted(read) if storages[s].kind != "produced")
    back = sorted(leaving, key=lambda life: life.first)
    ins = [
        Transfer(ranges[one.storage].start, ranges[one.storage].stop, one.first, one.first - 1)
        for one in back
    ]
    outs = [
        Transfer(ranges[one.storage].start, ranges[one.storage].stop, one.written + 1, one.written, "out")
        for one in leaving
    ]
    away = [Drop(ranges[one.storage].start, ranges[one.storage].stop, one.written + 1) for one in leaving]
    gone = sorted(
        (Drop(ranges[one.storage].start, ranges[one.storage].stop, one.last) for one in lives),
        key=lambda drop: drop.step,
    )
    coming = [Range(one.start, one.stop) for one in ins if one.after < 0]
    between = (*resident, *(ranges[one.storage] for one in staying), *coming)
    outside = tuple(s for s in range(len(storages)) if s not in read)
    return Plan(
        budget=arena_bytes + sum(storages[s].nbytes for s in outside),
        arena=Arena("contiguous", "anonymous", GRANULE, tuple(layout), tuple(segments)),
        arena_bytes=arena_bytes,
        outside=outside,
        addresses=tuple(addresses),
        resident=resident,
        boundary=resident,
        wrap="overlap",
        schedules=(
            Schedule(forward.graph, tuple(outs), tuple(away), 1, boundary=resident),
            Schedule(backward.graph, tuple(ins), tuple(gone), 1, boundary=between),
        ),
        traces=payload.traces,
        hardware=PRESET_CPU,
    )


def _first_and_last(steps):
    return steps[0], steps[-1]


def _whole(nbytes):
    return -(-nbytes // GRANULE) * GRANULE


def _addresses(payload, layout, lives, n):
    """Places for all that is read: values share memory where they are never there at once."""
    storages = payload.storages
    addresses, end = [-1] * len(storages), 0
    for s, storage in enumerate(storages):
        if layout[s] >= 0 and storage.kind != "produced":
            addresses[s], end = end, end + _whole(storage.nbytes)
    placed = []
    top = end
    for life in lives:
        size, at = _whole(storages[life.storage].nbytes), end
        others = sorted(
            (place, place + _whole(storages[other.storage].nbytes))
            for other, place in placed
            if _meet(life, other, n)
        )
        for start, stop in others:
            if at + size > start and at < stop:
                at = stop
        addresses[life.storage] = at
        placed.append((life, at))
        top = max(top, at + size)
    return addresses, top


def _meet(one, other, n):
    return any(a < d and c < b for a, b in _times(one, n) for c, d in _times(other, n))


def _times(life, n):
    """When a value is there, in steps of both methods: room is taken from the end of the step before on."""
    if life.written == n - 1:
        return [(life.written, n + life.last + 1)]
    return [(life.written, life.written + 2), (n + life.first - 1, n + life.last + 1)]
