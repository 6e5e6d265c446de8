"""Answers Ctrl-C at once, also while the main thread is in a library that Python cannot interrupt."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

STATUS = 128 + signal.SIGINT
"""The exit status of a command that was interrupted, by the convention of shells."""


@contextmanager
def answered() -> Iterator[None]:
    """Say "stopping ..." on stderr as soon as Ctrl-C is pressed, and exit with STATUS at the end.

    Python raises KeyboardInterrupt in the main thread only between two Python instructions, so a solver or a
    kernel may delay it. The wakeup descriptor receives a signal at once. A library that is interrupted while
    it is imported may raise any error, so the status does not depend on the error. Use this in the main
    thread.
    """
    pressed = Event()
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    thread = Thread(target=_answer, args=(heard, pressed), name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)  # ends the thread
        thread.join()
        os.close(heard)
        if pressed.is_set():
            sys.exit(STATUS)


@contextmanager
def left_to_body() -> Iterator[None]:
    """Leave Ctrl-C to the body, as KeyboardInterrupt, within `answered`."""
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _answer(heard: int, pressed: Event) -> None:
    """Wait for SIGINT on the descriptor `heard`, then set `pressed` and say so; end when it is closed."""
    while numbers := os.read(heard, 1):
        if numbers[0] == signal.SIGINT:
            pressed.set()
            _say("penstock: stopping ...")
            return


def _say(sentence: str) -> None:
    """Print on the process's own stderr, on a new line where a terminal shows a spinner and `^C`."""
    if sys.__stderr__ is not None:
        begin = "\n" if sys.__stderr__.isatty() else ""
        print(f"{begin}{sentence}", file=sys.__stderr__, flush=True)
