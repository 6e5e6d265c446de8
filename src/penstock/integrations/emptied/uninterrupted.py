"""Lets a change of a module be made whole, or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C, which only the main thread gets, wait until the body is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *given: pending.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if pending and callable(before):
            before(*pending[0])
