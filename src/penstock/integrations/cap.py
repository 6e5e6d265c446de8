"""The memory that all components of a model or a pipeline share."""

from __future__ import annotations

import threading
from typing import Protocol


class Holder(Protocol):
    """What holds memory until it is told to give it back."""

    def unload(self) -> None: ...


class Cap:
    """What all components may hold together, in bytes. One holds memory at a time; the last one keeps it.

    Who has `lock` has the memory: one call runs at a time, whichever thread makes it. While `rehearsing`,
    which is set with it, calls return zeros and read no weights.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lock = threading.RLock()
        self.rehearsing = False
        self._holder: Holder | None = None

    def turn(self, component: Holder) -> None:
        """Take the memory from whoever has it, for `component`."""
        if self._holder not in (None, component):
            assert self._holder is not None
            self._holder.unload()
        self._holder = component
