"""Finds accesses to the same bytes that nothing orders, by vector clocks.

Each stream, and the host, is a thread with a clock, which says for every thread how many of its operations
are known to come before (Fidge 1988, Mattern 1989). An access is stamped with its thread's own count.
Two accesses of one byte, one of them a write, race unless the clock of the later one has reached the stamp
of the earlier one, in whatever order they ran. As in FastTrack (Flanagan and Freund 2009) the last write and
the reads since are kept, here for each range of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.schedule.facts.errors import StreamError

Clock = dict[str, int]
"""For each thread, the number of its operations that are known to come before."""


class RaceError(StreamError):
    """Two accesses of the same bytes that no event orders."""


@dataclass(frozen=True)
class Access:
    """Bytes `start` to `stop` of memory `memory`, touched by operation `stamp` of `thread`."""

    memory: str
    start: int
    stop: int
    thread: str
    stamp: int
    writes: bool
    label: object

    def __str__(self) -> str:
        return f"{self.label}, which {'writes' if self.writes else 'reads'} on {self.thread}"


class RaceDetector:
    """The clocks of all threads, and the last accesses of every byte."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {}
        self._last: dict[str, list[Access]] = {}

    @property
    def remembered(self) -> int:
        """The number of accesses that are kept to compare later ones with."""
        return sum(map(len, self._last.values()))

    def copy(self) -> RaceDetector:
        """Returns another detector, which knows what this one knows now."""
        copied = RaceDetector()
        copied._clocks = {thread: dict(clock) for thread, clock in self._clocks.items()}
        copied._last = {memory: list(accesses) for memory, accesses in self._last.items()}
        return copied

    def tick(self, thread: str) -> int:
        """Count another operation of the thread, and return its stamp."""
        clock = self._clocks.setdefault(thread, {})
        clock[thread] = clock.get(thread, 0) + 1
        return clock[thread]

    def clock_of(self, thread: str) -> Clock:
        """Returns a copy of the thread's clock, for others to join later."""
        return dict(self._clocks.get(thread, {}))

    def join(self, thread: str, known: Clock) -> None:
        """Have the thread come after all operations that `known` has counted."""
        clock = self._clocks.setdefault(thread, {})
        for other, stamp in known.items():
            if stamp > clock.get(other, 0):
                clock[other] = stamp

    def begin(self, thread: str, by: str) -> None:
        """Count another operation of the thread, which comes after all that the one that asks knows."""
        self.tick(by)
        self.join(thread, self._clocks[by])
        self.tick(thread)

    def access(self, memory: str, start: int, stop: int, thread: str, label: object, *, writes: bool) -> None:
        """Note that the thread's newest operation touches these bytes. Raises RaceError for a race."""
        clock = self._clocks.setdefault(thread, {})
        now = Access(memory, start, stop, thread, clock.get(thread, 0), writes, label)
        if start >= stop:
            return
        remaining: list[Access] = []
        for before in self._last.get(memory, ()):
            if before.stop <= start or stop <= before.start:
                remaining.append(before)
                continue
            ordered = clock.get(before.thread, 0) >= before.stamp
            if not ordered and (before.writes or writes):
                low, high = max(before.start, start), min(before.stop, stop)
                raise RaceError(
                    f"bytes {low} to {high} of {memory}: nothing orders {before}, and {now}; "
                    "an event is missing, or is waited for too late"
                )
            # Accesses that a write overwrites, or that the same thread repeats, need not be remembered.
            covered = ordered and (writes or (not before.writes and before.thread == thread))
            remaining += _outside(before, start, stop) if covered else (before,)
        remaining.append(now)
        self._last[memory] = remaining


def _outside(access: Access, start: int, stop: int) -> Iterator[Access]:
    if access.start < start:
        yield replace(access, stop=start)
    if stop < access.stop:
        yield replace(access, start=stop)
