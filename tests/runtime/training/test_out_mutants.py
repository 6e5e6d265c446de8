"""The mutants of what a streamer does with values that leave are caught on a CPU and on the simulated device.

On a CPU they show in the gradients, with memory that is poisoned where bytes are dropped. On the simulated
device some are races already, whatever the order in which its streams run.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.passes.trace import PRESET_CPU
from penstock.runtime.device.simulated import RaceError
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.schedule.facts.errors import PenstockError, PlanError
from penstock.schedule.verify.proof import verify_plan
from tests.engines import ENGINES
from tests.faults.double import build
from tests.forked import run_forked
from tests.runtime.device.simulated.ordered_device import OrderedDevice
from tests.runtime.training.out_mutants import ELSEWHERE, MUTANTS
from tests.runtime.training.spill_faults import step
from tests.runtime.training.spill_plans import spilling_plan
from tests.training_models import DECODER

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, sys
from pathlib import Path
from tests.runtime.training.out_mutants import run
print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])))
"""
POLICIES = ("latest", "earliest", "lagging", "random")


@pytest.fixture(scope="module")
def program(spilling):
    return spilling(DECODER)


@pytest.fixture(scope="module")
def wanted():
    return step(DECODER.model())


@pytest.fixture(scope="module", params=ENGINES)
def came(request, program, tmp_path_factory):
    """What came of each mutant on an engine, in a process whose writes to the spill file are late."""
    given = [program.path, tmp_path_factory.mktemp("late"), request.param]
    done = run_forked(SCRIPT, *given, folder=ROOT, preloaded=build())
    assert done.status == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("name", [*MUTANTS, ELSEWHERE])
def test_on_a_cpu_with_late_writes(name, came):
    expected = {"none": "right", "outs are forgotten": "PlanError: "}.get(name, "wrong gradients")
    assert came[name].startswith(expected)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_verifier_refuses_their_plans(name, program):
    plan, payload = MUTANTS[name](spilling_plan(program.payload)), program.payload
    if name == "none":
        verify_plan(payload.storages, payload.traces, plan)
    else:
        with pytest.raises(PlanError):
            verify_plan(payload.storages, payload.traces, plan)


class ElsewhereDevice(OrderedDevice):
    """Copies out go to other bytes of the host's memory."""

    def copy_out(self, stream, source, moves, label):
        super().copy_out(stream, source, [replace(move, start=_elsewhere(move)) for move in moves], label)


def _elsewhere(move):
    return move.start - 64 if move.start >= 64 else move.start + 64


class ForgetfulDevice(OrderedDevice):
    """Copies out are not made."""

    def copy_out(self, stream, source, moves, label):
        pass


def _too_early(freed):
    """Copies out wait for the copies before them alone."""
    return lambda self, piece: self._device.record(self._copies) if piece.out else freed(self, piece)


CHANGES = {
    "the end of a step does not wait for outs": (
        "_wait_out",
        lambda original: lambda self, step: self._issue(),
    ),
    "outs do not wait for the step that writes": ("_freed", _too_early),
}
"""Methods of the streamer that are replaced."""

SIMULATED = [*MUTANTS, *CHANGES, ELSEWHERE, "outs are not made"]


RACES = {
    "an out is not waited for before its place is overwritten",
    "an out is issued before the value is written",
    *CHANGES,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SIMULATED)
def test_on_the_simulated_device_in_any_order(name, policy, program, wanted, monkeypatch):
    kind = {ELSEWHERE: ElsewhereDevice, "outs are not made": ForgetfulDevice}.get(name, OrderedDevice)
    if name in CHANGES:
        method, change = CHANGES[name]
        monkeypatch.setattr(DeviceStreamer, method, change(getattr(DeviceStreamer, method)))
    plan = MUTANTS.get(name, MUTANTS["none"])(spilling_plan(program.payload))
    device = kind(PRESET_CPU, policy=policy)
    try:
        with load_module(program, plan, LoadRequest(device="sim"), device=device) as module:
            got = step(module)
        found = "nothing" if all(torch.equal(got[one], wanted[one]) for one in wanted) else "bits"
    except RaceError:
        found = "race"
    except PenstockError:
        found = "error"
    if name == "none":
        assert found == "nothing"
    elif name in RACES:
        assert found == "race"
    else:
        assert found in {"bits", "error"}
