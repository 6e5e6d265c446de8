"""What penstock logs: nothing that anyone sees, unless PENSTOCK_LOG or the program that uses it asks.

Each module logs to a logger of its own name, so that the loggers below `penstock` are the rooms: for example
`penstock.runtime.artifact` and `penstock.integrations.streamed`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE, _LEVELS = "PENSTOCK_LOG", ("debug", "info", "warning")

_ROOT = logging.getLogger("penstock")


def set_up() -> None:
    """Print on stderr from the level that PENSTOCK_LOG names, else leave all to handlers of the program.

    What is printed here does not go on to handlers of the root logger, which would print it again.
    """
    asked = os.environ.get(_VARIABLE, "")
    if not asked:
        _ROOT.addHandler(logging.NullHandler())  # without one, Python prints warnings by itself
        return
    known = asked.lower() in _LEVELS
    _print("%(name)s: %(message)s", asked.upper() if known else logging.WARNING)
    if not known:
        _ROOT.warning("%s=%s is no level: give %s", _VARIABLE, asked, ", ".join(_LEVELS))


@contextmanager
def shown() -> Iterator[None]:
    """For commands: what is logged at `info` and above is printed on stderr, as PENSTOCK_LOG=info would."""
    if os.environ.get(_VARIABLE):  # it is printed already, from the level that was asked for
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


def _print(form: str, level: int | str) -> logging.Handler:
    """Let a new handler print what is logged from a level on, and no handler of the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(form))
    _ROOT.addHandler(handler)
    _ROOT.setLevel(level)
    _ROOT.propagate = False
    return handler
