"""Watches the first passes of a load, and corrects the remembered figures of the machine by them.

If the compute of a pass takes another time than the plan assumed, this time is remembered for the artifact,
and its next plan assumes it. If a pass was faster or slower than is possible with the rates of the plan,
these rates are forgotten, and the next plan measures them again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.runtime.arrival import WeightFiles
from penstock.runtime.files.artifact_files import artifact_digest
from penstock.runtime.measurements import Measurement, Subject, forget, recall, record, this_machine
from penstock.runtime.stream.interface import Counters
from penstock.runtime.system.trials import Trials
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Method
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

PASSES = 5
"""The number of passes of a method that are watched, after a first one, which also loads and warms up."""

FACTOR = 2
"""A time contradicts a figure if it is longer or shorter than expected by more than this factor."""

LEAST_NS = 5_000_000
"""Smaller differences contradict nothing, since most of so short a time is spent in Python."""


def seen_compute(folder: Path, method: str) -> Measurement | None:
    """The compute time of a pass that a load of this artifact saw, if it contradicted its plan; else None."""
    subject = _subject(folder, method)
    return recall(subject) if subject else None


def _subject(folder: Path, method: str) -> Subject | None:
    digest = artifact_digest(folder)
    return Subject("pass", this_machine(), method, digest[:16]) if digest else None


class _Pass(NamedTuple):
    """A watched pass: its nanoseconds, those that it waited for weights, and the bytes that it moved."""

    total_ns: int
    stall_ns: int
    nbytes: int


class Sightings:
    """Watches the first passes of each method of a load on the machine that its plan was made for.

    `counters` returns the streamer's present counters.
    """

    def __init__(self, folder: Path, payload: Payload, plan: Plan, counters: Callable[[], Counters]) -> None:
        self._folder, self._payload, self._plan, self._counters = folder, payload, plan, counters
        self._methods = {method.graph: method for method in payload.methods}
        self._passes: dict[int, list[_Pass]] = {method.graph: [] for method in payload.methods}

    @contextmanager
    def watching(self, graph: int, leaves: Sequence[Any]) -> Iterator[None]:
        """Watch the pass that runs in this context; it counts if `leaves` have the sizes of the trace."""
        if graph not in self._passes or not at_exported_sizes(self._methods[graph], leaves):
            yield
            return
        counters = self._counters()
        stall_ns, moved, began = counters.stall_ns, counters.bytes_moved, time.perf_counter_ns()
        yield
        took = time.perf_counter_ns() - began
        counters = self._counters()
        passes = self._passes[graph]
        passes.append(_Pass(took, counters.stall_ns - stall_ns, counters.bytes_moved - moved))
        if len(passes) > PASSES:
            self._conclude(graph, self._passes.pop(graph)[1:])

    def _conclude(self, graph: int, passes: Sequence[_Pass]) -> None:
        self._check_compute(graph, Trials(tuple(timed.total_ns - timed.stall_ns for timed in passes)))
        self._check_arrival(graph, passes)

    def _check_compute(self, graph: int, seen: Trials) -> None:
        """Remember the compute time of a pass if it contradicts the time that the plan assumed."""
        (planned,) = (trace for trace in self._plan.traces if trace.graph == graph)
        subject = _subject(self._folder, planned.method)
        if subject is None or not _contradicts(seen.median, planned.compute_ns):
            return
        record(subject, seen)
        modelled = with_times(planned, self._plan.hardware).compute_ns
        if seen.median < modelled and _contradicts(seen.median, modelled):
            # The machine cannot compute faster than its true rates, so these were measured while it was busy.
            rates, machine = ("products", "memory"), this_machine()
            forget(
                lambda measurement: (
                    measurement.subject.machine == machine and measurement.subject.quantity in rates
                )
            )

    def _check_arrival(self, graph: int, passes: Sequence[_Pass]) -> None:
        """Forget the rate at which weights arrive if a pass was faster than it allows, or waited longer."""
        hardware = self._plan.hardware
        (schedule,) = (schedule for schedule in self._plan.schedules if schedule.graph == graph)
        least = statistics.median(hardware.copy_ns(timed.nbytes) for timed in passes)
        most = least + len(schedule.transfers) * (hardware.link_latency_ns + hardware.link_fill_ns)
        took = statistics.median(timed.total_ns for timed in passes)
        stalled = statistics.median(timed.stall_ns for timed in passes)
        faster = took < least and _contradicts(took, least)
        slower = stalled > most and _contradicts(stalled, most)
        if faster or slower:
            identity = WeightFiles(self._payload.files, self._folder).identity
            forget(lambda measurement: measurement.subject.identity == identity)


def at_exported_sizes(method: Method, leaves: Sequence[Any]) -> bool:
    """Tells whether the leaves of a call have the sizes of the method's trace, which are those at export."""
    examples = {symbol.name: symbol.example for symbol in method.symbols}
    for described, leaf in zip(method.inputs, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            shape = [examples[size] if isinstance(size, str) else size for size in described.shape]
            if list(leaf.shape) != shape:
                return False
        elif described.value is None:
            return False  # the payload does not have the value of a number at export
    return True


def _contradicts(seen_ns: float, expected_ns: float) -> bool:
    most, least = max(seen_ns, expected_ns), min(seen_ns, expected_ns)
    return most > FACTOR * least and most - least > LEAST_NS
