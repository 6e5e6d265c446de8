"""What streams and compiles here: tests over both engines take the native one where it is built.

The fixtures `native` and `compiler` in conftest.py are for tests that need the one or the other.
tests/native/test_library.py fails where the native engine is missing although there is a compiler.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.native.library import library

ENGINES = ("python",) if library() is None else ("python", "native")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
"""What builds the native engine, and what Inductor compiles with."""

ROOT = Path(__file__).parents[1]


def built(program, script):
    """A program under `build`, made by a script from the sources as they are; `make` has made it before.

    Skips the test where what builds it is missing.
    """
    subprocess.run([ROOT / "scripts" / script, sys.executable], check=True)
    path = ROOT / "build" / program
    if not path.exists():
        pytest.skip(f"{path.name} is not built: scripts/install-compiler installs what builds it")
    return path
