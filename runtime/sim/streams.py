"""What a simulated device keeps of its streams: operations still to run, clocks, events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.runtime.sim.races import Clock


@dataclass
class SimEvent:
    """Complete once each stream has run as many operations, and `after` have. Times are virtual."""

    reached: tuple[tuple[SimStream, int], ...]
    after: tuple[SimEvent, ...]
    known: Clock
    time_ns: int
    capture: int
    of_disk: bool = False


@dataclass
class SimStream:
    """Operations still to run, and how far the virtual clock of the stream is.

    An operation is a function, and the events it must wait for before it runs. After an error none runs.
    """

    name: str
    waiting: deque[tuple[Callable[[], object], tuple[SimEvent, ...]]] = field(default_factory=deque)
    pending: list[SimEvent] = field(default_factory=list)
    enqueued: int = 0
    done: int = 0
    time_ns: int = 0
    last_stamp: int = 0
    capture: int = 0
    error: BaseException | None = None


@dataclass
class SimDisk:
    """A disk, which reads one after another: lanes share the reads, and nothing but waits orders them."""

    lanes: tuple[SimStream, ...]
    read_into: Callable[[int, int, int, int], None]
    count: int = 0
    time_ns: int = 0


def make_event(
    streams: Sequence[SimStream], known: Clock, time_ns: int, *, of_disk: bool = False, capture: int = 0
) -> SimEvent:
    """An event behind all that was enqueued on `streams` so far."""
    reached = tuple((stream, stream.enqueued) for stream in streams)
    after = tuple(event for stream in streams for event in stream.pending)
    return SimEvent(reached, after, known, time_ns, capture, of_disk)
