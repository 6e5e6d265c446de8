"""The interface of all streamers, and the counters that a streamed module shows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol


@dataclass
class Counters:
    """The counters of a streamer so far, in bytes, nanoseconds and events.

    `bytes_moved` came into the arena, and `bytes_written` went out of it to the spill file. `bytes_read` are
    those of `bytes_moved` that readers brought; the others were mapped on the caller's thread.
    """

    bytes_moved: int = 0
    bytes_read: int = 0
    misses: int = 0
    stall_ns: int = 0
    bytes_written: int = 0


def sum_of(*counters: Counters) -> Counters:
    """Returns the sum of several counters."""
    names = [field.name for field in fields(Counters)]
    return Counters(**{name: sum(getattr(counter, name) for counter in counters) for name in names})


@dataclass(frozen=True)
class MemoryUse:
    """The memory that loaded weights take, in bytes, and the threads that read them; see `Stats`."""

    held_bytes: int
    peak_bytes: int
    readers: int = 0
    pinned_bytes: int = 0
    mapped_bytes: int = 0
    simulated_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stats(MemoryUse):
    """The counters of a streamed module since it was loaded.

    `peak_bytes` is the most weight memory ever held, within the budget: the arena's ranges and the storages
    outside it. `stall_seconds` is time the caller waited for weights, loading the resident ones included.
    `bytes_written` are those of kept values that left for the spill file. `arena` says in words where weights
    live and why. `pinned_bytes` is what the host holds for a device that copies from it, `mapped_bytes` what
    of `held_bytes` is the page cache's own, and `simulated_seconds` the virtual time of a simulated device,
    loading included.
    """

    passes: int
    bytes_moved: int
    misses: int
    stall_seconds: float
    budget: int
    arena: str
    bytes_written: int = 0


class Streamer(Protocol):
    """Streams for a module, which calls it at the two probes and at the edges of passes.

    `StreamEngine` is the state machine behind it; a simulated device stands before its engine.
    """

    @property
    def counters(self) -> Counters:
        """The counters so far."""

    def probed(self, graph: int) -> tuple[int, ...]:
        """Returns the steps at which the plan acts in a pass of method `graph`, ascending."""

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of its own threads, which cannot wait for themselves."""

    def begin(self, graph: int) -> None:
        """Start a pass of method `graph`."""

    def acquire(self, graph: int, step: int) -> None:
        """Make the weights of `step` readable for the kernels that are called next."""

    def release(self, graph: int, step: int) -> None:
        """Note that the kernels of `step` have been called."""

    def end(self, graph: int) -> None:
        """End the pass."""

    def abort(self) -> None:
        """Forget everything except the resident ranges, because the pass has failed."""

    def close(self) -> None:
        """Wait for what is on its way, and stop."""
