import pytest

from penstock.runtime.machine import calibrate
from tests.rig import machine


@pytest.fixture(autouse=True)
def little_is_measured(monkeypatch):
    """The rig's products and copies are the processor's, where those of a GPU's size take seconds."""
    monkeypatch.setattr(calibrate, "_DEVICE_MATRIX", 64)
    monkeypatch.setattr(calibrate, "_DEVICE_BUFFER", 1 << 20)


@pytest.fixture(params=machine.ORDERS, ids=lambda order: f"{order[0]}{order[1] or ''}")
def order(request):
    """Every order in which the rig runs its streams."""
    with machine.ordered(*request.param):
        yield request.param[0]


@pytest.fixture
def late():
    """The order in which nothing runs before somebody waits for it."""
    with machine.ordered("late"):
        yield
