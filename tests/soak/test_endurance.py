"""A short run of `make soak`, and what it would say of a leak."""

import os

import pytest

from penstock.runtime.device.simulated import SimDevice
from penstock.runtime.stream.loaded import Gate
from penstock.schedule.facts.errors import StreamError
from tests.hunt import nightly_but
from tests.soak.endurance import DEVICES, Endurance, Interrupt, NoMoreThanBeforeError, make


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return make(tmp_path_factory.mktemp("endurance"), "cpu", seed=1)


@pytest.mark.parametrize("device", nightly_but({"sim"}, DEVICES))
def test_a_short_run(device, one, tmp_path):
    run = one if device == "cpu" else make(tmp_path, device, seed=1)
    run.run(6, 48)
    assert run.done["passes"] >= 40
    assert run.done["loads"] == 7
    assert run.done["interrupted passes"] > 0


def test_a_descriptor_that_stays_is_found(one, tmp_path, monkeypatch):
    real, opened = Endurance._load, []

    def leaking(*arguments):
        opened.append(os.open(tmp_path, os.O_RDONLY))
        real(*arguments)

    monkeypatch.setattr(Endurance, "_load", leaking)
    with pytest.raises(NoMoreThanBeforeError, match="descriptors="):
        one.run(2, 2)
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize("hold", ["call", "closing"])
def test_a_gate_opens_again_wherever_an_interrupt_comes(hold):
    happened = []
    for line in range(1, 40):
        gate = Gate("a module", "load it")
        with (one := Interrupt(line)).coming(), getattr(gate, hold)():
            pass
        happened.append(one.happened)
        with gate.call():
            pass
        with gate.closing():
            pass
    assert sum(happened) > 5
    assert not happened[-1]


def test_a_simulated_device_that_was_interrupted_refuses_all_further_work():
    device = SimDevice()
    memory, stream = device.allocate(64, "weights"), device.open_stream("copies")
    device.fill(stream, memory, 0, 64, 1)
    with (one := Interrupt(8)).coming():
        device.fill(stream, memory, 0, 64, 2)
    assert one.happened
    with pytest.raises(StreamError, match="an interrupt came while sim worked: load the program again"):
        device.record(stream)
    device.close()
