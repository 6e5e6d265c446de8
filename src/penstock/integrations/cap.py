"""The memory that all components of a model may hold together, and what planning has left in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock.runtime.system.own_memory import (
    anonymous_bytes,
    give_back_unused,
    give_back_when_freed,
)

SLACK = 64 << 20
"""Bytes that a process may take beside its libraries and the cap."""

_KERNELS = 8 << 20, 5
"""Kernels may take this many of them for memory of their own, and this part of the cap."""

_LEAST = 16 << 20
"""The code and tables of penstock may take this many of them whatever the cap is.

Planning leaves 19 MiB for a model of 150 layers, and 47 MiB for one of 1,500.
"""


class Holder(Protocol):
    """A component that has weights in memory."""

    def unload(self) -> None:
        """Free the memory."""


class Cap:
    """The bytes that all components may hold together. One component holds them at a time.

    A thread needs `lock` to use them, so one call runs at a time. With `counts_own`, what planning leaves in
    memory counts too, as far as it is more than `beside` bytes, and large blocks that are freed go back to
    the system. The memory of a GPU is elsewhere.
    """

    def __init__(self, nbytes: int, *, counts_own: bool = True) -> None:
        self.nbytes = nbytes
        self.lock = threading.RLock()
        self.reserved = 0  # bytes of trained parameters and what comes with them, and of buffers on a device
        self._counts_own = counts_own
        self._left = 0
        self._working = False
        self._holder: Holder | None = None
        self._running: Holder | None = None
        if counts_own:
            give_back_when_freed()

    @property
    def kernels(self) -> int:
        """Bytes beside the cap that kernels may take for memory of their own; on a GPU all is measured."""
        if not self._counts_own:
            return 0
        return _KERNELS[0] + self.nbytes // _KERNELS[1]

    @property
    def beside(self) -> int:
        """Bytes beside the cap that code and tables may take."""
        return max(_LEAST, SLACK - self.kernels)

    @property
    def own(self) -> int:
        """Bytes of the cap that planning has left in use."""
        return max(0, self._left - self.beside)

    @property
    def room(self) -> int:
        """Bytes that remain for weights and calls."""
        return max(0, self.nbytes - self.reserved - self.own)

    def turn(self, holder: Holder) -> None:
        """Give the memory to `holder`; the component that had it unloads."""
        if self._holder is not None and self._holder is not holder:
            self._holder.unload()
        self._holder = holder

    @contextmanager
    def calling(self, holder: Holder) -> Iterator[bool]:
        """Give the memory to `holder` while its call runs.

        Yields True within the call of another holder, which keeps its memory: what `holder` takes comes on
        top.
        """
        outer, self._running = self._running, self._running or holder
        try:
            if self._running is holder:
                self.turn(holder)
            yield self._running is not holder
        finally:
            self._running = outer

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count what the body leaves in memory; inside another such body, that one counts it.

        No weights may come or go meanwhile. What could be garbage is given back before it counts.
        """
        if self._working or not self._counts_own:
            yield
            return
        before, self._working = anonymous_bytes() - self._left, True
        try:
            yield
        finally:
            self._working, known = False, self._left
            self._left = max(0, anonymous_bytes() - before)
            if self._left > max(known, self.beside):
                give_back_unused()
                self._left = max(0, anonymous_bytes() - before)
