"""How many cases a test goes through: some in the suite, all or many times as many in `make soak`.

Tests that ask are marked `random`, by which `make soak` finds them.
"""

import os
from typing import TypeVar

Case = TypeVar("Case")

_TIMES = int(os.environ.get("PENSTOCK_SOAK", "1"))


def scaled(number):
    """`number` in the suite, and so many times as many in `make soak`."""
    return number * _TIMES


def sampled(cases, every):
    """Every so manyth of the cases in the suite, from the first on, and all of them in `make soak`."""
    return cases if _TIMES > 1 else cases[::every]
