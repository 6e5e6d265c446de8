"""Short sections that Ctrl-C waits for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What is done inside is done whole: Ctrl-C, which the main thread alone gets, counts at the end."""
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
