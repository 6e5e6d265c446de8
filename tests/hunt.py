"""How many random cases a test goes through: some in the suite, many times as many in `make soak`.

Tests that ask are marked `random`, by which `make soak` finds them.
"""

from __future__ import annotations

import os

_TIMES = int(os.environ.get("PENSTOCK_SOAK", "1"))


def scaled(number: int) -> int:
    """`number` in the suite, and so many times as many in `make soak`."""
    return number * _TIMES
