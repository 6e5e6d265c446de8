"""The thread that calls a program, in the event graph: what it takes to enqueue the steps that stream.

On a device the thread enqueues a step's waits, copies and events, and goes on; the device runs them later.
So the launches of streamed steps are a line of their own: each follows the one before, also across calls, and
the read of a step does not begin before its launch has ended. A copy needs no edge of its own, since it waits
for the end of a step, which was launched before.

The thread is not taken to wait for the device between calls, nor for the disk behind the host. What the
program's own kernels cost it is unknown, and nothing here. A captured graph is one launch for all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from penstock.schedule.facts.model import Arena, Decisions, Hardware, Range, Schedule, Trace
from penstock.schedule.space.spans import merged, subtract


def launch_edges(
    trace: Trace, hardware: Hardware, streamed: Sequence[int], begin: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the edges of the launches of a pass: source, target, ns and height.

    Steps are numbered from 0, and the launches of the `streamed` ones, which ascend, from `begin` on.
    """
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
    """The streamed steps of trace number `which` whose launches take time; none if no launch does.

    In a plan without `sizes`, the first byte of a storage stands for all.
    """
    if not plan.hardware.host_step_ns:
        return ()
    return acting_steps(plan, plan.traces[number].graph, plan.sizes or (1,) * len(plan.arena.layout))


def launches_ns(plan: Decisions, number: int) -> int:
    """Nanoseconds of the calling thread for the streamed steps of a pass of trace number `which`."""
    return plan.hardware.host_step_ns * len(launched_steps(plan, number))
