"""Plans that are found in a fraction of the time, for tests of other things than of plans.

A conftest.py imports the fixture for all tests beside and below it. How well the planner searches is for
tests/schedule, and its plans run as they are in tests/random_programs and tests/integrations.
"""

import pytest

from penstock.schedule.planner import make_plan


@pytest.fixture(scope="module", autouse=True)
def cheap_plans():
    """Plans are searched for a fiftieth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_plan.__kwdefaults__, "effort", 0.02)
        yield
