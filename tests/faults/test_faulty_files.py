"""Calls on files go wrong, one at a time, in all that penstock does with files.

Some of them in `make test` and `make nightly`, and all in `make faults`: docs/testing.md has what must hold.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.engines import ENGINES, ROOT, built
from tests.faults.double import build
from tests.faults.scenarios import names
from tests.hunt import nightly_but, scaled

ALL = scaled(1) > 1
SOME = (10**6, 1) if ALL else (1, 61)
"""How many of the calls that are alike meet faults, and every which fault is injected."""

NAMES = [one for one in names() if "native" in ENGINES or "native" not in one]

QUICK = frozenset(
    {
        "compile",
        "compile in place",
        "plan",
        "penstock run",
        "apply again",
        "loading contiguous, python",
        "loading mapped, native",
        "running paged, native",
    }
)
"""The scenarios of `make test`; `make nightly` has the others."""

PROGRAMS = {
    "penstock-run": ("run/penstock-run", "build-run"),
    "delegate": ("executorch/run_pte", "build-delegate"),
}
"""What runs in the scenarios whose names begin so, and the script that builds it."""


@pytest.fixture(scope="module")
def inject(tmp_path_factory):
    """Injects faults into the scenario of a name, and returns what came of them."""
    command = [sys.executable, "-m", "tests.faults.injecting", str(tmp_path_factory.mktemp("faults"))]
    path = os.pathsep.join((str(ROOT), *sys.path))
    variables = os.environ | {"PYTHONPATH": path, "LD_PRELOAD": str(build())}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, heard = process.stdin, process.stdout

        def ask(*given):
            told.write(json.dumps(given) + "\n")
            told.flush()
            report = json.loads(heard.readline())
            return report

        yield ask
        told.close()
    assert process.returncode == 0


@pytest.mark.random
@pytest.mark.parametrize("name", nightly_but(QUICK, NAMES))
def test_a_fault_is_absorbed_or_named_and_nothing_is_lost(inject, name):
    if found := PROGRAMS.get(name.partition(",")[0]):
        built(*found)
    report = inject(name, *SOME)
    assert report["problems"] == []
    injected = report["injected"]
    assert sum(injected.values()) == sum(report["came"].values()) > 0
    assert set(report["came"]) <= {"right", "refused", "killed"}
    if ALL:
        assert injected["EIO"] > 0
        assert sum(injected.values()) >= report["sites"]


def test_what_is_written_carelessly_is_caught(inject):
    said = "\n".join(inject("carelessly", 10**6, 1)["problems"])
    assert "kill after at call" in said
    for problem in (
        "the target holds ",
        "it was not absorbed",
        "OSError: [Errno 5] Input/output error",
        ".new.tmp-0 is left",
        "in is lost or changed",
        "after the next call: .new.tmp-0 is left",
    ):
        assert problem in said, problem
