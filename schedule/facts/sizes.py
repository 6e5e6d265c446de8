"""Sizes as users write them (`32MiB`, `8GB`, `50%`, or bytes), and sizes and times as people read them.

`8GB` is 8 * 10^9 bytes and `8GiB` 8 * 2^30. A letter alone is a power of two, as docker and systemd read it:
`8G` is `8GiB`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from time import monotonic

from penstock.schedule.facts.errors import BudgetError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{p + suffix: 1024**i for i, p in enumerate("kmgt", 1) for suffix in ("", "i", "ib")},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*(%|[a-z]*)\s*", re.IGNORECASE)


def parse_size(size: int | str, *, total: int | None = None, name: str = "budget") -> int:
    """The bytes that `size` stands for, rounded down; a percentage is of `total` bytes.

    `name` is the name of the size in messages. Raises `BudgetError` for a value that is no size, for a
    fraction without a unit, and for a size that is not positive.
    """
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise BudgetError(f"{name} must be bytes or a size such as '32MiB', got {size!r}")
    nbytes = size if isinstance(size, int) else _parse(str(size), total, name)
    if nbytes <= 0:
        raise BudgetError(f"{name} {size!r} is not positive: give at least one byte")
    return nbytes


def _parse(size: str, total: int | None, name: str) -> int:
    forms = "bytes, '32MiB' or '8GB'" if total is None else "bytes, '32MiB', '8GB' or '50%'"
    match = _SIZE.fullmatch(size)
    if match is None:
        raise BudgetError(f"{name} {size!r} is not a size: write {forms}")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        if total is None:
            raise BudgetError(f"{name} {size!r} is a percentage of an unknown total: write bytes or '32MiB'")
        if number > 100 and name.endswith("budget"):
            raise BudgetError(
                f"{name} {size!r} is more than all weights, which 100% holds: write at most '100%'"
            )
        return int(number * total / 100)
    if unit not in _UNITS:
        units = "KiB, MiB, GiB, kB, MB, GB" + ("" if total is None else " or %")
        raise BudgetError(f"{name} {size!r} has the unknown unit {match[2]!r}: use {units}")
    if not unit and number.denominator > 1:
        share = f"'{float(100 * number):g}%'" if number < 1 and total is not None else forms
        raise BudgetError(f"{name} {size!r} is a fraction, not a number of bytes: write {share}")
    return int(number * _UNITS[unit])


def format_size(nbytes: int, *, up: bool = False) -> str:
    """A number of bytes for people: `1.50 GiB`, `640 B`. With `up` the text is never less than the number."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{nbytes} B"
    return f"{math.ceil(value * 100) / 100 if up else value:.2f} {unit}"


def format_budget(nbytes: int, total: int = 0) -> str:
    """A budget or a cap as its user will have written it, with the binary amount: `16 MB (15.26 MiB)`.

    That is a whole percentage of `total` bytes (`50% (10.00 MiB)`; 0: not known), or a decimal unit with at
    most two decimals; any other number, and one that binary units give exactly, is as `format_size` has it.
    """
    binary = format_size(nbytes)
    if total and 0 < nbytes <= total and nbytes == total * (share := -(-100 * nbytes // total)) // 100:
        return f"{share}% ({binary})"
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            exact = nbytes * 100 % size == 0 and nbytes != parse_size(binary)
            return f"{nbytes / size:g} {unit} ({binary})" if exact else binary
    return binary


def seconds_since(begun: float) -> str:
    """Return for people how long ago a time of `time.monotonic` was."""
    return format_time((monotonic() - begun) * 1e9)


def format_time(ns: float) -> str:
    """A time in nanoseconds for people: `1.53 ms`."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            # More than three digits are written out, and never as a power of ten.
            return f"{ns / size:.3g} {unit}" if ns < 999.5 * size else f"{ns / size:.0f} {unit}"
    return f"{ns:.0f} ns"
