"""The memory that all components of a model may hold together: what was asked for, and what is left of it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from penstock._logging import shown
from penstock.runtime.device.opening import ACCELERATOR, device_kind, hardware_of, target_device
from penstock.runtime.system.limits import memory_limit
from penstock.runtime.system.memory import (
    anonymous_bytes,
    give_back_free,
    give_back_unused,
    give_back_when_freed,
    made_code_bytes,
    round_up,
)
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.sizes import format_size, parse_size

_log = logging.getLogger(__name__)

SLACK = 64 << 20
"""Bytes that a process may take beside its libraries and the cap."""

_KERNELS = 8 << 20, 5
"""Kernels may take this many of them for memory of their own, and this part of the cap."""

_LEAST = 16 << 20
"""The code and tables of penstock may take this many of them whatever the cap is.

Planning leaves 19 MiB for a model of 150 layers, and 47 MiB for one of 1,500.
"""

_STEP = 4 << 20
"""What calls have left in use is taken from the cap in multiples of this: each other cap is planned anew."""

_RESERVE = 5
"""Without `memory=`, one part in so many of what is free is left to other programs, and SLACK at least."""

ANY_TOTAL = 1 << 60
"""The bytes of which a percentage is taken while a model's size is not known."""


def asked_memory(memory: int | str | None, total: int, device: str = "cpu") -> int:
    """Return the bytes of `memory`, a share of `total`; the log says what None is. Raises BudgetError."""
    if memory is not None:
        return parse_size(memory, total=total, name="memory")
    nbytes, words = default_memory(device)
    _log.info("%s", words)
    return nbytes


def default_memory(device: str = "cpu") -> tuple[int, str]:
    """The bytes that are free, less a reserve, and a sentence. Raises BudgetError if that is nothing."""
    free, place = _free_memory(device)
    reserve = max(SLACK, free // _RESERVE)
    if free <= reserve:
        raise BudgetError(
            f"{place} has {format_size(free)} of memory left, of which {format_size(reserve)} are a reserve: "
            "end other programs, or give memory="
        )
    nbytes = free - reserve
    words = f"memory is {format_size(nbytes)}: {place} has {format_size(free)} left, of which "
    return nbytes, words + f"{format_size(reserve)} are a reserve"


def _free_memory(device: str) -> tuple[int, str]:
    if device_kind(device) == ACCELERATOR:
        return torch.accelerator.get_memory_info(target_device(device))[0], device
    hardware = hardware_of(device)
    if hardware is not None and hardware.memory_nbytes is not None:
        return hardware.memory_nbytes, device
    limit = memory_limit()
    if limit is None:
        raise BudgetError("this system does not say how much memory is free: give memory=")
    return limit.left, limit.name


class Holder(Protocol):
    """A component that has weights in memory."""

    def unload(self) -> None:
        """Free the memory."""


class Cap:
    """The bytes that all components may hold together. One component holds them at a time.

    A thread needs `lock` to use them, so one call runs at a time. With `counts_own`, what planning and calls
    leave in memory counts too, as far as it is more than `beside` bytes, large blocks that are freed go back
    to the system, and torch keeps few kernels if it has run none yet. The memory of a GPU is elsewhere.

    What calls leave is code that oneDNN keeps of its kernels, 2.2 MiB for each length of a prompt of a Llama
    in bfloat16, modules that were imported, and holes in the heap.
    """

    def __init__(self, nbytes: int, *, counts_own: bool = True) -> None:
        self.nbytes = nbytes
        self.verbose = False  # prints the log while somebody uses the memory
        self.lock = threading.RLock()
        self.reserved = 0  # bytes of trained parameters and what comes with them, and of buffers on a device
        self.bytes_read = 0  # of weights, by calls without a plan and by plans that were closed
        self._counts_own = counts_own
        self._left = self._calls_left = 0  # by planning, and by calls
        self._before_calls: int | None = None  # bytes of this process without weights, before the first call
        self._working = False
        self._holder: Holder | None = None
        self._running: Holder | None = None
        self._calls = 0  # that run, each within the one before
        self._shapes = set[str]()  # of calls with a plan
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
        """Bytes of the cap that planning and calls have left in use."""
        return max(0, self._left + round_up(self._calls_left, _STEP) - self.beside)

    @property
    def spare(self) -> int:
        """Bytes beside the cap that a call without a plan may take, for all that it makes and for kernels.

        What planning and calls have left in use takes its part of them, and kernels always have theirs.
        """
        return max(self.kernels, SLACK - self._left - self._calls_left) if self._counts_own else SLACK

    @property
    def room(self) -> int:
        """Bytes that remain for weights and calls."""
        return max(0, self.nbytes - self.reserved - self.own)

    def give_back(self) -> None:
        """Give free pages of the heap back to the system."""
        if self._counts_own:
            give_back_free()

    def begin(self, given_bytes: int) -> None:
        """Give free pages of the heap back before a call without a plan, which is given `given_bytes`.

        No weights are in memory, but for those of a call around this one. What earlier calls have left is no
        more than the process has more by now.
        """
        self.give_back()
        if not self._counts_own or self._calls > 1:
            return
        # Torch reads at its first kernel how many it keeps. Each length of a prompt of a Llama in bfloat16
        # has 7 others, of 0.3 MiB each: a tenth of the cap.
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, str(min(1024, max(32, self.nbytes // 3_000_000))))
        now = anonymous_bytes() - given_bytes - self._left
        if self._before_calls is None:
            self._before_calls = now
        self._calls_left = max(0, min(self._calls_left, now - self._before_calls))

    def leave(self, nbytes: int) -> None:
        """Count the bytes that a call without a plan has left in memory."""
        if self._counts_own:
            self._calls_left += nbytes

    @contextmanager
    def counting_kernels(self, shapes: Mapping[int | str, object]) -> Iterator[None]:
        """Count kernels that torch keeps of the first call of a plan with such inputs; masks have none."""
        shown = str([pair for pair in shapes.items() if "mask" not in str(pair)])
        if not self._counts_own or self._calls > 1 or shown in self._shapes:  # a call around it counts them
            yield
            return
        self._shapes.add(shown)
        before = made_code_bytes()
        try:
            yield
        finally:
            self._calls_left = max(0, self._calls_left + made_code_bytes() - before)

    def count_read(self, nbytes: int) -> None:
        """Count bytes of weights that came into memory."""
        self.bytes_read += nbytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the lock, and print the log if it is asked for."""
        with self.lock, shown(self.verbose):
            yield

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
        self._calls += 1
        try:
            if self._running is holder:
                self.turn(holder)
            yield self._running is not holder
        finally:
            self._running = outer
            self._calls -= 1

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
