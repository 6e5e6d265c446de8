import pytest

from penstock.runtime.machine import calibrate
from tests.cheap_plans import cheap_plans  # noqa: F401
from tests.rig import machine


@pytest.fixture(autouse=True)
def little_is_measured(monkeypatch):
    """The rig's products and copies are the processor's, where those of a GPU's size take seconds."""
    monkeypatch.setattr(calibrate, "_DEVICE_MATRIX", 64)
    monkeypatch.setattr(calibrate, "_DEVICE_BUFFER", 1 << 20)


_SURE = [order for order in machine.ORDERS if order[0] in ("late", "random")]
"""Orders in which a fault of the waits shows that shows in any; the others are for `make nightly`."""


@pytest.fixture(
    params=[pytest.param(one, marks=() if one in _SURE else pytest.mark.nightly) for one in machine.ORDERS],
    ids=lambda order: f"{order[0]}{order[1] or ''}",
)
def order(request):
    """Every order in which the rig runs its streams."""
    with machine.ordered(*request.param):
        yield request.param[0]


@pytest.fixture
def late():
    """The order in which nothing runs before somebody waits for it."""
    with machine.ordered("late"):
        yield
