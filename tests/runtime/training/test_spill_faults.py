"""Every write and every read of the spill file goes wrong: a typed error, and the next call is right.

Each call meets one kind of fault here, and every kind in `make soak`. Where a call is interrupted, or moves
less than was asked for, the step goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import penstock
from penstock.runtime.files.spill_file import open_spill_file, with_places
from penstock.runtime.program import Program
from penstock.schedule.facts.errors import SourceError
from tests.engines import ENGINES
from tests.faults.double import build
from tests.hunt import sampled
from tests.runtime.training.spill_plans import spilling_plan
from tests.training_models import DECODER, Trained

ROOT = Path(__file__).parents[3]
FATAL = {"ENOSPC", "EIO", "nothing"}


@pytest.fixture(scope="module")
def artifact(spilling: Callable[[Trained], Program]) -> Path:
    return spilling(DECODER).path


def child(*arguments: object, **environment: str) -> list[str]:
    path = os.pathsep.join((str(ROOT), *sys.path))
    command = [sys.executable, "-m", *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.random
@pytest.mark.parametrize("kind", ["WRITES", "READS"])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_call_that_goes_wrong_is_named_or_mended(
    engine: str, kind: str, artifact: Path, tmp_path: Path
) -> None:
    given = (artifact, tmp_path, engine, kind)
    told = child("tests.runtime.training.spill_faults", *given, LD_PRELOAD=str(build()))
    lines = [json.loads(line) for line in told]
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
import sys
import os
from tests.training_models import DECODER, Trained
from tests.runtime.training.spill_plans import spilling_plan
from penstock.runtime.loading import LoadOptions, load_module
import penstock

if sys.argv[4] == "named":
    del os.O_TMPFILE
program = penstock.open(sys.argv[1])
options = LoadOptions(engine=sys.argv[3], spill=sys.argv[2])
with load_module(program, spilling_plan(program.payload), options) as module:
    for number in range(10**9):
        DECODER.loss(module(*DECODER.inputs())).backward()
        print(number, module.stats.bytes_written, flush=True)
"""


@pytest.mark.random
@pytest.mark.parametrize(
    ("engine", "kind"), sampled([*product(ENGINES, ("unnamed", "named"))], 2 * len(ENGINES) - 1)
)
def test_a_process_that_is_killed_leaves_nothing(
    engine: str, kind: str, artifact: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join((str(ROOT), *sys.path))
    command = [sys.executable, "-c", TRAINING, str(artifact), str(tmp_path), engine, kind]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True
    )
    assert process.stdout is not None
    with process, process.stdout:
        told = [process.stdout.readline().split() for _ in range(3)]
        assert int(told[2][1]) > 0, "nothing was written"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def place_for(folder: Path, artifact: Path) -> None:
    program = penstock.open(artifact)
    plan = spilling_plan(program.payload)
    open_spill_file(folder, with_places(program.payload.storages, plan, 1), plan)


def test_a_folder_that_is_no_folder_or_cannot_be_written_to(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    for folder, why in ((tmp_path / "none", "No such file"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(SourceError, match=f"no file of .* can be made in {folder}.*{why}.*load\\(spill="):
            place_for(folder, artifact)
    closed = Path("/proc/self") if os.geteuid() == 0 else tmp_path / "closed"  # root may write to the other
    with pytest.raises(SourceError, match=f"{closed}.*load\\(spill="):
        place_for(closed, artifact)
