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
    """All cases; those that are not kept run in `make nightly` alone. A tuple is of several arguments."""
    assert kept
    assert all(case in cases for case in kept)
    marks = {True: (), False: pytest.mark.nightly}
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in kept])
        for case in cases
    ]
