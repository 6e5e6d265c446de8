"""Says on stderr that work takes long: a line when it has, and one when it ends, also without a terminal."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from penstock.schedule.facts.sizes import seconds_since

VARIABLE = "PENSTOCK_ANNOUNCE_AFTER"
"""The environment variable with the seconds after which work is announced: 0 for all work, `inf` for none."""

_SECONDS = 5.0

_outer = threading.local()


@contextmanager
def announced(title: str | None) -> Iterator[None]:
    """Print `title` on stderr once it has taken five seconds, and how long it took when it ends.

    Within announced work of the same thread nothing is printed, nor where `title` is None because a terminal
    shows the work in another way. `PENSTOCK_ANNOUNCE_AFTER` sets the seconds.

    Example:
        >>> with announced("converting 12 GB of weights"):
        ...     pass
    """
    after = math.inf if title is None else _asked_seconds()
    if getattr(_outer, "busy", False):
        yield
        return
    begun, line, stream = time.monotonic(), _Line(title), sys.stderr
    timer = threading.Timer(after, line.begin, (stream,))
    timer.daemon = _outer.busy = True
    if after <= 0:
        line.begin(stream)
    elif after < math.inf:
        timer.start()
    try:
        yield
    finally:
        _outer.busy = False
        timer.cancel()
        line.end(stream, seconds_since(begun))


class _Line:
    """The two lines about some work. The second one is printed only where the first one was."""

    def __init__(self, title: str | None) -> None:
        self._title, self._lock, self._begun, self._ended = title, threading.Lock(), False, False

    def begin(self, stream: TextIO) -> None:
        with self._lock:
            if not self._ended:
                self._begun = True
                _print(stream, f"penstock: {self._title} ...")

    def end(self, stream: TextIO, took: str) -> None:
        with self._lock:
            self._ended = True
            if self._begun:
                _print(stream, f"penstock: {self._title} took {took}")


def _print(stream: TextIO, line: str) -> None:
    """Print a line where that is possible: it is never worth an error."""
    with suppress(OSError, ValueError):
        print(line, file=stream, flush=True)


def _asked_seconds() -> float:
    with suppress(ValueError):
        asked = float(os.environ.get(VARIABLE, _SECONDS))
        return asked if asked >= 0 else _SECONDS
    return _SECONDS
