"""How the progress of long work is reported to the caller, in bytes."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done so far and the bytes in all."""


def count_bytes(progress: Progress | None, what: str, total: int) -> Callable[[int], None] | None:
    """A function that takes the bytes done since its last call and reports their sum to `progress`."""
    if progress is None:
        return None
    report, done = progress, 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(what, done, total)

    return add
