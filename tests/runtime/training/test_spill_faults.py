"""Every write and every read of the spill file goes wrong: a typed error, and the next call is right.

Each call meets one kind of fault here, and every kind in `make soak`. Where a call is interrupted, or moves
less than was asked for, the step goes on.
"""

import json
import os
import signal
from itertools import product
from pathlib import Path

import pytest

import penstock
from penstock.runtime.files.direct_file import open_spill_file, with_places
from penstock.schedule.facts.errors import SourceError
from tests.engines import ENGINES
from tests.faults.double import build
from tests.forked import run_forked
from tests.hunt import nightly_but, sampled
from tests.runtime.training.spill_plans import spilling_plan
from tests.training_models import DECODER

ROOT = Path(__file__).parents[3]
FATAL = {"ENOSPC", "EIO", "nothing"}


@pytest.fixture(scope="module")
def artifact(spilling):
    return spilling(DECODER).path


FAILING = """
import sys
from pathlib import Path
from tests.faults.double import Kind
from tests.runtime.training.spill_faults import fail_each
artifact, folder, engine, kind = sys.argv[1:]
fail_each(Path(artifact), Path(folder), engine, Kind[kind])
"""


@pytest.mark.random
@pytest.mark.parametrize(
    ("engine", "kind"),
    nightly_but({("python", "READS"), ("native", "WRITES")}, product(ENGINES, ("WRITES", "READS"))),
)
def test_each_call_that_goes_wrong_is_named_or_mended(engine, kind, artifact, tmp_path):
    done = run_forked(FAILING, artifact, tmp_path, engine, kind, folder=ROOT, preloaded=build())
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert len(lines) == 7
    for one in lines:
        fatal = one["fault"] in FATAL
        expected = "refused, then right" if fatal else "right, then right"
        assert one["came"] == {expected: one["failed"]}, one
        assert one["failed"] > 0
        assert one["misses"] == 0
    assert sum(one["failed"] for one in lines) >= max(one["calls"] for one in lines) > 10
    assert not list(tmp_path.iterdir())


TRAINING = """
import os, signal, sys
from tests.training_models import DECODER, Trained
from tests.runtime.training.spill_plans import spilling_plan
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
import penstock

artifact, folder, engine, kind = sys.argv[1:]
if kind == "named":
    del os.O_TMPFILE
told, telling = os.pipe()
child = os.fork()
if not child:
    os.close(told)
    program = penstock.open(artifact)
    options = LoadRequest(engine=engine, spill=folder)
    with load_module(program, spilling_plan(program.payload), options) as module:
        while True:
            DECODER.loss(module(*DECODER.inputs())).backward()
            os.write(telling, f"{module.stats.bytes_written}\\n".encode())
os.close(telling)
with open(told) as lines:
    steps = [int(lines.readline()) for _ in range(3)]
    os.kill(child, signal.SIGKILL)
    print(steps[-1], os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.random
@pytest.mark.parametrize(
    ("engine", "kind"), sampled([*product(ENGINES, ("unnamed", "named"))], 2 * len(ENGINES) - 1)
)
def test_a_process_that_is_killed_leaves_nothing(engine, kind, artifact, tmp_path):
    done = run_forked(TRAINING, artifact, tmp_path, engine, kind, folder=ROOT)
    assert done.status == 0, done.err
    written, status = map(int, done.out.split())
    assert written > 0, "nothing was written"
    assert status == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def place_for(folder, artifact):
    program = penstock.open(artifact)
    plan = spilling_plan(program.payload)
    open_spill_file(folder, with_places(program.payload.storages, plan, 1))


def test_a_folder_that_is_no_folder_or_cannot_be_written_to(artifact, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    for folder, why in ((tmp_path / "none", "No such file"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(SourceError, match=f"no file of .* can be made in {folder}.*{why}.*load\\(spill="):
            place_for(folder, artifact)
    closed = Path("/proc/self") if os.geteuid() == 0 else tmp_path / "closed"  # root may write to the other
    with pytest.raises(SourceError, match=f"{closed}.*load\\(spill="):
        place_for(closed, artifact)
