"""Sizes as users write them (`32MiB`, `8GB`, `50%`, or bytes), and sizes and times as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

from penstock.schedule.facts.errors import BudgetError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]*)\s*", re.IGNORECASE)


def parse_size(size: int | str, *, total: int | None = None, name: str = "budget") -> int:
    """Bytes that `size` stands for, rounded down; a percentage is of `total` bytes.

    Raises `BudgetError` for what is no size, or is not positive.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise BudgetError(f"{name} must be bytes or a size such as '32MiB', got {size!r}")
    match = None if isinstance(size, int) else _SIZE.fullmatch(size)
    if isinstance(size, int):
        nbytes = size
    elif match is None:
        forms = "bytes, '32MiB' or '8GB'" if total is None else "bytes, '32MiB', '8GB' or '50%'"
        raise BudgetError(f"{name} {size!r} is not a size: write {forms}")
    elif match[2] == "%":
        if total is None:
            raise BudgetError(f"{name} {size!r} is a percentage of an unknown total: write bytes or '32MiB'")
        nbytes = int(Fraction(match[1]) * total / 100)
    elif match[2].lower() in _UNITS:
        nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    else:
        units = "KiB, MiB, GiB, kB, MB, GB" + ("" if total is None else " or %")
        raise BudgetError(f"{name} {size!r} has the unknown unit {match[2]!r}: use {units}")
    if nbytes <= 0:
        raise BudgetError(f"{name} {size!r} is not positive: give at least one byte")
    return nbytes


def format_size(nbytes: int) -> str:
    """`nbytes` for people: `1.50 GiB`, `640 B`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_time(ns: float) -> str:
    """Nanoseconds for people: `1.53 ms`."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("\u00b5s", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"
