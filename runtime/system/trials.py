"""Times one piece of work several times, and gives the median and the spread of the figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LEAST, MOST = 3, 9
"""The trials of one measurement: fewer than `MOST` if all together take longer than `SECONDS`."""

SECONDS = 0.3

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Trials:
    """The figures of several trials of one piece of work, all in one unit.

    `waited` is the share of the time, from 0 to 1, for which the working threads were ready to run while the
    system ran others. On a busy machine all trials may be equally slow, and the spread does not show it.
    """

    figures: tuple[float, ...]
    waited: float = 0.0

    @property
    def median(self) -> float:
        """Returns the median of the figures."""
        return statistics.median(self.figures)

    @property
    def spread(self) -> float:
        """Returns the interquartile range of the figures over their median, which is 0 for a single trial."""
        if len(self.figures) == 1:
            return 0.0
        first, _, third = statistics.quantiles(self.figures, n=4, method="inclusive")
        return (third - first) / self.median


def repeat(work: Callable[[], object], amount: float, *, threads: int = 1) -> Trials:
    """Returns the rates of `work`, which does `amount` units of something on `threads` threads, per second.

    A first run does not count. There are `LEAST` trials at least.
    """
    work()
    seconds: list[float] = []
    waited = -waiting_ns()
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < SECONDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    waited += waiting_ns()
    share = waited / 1e9 / (threads * sum(seconds))
    return Trials(tuple(amount / second for second in seconds), min(1.0, max(0.0, share)))


def waiting_ns() -> int:
    """Returns for how many nanoseconds the threads of this process, all together, were ready and did not run.

    That is 0 where the system does not say. Only Linux does, in the second figure of schedstat.
    """
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for task in _TASKS.iterdir():
            total += int((task / "schedstat").read_text().split()[1])
    return total
