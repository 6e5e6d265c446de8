"""Times every step of one pass, for a trace with measured times."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from penstock.passes.probes import Probes
from penstock.passes.trace import with_measured
from penstock.schedule.facts.model import Trace


class Stopwatch:
    """Stands between the probes of every step and the streamer, which sees only those it asked for.

    A step's read runs from the end of its acquire to its release, its lead from there to the next acquire,
    so what a step waited for weights is in neither. What the caller's own thread does for streaming is in
    the lead: a release drops what was read, and maps what the page cache holds. So is the first touch of
    memory that the kernel has yet to map in the read, for it happens inside the kernels.
    """

    def __init__(self, streamer: Probes | None, probed: Collection[int], steps: int) -> None:
        self._streamer, self._probed = streamer, frozenset(probed)
        self._lead_ns, self._read_ns = [0] * steps, [0] * steps
        self._tail_ns = 0
        self._mark = 0

    def time(self, run: Callable[[], object]) -> object:
        """Run the pass that is timed, and return what it returns."""
        self._mark = time.perf_counter_ns()
        result = run()
        self._tail_ns = time.perf_counter_ns() - self._mark
        return result

    def acquire(self, graph: int, step: int) -> None:
        self._lead_ns[step] = time.perf_counter_ns() - self._mark
        if self._streamer is not None and step in self._probed:
            self._streamer.acquire(graph, step)
        self._mark = time.perf_counter_ns()

    def release(self, graph: int, step: int) -> None:
        ended = time.perf_counter_ns()
        self._read_ns[step] = ended - self._mark
        self._mark = ended
        if self._streamer is not None and step in self._probed:
            self._streamer.release(graph, step)

    def trace(self, modelled: Trace) -> Trace:
        """`modelled` with the times of the pass that has just ended."""
        return with_measured(modelled, self._lead_ns, self._read_ns, self._tail_ns)
