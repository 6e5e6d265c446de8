"""Times for the log."""

from __future__ import annotations

from time import monotonic

from penstock.schedule.facts.sizes import format_time


def seconds_since(begun: float) -> str:
    """How long it is, for the log, since a time of `time.monotonic`."""
    return format_time((monotonic() - begun) * 1e9)
