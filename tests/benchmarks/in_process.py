"""The processes of a benchmark's ways, taken into the process of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Stepping = Callable[[Any], Callable[[str], dict[str, Any]]]
"""What a job does for each line."""


class Here:
    """What `benchmarks.ways.Way` is of a process."""

    bare, failure = 0, ""

    def __init__(self, step: Callable[[str], dict[str, Any]]) -> None:
        self.steps: list[dict[str, Any]] = []
        self._step = step

    def step(self, how: str) -> None:
        self.steps.append(self._step(how))


def started_here(stepping: Stepping, limits: list[Mapping[str, int]]) -> Any:
    """What `benchmarks.ways.started` is, without processes; it appends the limits that it is given."""

    @contextlib.contextmanager
    def started(_: str, jobs: Sequence[Any], given: Mapping[str, int]) -> Iterator[dict[str, Here]]:
        limits.append(given)
        yield {job.way: Here(stepping(job)) for job in jobs}

    return started
