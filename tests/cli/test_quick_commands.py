"""Commands that compute nothing, or are refused, answer at once.

They import neither torch nor what plans are made with.
"""

import subprocess
import sys

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


def run(command, folder):
    return subprocess.run(
        [sys.executable, "-c", CODE, *command.split()],
        cwd=folder,
        env={"XDG_CACHE_HOME": str(folder), "PYTHONPATH": ":".join(sys.path)},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("command", ["--help", "plan --help", "generate --help", "cache list", "hardware"])
def test_no_torch_is_imported(command, tmp_path):
    done = run(command, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_package_is_the_command_line(tmp_path):
    command = [sys.executable, "-m", "penstock", "plan", "none", "--budget", "50%"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: none is not an artifact: there is no such folder; ")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("plan other.penstock --budget 50%", "other.penstock is not an artifact: there is no such folder; "),
        ("run empty --budget 50%", "empty is not an artifact: it has no payload.json; "),
        ("simulate empty --budget 50% --hardware h200", "empty is not an artifact: it has no payload.json; "),
        ("relink empty", "empty is not an artifact: it has no payload.json; "),
        ("verify payload.json", "payload.json is not an artifact: it is a file; "),
        ("generate other", "there is nothing to say: give --prompt TEXT, or --chat for a conversation"),
        ("generate ./other --prompt a", "there is no folder ./other: give a model's folder, or its name on "),
        ("generate empty --prompt a", "empty holds no model: give the folder that has config.json or "),
        ("inspect empty", "empty is not an artifact: it has no payload.json; "),
        ("replay other --artifact empty", "empty is not an artifact: it has no payload.json; "),
        ("doctor other", "other is neither a file that exists nor module:function: "),
        ("preflight other --hardware h200", "other is neither a file that exists nor module:function: "),
        ("compile other artifact", "other is not a file or folder that exists: give a program "),
        ("compile other artifact --lowering jit", "there is no lowering 'jit': choose eager or inductor"),
        ("convert full -o out --dtype int8", "there is no dtype 'int8': choose bfloat16, float16 or float32"),
        ("convert full other", "other is not a file or folder that exists: "),
        (
            "convert full -o out --merge other",
            "other/adapter_config.json is not a file or folder that exists: ",
        ),
        ("compile other full", "full exists; choose another output, or overwrite it with --force"),
        ("compile other full --force", "full is not an artifact and will not be overwritten; "),
    ],
)
def test_no_torch_is_imported_to_refuse(command, sentence, tmp_path):
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    for path in (tmp_path / "payload.json", tmp_path / "full/notes.txt"):
        path.touch()
    done = run(command, tmp_path)
    assert sentence in done.stderr
    assert done.stderr.endswith("\n2, with []\n")
