"""How many cases a test goes through: some in the suite, all or many times as many in `make soak`.

Tests that ask are marked `random`, by which `make soak` finds them.
"""

import os
from typing import TypeVar

import pytest

Case = TypeVar("Case")

_TIMES = int(os.environ.get("PENSTOCK_SOAK", "1"))


def scaled(number):
    """`number` in the suite, and so many times as many in `make soak`."""
    return number * _TIMES


def sampled(cases, every):
    """Every so manyth of the cases in the suite, from the first on, and all of them in `make soak`."""
    return cases if _TIMES > 1 else cases[::every]


def nightly_but(kept, cases):
    """All cases as parameters, of which `make test` runs those that are kept, and `make nightly` the others.

    A case of several parameters is a tuple. `kept` has cases, or tells of a case whether it is kept.
    """
    keeps = kept if callable(kept) else kept.__contains__
    marks = pytest.mark.nightly
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if keeps(one) else marks)
        for one in cases
    ]
