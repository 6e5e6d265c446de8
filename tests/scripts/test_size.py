"""What `scripts/size.py` counts, and that it fails above a limit."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "size.py"
FILES = {
    "runtime/__init__.py": '"""A room."""\n',
    "runtime/reader.py": '''"""Reads."""

import penstock.schedule
from penstock.schedule import plan


def read(one, path=plan.X):
    """A comment and a docstring are no code."""
    found = [item for item in path]  # twice vague, and once as a parameter
    return found
''',
    "schedule/__init__.py": "",
    "schedule/plan.py": "X = 1\n",
    "tests/test_plan.py": "def test():\n    assert 1\n",
    "README.md": "Two words.\n",
}
EXPECTED = {
    "modules": 2,
    "product lines": 12,
    "imports": 1,
    "vague names": 3,
    "test lines": 2,
    "tool lines": 0,
    "page words": 2,
    "note words": 0,
}


@pytest.fixture
def tree(tmp_path):
    """A repository with a copy of the script, whose limits are `limits`."""

    def count(limits):
        for name, text in {**FILES, "scripts/size.toml": limits}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        script = tmp_path / "scripts" / "size.py"
        script.write_bytes(SCRIPT.read_bytes())
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", *FILES], cwd=tmp_path, check=True)
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)

    return count


def limits_of(**changed):
    names = [*EXPECTED, "product tokens", "test tokens"]
    return 'vague = ["one", "found", "item"]\n[limits]\n' + "".join(
        f'"{name}" = {changed.get(name.replace(" ", "_"), 99)}\n' for name in names
    )


def test_every_figure(tree):
    done = tree(limits_of())
    assert done.returncode == 0, done.stderr
    counted = {line[:20].strip(): int(line[20:29]) for line in done.stdout.splitlines()}
    assert {name: counted[name] for name in EXPECTED} == EXPECTED
    assert counted["product tokens"] == sum(
        (4, 6, 12, 9, 2, 3)  # by line: two imports, the head of `read` and its two lines, X
    )


def test_what_grows_above_its_limit_fails(tree):
    done = tree(limits_of(vague_names=2))
    assert done.returncode == 1
    assert [line.split("  ")[0] for line in done.stdout.splitlines() if "too large" in line] == [
        "vague names"
    ]
