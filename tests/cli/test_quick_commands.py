"""Commands that compute nothing answer at once: they import neither torch nor what plans are made with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from penstock.cli.main import main
sys.argv = ["penstock", *sys.argv[1:]]
try:
    main()
except SystemExit as done:
    heavy = [name for name in ("torch", "scipy", "transformers") if name in sys.modules]
    sys.exit(f"{done.code}, with {heavy}" if done.code or heavy else 0)
"""


@pytest.mark.parametrize("command", ["--help", "plan --help", "cache list", "hardware"])
def test_no_torch_is_imported(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *command.split()],
        env={"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
