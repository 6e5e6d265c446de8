"""Commands in processes of their own: Ctrl-C ends them, and what computes nothing imports no torch."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import penstock as api

HOOKED = """
import functools, pkgutil, sys
from penstock.cli import main as cli

owner, _, name = sys.argv.pop(1).rpartition(".")
place = pkgutil.resolve_name(owner)
real = getattr(place, name)

@functools.wraps(real)
def announced(*args, **kwargs):
    print("begun", file=sys.__stdout__, flush=True)
    LONG
    return real(*args, **kwargs)

setattr(place, name, announced)
sys.argv[0] = "penstock"
cli.main()
"""
"""Runs the command line, and says on stdout when a function of it begins."""

IMPORTING = """
import sys, time

class Slow:
    def find_spec(name, path=None, target=None):
        if name == "typer":
            print("begun", flush=True)
            time.sleep(1000)

sys.meta_path.insert(0, Slow)
from penstock.cli.main import main
main()
"""
"""Runs the command line, and takes its time to import the first library that it needs."""

UNINTERRUPTIBLE = "import torch; torch.mm(torch.ones(4096, 4096), torch.ones(4096, 4096))"
"""One call of a library, which returns to Python after about a second or more."""


def interrupted(folder, place, *arguments, long=""):
    """Interrupts a command when it enters `place`: seconds to its words and to its end, and the words."""
    return stopped(folder, [HOOKED.replace("LONG", long), place, *arguments])


def stopped(folder, code):
    """Interrupts a process that has begun: seconds to its words and to its end, and the words."""
    command = [sys.executable, "-c", *code]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        began = time.perf_counter()
        said = first_line(process.stderr)
        answered = time.perf_counter() - began
        rest, errors = process.communicate()
        ended = time.perf_counter() - began
        assert (process.returncode, rest) == (130, "")
    return answered, ended, said + errors


def first_line(stream):
    """The first line that is the command's word and not its log."""
    said = ""
    for line in stream:
        said += line
        if "writing" not in line:
            break
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported program, its artifact, and a function that makes the model."""
    folder = tmp_path_factory.mktemp("interrupts")
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    exported = torch.export.export(model, (torch.randn(2, 512),))
    torch.export.save(exported, folder / "model.pt2")
    api.compile(exported, folder / "model.penstock")
    (folder / "factory_of_interrupts.py").write_text(
        "import torch\n"
        "def build():\n"
        "    layers = [torch.nn.Linear(512, 512) for _ in range(6)]\n"
        "    return torch.nn.Sequential(*layers), (torch.zeros(1, 512),)\n"
    )
    return folder


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("penstock.runtime.artifact.write_packed", ("compile", "--trust", "model.pt2", "new.penstock")),
        pytest.param(
            "penstock.runtime.planning.make_plan",
            ("plan", "model.penstock", "--budget", "50%", "--report", "plan.html"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "penstock.runtime.module.StreamedModule.call",
            ("run", "model.penstock", "--budget", "50%", "--output", "out.safetensors"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "penstock.passes.building.fake_export.Built.export",
            ("preflight", "factory_of_interrupts:build", "--hardware", "t4", "--report", "plan.html"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_command_says_that_it_stops_and_leaves_nothing(folder, place, arguments):
    before = {path.name for path in folder.iterdir()}
    _, _, said = interrupted(folder, place, *arguments)
    assert said.endswith("penstock: stopping ...\n")
    assert "Traceback" not in said
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before - {"__pycache__"}


def test_a_command_that_is_still_importing_says_so_too(tmp_path):
    _, _, said = stopped(tmp_path, [IMPORTING, "hardware"])
    assert said == "penstock: stopping ...\n"


def test_the_word_does_not_wait_for_a_library_that_is_busy(folder):
    arguments = ("inspect", "model.penstock", "--json")
    answered, ended, said = interrupted(
        folder, "penstock.runtime.program.read_program", *arguments, long=UNINTERRUPTIBLE
    )
    assert said == "penstock: stopping ...\n"
    assert answered < ended / 2


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
        ("doctor other", "other is neither a file that exists nor module:function nor a model in the "),
        (
            "preflight other --hardware h200",
            "other is neither a file that exists nor module:function nor a model in the ",
        ),
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
