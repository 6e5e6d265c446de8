"""Puts tables between two marks of a page, and figures into them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

END = "<!-- to here -->"


def write_between(path: Path, lines: str, begin: str) -> None:
    """Put `lines` between the line `begin` of the document and the end mark that follows it."""
    head, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, end, tail = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{path} has no line {begin!r} followed by {END!r} to write the tables between")
    path.write_text(f"{head}{begin}\n\n{lines}\n{END}{tail}", encoding="utf-8")


def quantile(values: Sequence[float], percent: int) -> float:
    """The value below or at which so many percent of the values lie: that of rank n percent, rounded up."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]
