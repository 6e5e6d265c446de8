"""Python's garbage collector waits while a model is put together of what is kept.

Hundreds of thousands of objects are made then, and next to none is garbage, while the collector would look at
each of them and at all that the libraries hold: a quarter of the time. An export leaves garbage, and lets it
work meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_waiting = ContextVar("waiting", default=False)


@contextmanager
def without_collector() -> Iterator[None]:
    """Let the collector wait; where it does not run, it is left alone."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    token = _waiting.set(True)
    try:
        yield
    finally:
        _waiting.reset(token)
        gc.enable()


@contextmanager
def with_collector() -> Iterator[None]:
    """Let the collector work although `without_collector` made it wait."""
    if not _waiting.get():
        yield
        return
    gc.enable()
    token = _waiting.set(False)
    try:
        yield
    finally:
        _waiting.reset(token)
        gc.disable()
