"""A stream for copies from ordinary memory, during which a driver blocks whoever calls it: here a thread.

The driver copies from memory that is not page-locked in pieces of its own, and returns when it has the last
one, which is behind everything before it on the stream. So a thread calls it, in the order of the stream. The
host waits only for an event that the thread has not come to yet, since torch's own event is recorded then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from penstock.runtime.system.threads import WorkerPool


@dataclass(frozen=True)
class PageableEvent:
    """An event of a thread's stream; `recorded` gives torch's own, or raises the stream's error."""

    recorded: Future[torch.Event]

    def query(self) -> bool:
        if not self.recorded.done():
            return False
        return self.recorded.exception() is not None or self.recorded.result().query()

    def synchronize(self) -> None:
        self.recorded.result().synchronize()


class PageableStream:
    """Drives `stream` on a thread, whose events `record` makes. After an `error` it does nothing more."""

    def __init__(self, stream: torch.Stream, record: Callable[[torch.Stream], torch.Event]) -> None:
        self._stream, self._record = stream, record
        self.error: BaseException | None = None
        self._thread = WorkerPool(1, "copies")

    def run(self, work: Callable[[], object]) -> None:
        """Do some work on the thread, while the stream is current there."""
        self._thread.submit(self._guarded, work)

    def record(self) -> PageableEvent:
        return PageableEvent(self._thread.submit(self._recorded))

    def wait_event(self, event: torch.Event | PageableEvent) -> None:
        """Have the stream wait for an event; where it is another thread's, this one waits for that."""
        self.run(lambda: self._stream.wait_event(as_recorded(event)))

    def synchronize(self) -> None:
        self.record().synchronize()

    def close(self) -> None:
        """Wait for the thread, and end it. A second call does nothing."""
        self._thread.shutdown()

    @property
    def includes_caller(self) -> bool:
        """Tells whether the caller is the stream's own thread, which cannot wait for itself."""
        return self._thread.includes_caller

    def _recorded(self) -> torch.Event:
        if self.error is not None:
            raise self.error
        return self._record(self._stream)

    def _guarded(self, work: Callable[[], object]) -> None:
        if self.error is None:
            try:
                with self._stream:
                    work()
            except BaseException as error:
                self.error = error


def as_recorded(event: torch.Event | PageableEvent) -> torch.Event:
    """Returns torch's own event, once the thread that records it has come to it. Raises what that raised."""
    return event.recorded.result() if isinstance(event, PageableEvent) else event
