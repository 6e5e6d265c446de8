"""The processes of a benchmark's ways, taken into the process of a test."""

import contextlib
from collections.abc import Callable
from typing import Any

Stepping = Callable[[Any], Callable[[str], dict[str, Any]]]
"""What a job does for each line."""


class Here:
    """What `benchmarks.ways.Way` is of a process."""

    bare, failure = 0, ""

    def __init__(self, step):
        self.steps = []
        self._step = step

    def step(self, how):
        self.steps.append(self._step(how))


def started_here(stepping, limits):
    """What `benchmarks.ways.started` is, without processes; it appends the limits that it is given."""

    @contextlib.contextmanager
    def started(_, jobs, given):
        limits.append(given)
        yield {job.way: Here(stepping(job)) for job in jobs}

    return started
