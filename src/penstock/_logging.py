"""Sets up logging. Nothing is printed unless PENSTOCK_LOG or the program that uses penstock asks for it.

Each module logs to a logger of its own name, for example `penstock.runtime.artifact` or
`penstock.integrations.applied`, so that each room of the code has a logger.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


def show(asked: bool) -> None:
    """If asked, print messages of level `info` and above on stderr from now on, as with PENSTOCK_LOG=info.

    Does nothing where they are printed already, by PENSTOCK_LOG, an earlier call, or `shown`.
    """
    if asked and not os.environ.get(_VARIABLE) and not _is_printing():
        _print("penstock: %(message)s", logging.INFO)


def _is_printing() -> bool:
    return any(isinstance(handler, _Printing) for handler in _ROOT.handlers)


@contextmanager
def shown() -> Iterator[None]:
    """Print messages of level `info` and above on stderr, as with PENSTOCK_LOG=info, while a command runs."""
    if os.environ.get(_VARIABLE) or _is_printing():  # from the level that was asked for
        yield
        return
    level, propagate = _ROOT.level, _ROOT.propagate
    handler = _print("penstock: %(message)s", logging.INFO)
    try:
        yield
    finally:
        _ROOT.removeHandler(handler)
        _ROOT.setLevel(level)
        _ROOT.propagate = propagate


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
