"""The scripts that build programs say what is missing, in one sentence."""

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("name", ["build-delegate", "build-run"])
def test_a_python_that_is_missing(name, tmp_path):
    python = tmp_path / "bin/python"
    done = subprocess.run([SCRIPTS / name, python], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{python}, whose ")
    assert line.endswith(" is missing: run make first, or name a Python.")
