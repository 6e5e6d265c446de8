"""Notices that a model reads a clock, or random numbers of the system, while it is exported."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

from penstock.passes.building.state_holders import LIBRARIES

_NANOSECONDS = ("time_ns", "perf_counter_ns", "monotonic_ns", "process_time_ns")
_SECONDS = ("time", "perf_counter", "monotonic", "process_time")

_LATER = 123_456_789_012_345
"""The nanoseconds by which clocks go on from one export to the next: more than a day, and no round number."""


@contextmanager
def noted_clocks(exports: int) -> Iterator[list[str]]:
    """A list that is given the names of what code besides torch's reads in the body, in this thread.

    Clocks show it a time that is later the more `exports` there were before.
    """
    read: list[str] = []
    thread = threading.get_ident()

    def noted(name: str, known: Callable[..., Any], later: float) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if threading.get_ident() != thread or _is_torch(sys._getframe(1)):
                return known(*args)
            read.append(name)
            return known(*args) + later if later else known(*args)

        return called

    with ExitStack() as entered:
        for names, later in ((_SECONDS, exports * _LATER / 1e9), (_NANOSECONDS, exports * _LATER)):
            for name in names:
                instead = noted(f"time.{name}", getattr(time, name), later)
                entered.enter_context(patch.object(time, name, instead))
        for owner, name in ((os, "urandom"), (random, "_urandom")):
            entered.enter_context(patch.object(owner, name, noted("os.urandom", os.urandom, 0)))
        yield read


def _is_torch(frame: FrameType | None) -> bool:
    """Tell whether the innermost code that is not Python's own is torch's or penstock's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("torch", "penstock"):
            return True
        if package not in LIBRARIES:
            return False
        frame = frame.f_back
    return True
