"""Sets up logging. Nothing is printed unless PENSTOCK_LOG or the program that uses penstock asks for it.

Each module logs to a logger of its own name, for example `penstock.runtime.artifact` or
`penstock.integrations.applied`, so that each room of the code has a logger.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import TextIO

_VARIABLE, _LEVELS = "PENSTOCK_LOG", ("debug", "info", "warning")

_ROOT = logging.getLogger("penstock")


def set_up() -> None:
    """Print on stderr from the level that PENSTOCK_LOG names; if it is not set, leave logging to the program.

    Messages that are printed here are not passed on to handlers of the root logger, which would print them
    again.
    """
    asked = os.environ.get(_VARIABLE, "")
    if not asked:
        _ROOT.addHandler(logging.NullHandler())  # without one, Python prints warnings by itself
        return
    known = asked.lower() in _LEVELS
    _print("%(name)s: %(message)s", asked.upper() if known else logging.WARNING)
    if not known:
        _ROOT.warning("%s=%s is no level: give %s", _VARIABLE, asked, ", ".join(_LEVELS))


def shown(asked: bool = True) -> AbstractContextManager[None]:
    """If asked, print messages of level `info` and above on stderr while the body runs.

    PENSTOCK_LOG prints from the level that it names, whatever is asked for here.
    """
    return _SHOWN if asked and not os.environ.get(_VARIABLE) else nullcontext()


class _Shown(AbstractContextManager[None]):
    """Bodies within each other, and in several threads: the last that ends leaves the log as it was."""

    def __init__(self) -> None:
        self._lock, self._bodies = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._bodies += 1
            if self._bodies == 1:
                self._before = _ROOT.level, _ROOT.propagate
                self._handler = _print("penstock: %(message)s", logging.INFO)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._bodies -= 1
            if not self._bodies:
                _ROOT.removeHandler(self._handler)
                level, _ROOT.propagate = self._before
                _ROOT.setLevel(level)


_SHOWN = _Shown()


class _Printing(logging.StreamHandler[TextIO]):
    """Prints on what stderr is when a message comes, which programs and tests may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _print(form: str, level: int | str) -> logging.Handler:
    """Let a new handler print messages from a level on, and keep them from handlers of the root logger."""
    handler = _Printing()
    handler.setFormatter(logging.Formatter(form))
    _ROOT.addHandler(handler)
    _ROOT.setLevel(level)
    _ROOT.propagate = False
    return handler
