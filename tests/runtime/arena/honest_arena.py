"""An arena for tests of the streamer, which knows what it holds and complains about every illegal access."""

import threading

from penstock.schedule.facts.errors import SourceError


class HonestArena:
    """A paged arena of units; refuses to fill what is there and counts what it holds."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.checks = 0
        self.changed = False
        self.held = set()
        self.fail_at = set()
        self._lock = threading.Lock()

    def check(self):
        self.checks += 1
        if self.changed:
            raise SourceError("a file has changed")

    def fill(self, start, stop):
        if start in self.fail_at:
            self.fail_at.discard(start)
            raise SourceError(f"disk error at {start}")
        units = set(range(start, stop))
        with self._lock:
            assert not units & self.held, "filled what is there"
            self.held |= units
            assert len(self.held) <= self.capacity, "over budget"
        return stop - start

    def drop(self, start, stop):
        with self._lock:
            self.held -= set(range(start, stop))

    def require(self, start, stop):
        with self._lock:
            assert set(range(start, stop)) <= self.held, f"read of {start}:{stop} without its bytes"
