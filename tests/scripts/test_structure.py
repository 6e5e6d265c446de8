"""The check of imports finds circles, wrong directions and crowds, and nothing where there are none."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "structure.py"


def check(package):
    """Exit status and output of the check of one package."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(package)], capture_output=True, text=True, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout


def found(package):
    """What the check of a package says that finds something."""
    status, output = check(package)
    assert status == 1
    return output


@pytest.fixture
def package(tmp_path):
    """A package in order: `runtime` uses `schedule`, and a circle exists for type checkers only."""
    write(tmp_path, "__init__", '"""All of it."""')
    for room in ("schedule", "runtime", "passes"):
        write(tmp_path, f"{room}/__init__", f'"""The {room}."""')
    write(tmp_path, "schedule/plan", "X = 1\n")
    write(tmp_path, "runtime/run", "from penstock.schedule.plan import X\n")
    write(
        tmp_path,
        "schedule/typed",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock.runtime.run import X\n",
    )
    return tmp_path / "penstock"


def write(root, module, text):
    path = root / "penstock" / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_nothing_is_found_in_a_package_in_order(package):
    assert check(package) == (0, "structure: 7 modules, 0 findings\n")


@pytest.mark.parametrize(
    "back",
    [
        "from penstock.schedule import typed\n",
        "import penstock.schedule.typed\n",
        "def late():\n    from penstock.schedule.typed import Y\n",
        "def late():\n    if True:\n        import penstock.schedule.typed\n",
        "if not TYPE_CHECKING:\n    import penstock.schedule.typed\n",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import penstock.schedule.typed\n",
    ],
)
def test_a_circle_is_found_wherever_its_imports_stand(package, back):
    write(package.parent, "schedule/typed", "from penstock.schedule.plan import X\n")
    write(package.parent, "schedule/plan", back)
    assert "2 modules import one another in a circle" in found(package)


def test_an_import_against_the_flow_is_found(package):
    write(package.parent, "passes/trace", "def f():\n    from penstock.runtime.run import X\n")
    assert "passes may not import runtime.run" in found(package)


@pytest.mark.parametrize("line", ["from .. import planner", "from ..planner import floor", "from . import x"])
def test_a_relative_import_is_found(package, line):
    write(package.parent, "schedule/plan", f"def late():\n    {line}\n")
    assert "plan.py:2: relative import of ." in found(package)


@pytest.mark.parametrize("line", ["import torch", "from torch import fx", "import torch.nn"])
def test_torch_is_found_where_it_may_not_be(package, line):
    write(package.parent, "runtime/run", f"{line}\n")
    assert check(package)[0] == 0
    write(package.parent, "schedule/plan", f"{line}\n")
    assert "plan.py:1: schedule may not import torch" in found(package)


def test_a_crowd_and_a_folder_without_a_purpose_are_found(package):
    for number in range(15):
        write(package.parent, f"runtime/arena/kind{number}", "")
    output = found(package)
    assert "15 files side by side" in output
    assert "no __init__.py that says" in output


def test_rooms_of_capabilities_and_libraries_are_shut_also_for_types(package):
    line = "if TYPE_CHECKING:\n    from penstock.runtime.sparse import units\n"
    write(package.parent, "runtime/registered", line)
    assert check(package)[0] == 0
    write(package.parent, "runtime/run", f"{line}    import transformers\n")
    output = found(package)
    assert "run.py:2: only passes.annotate and runtime.registered may import runtime.sparse.units" in output
    assert "run.py:3: only cli.generate, integrations, models may import transformers" in output
