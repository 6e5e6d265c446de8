"""Runs what the documents tell a reader to type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import Command, penstock_fixture  # noqa: F401

ROOT = Path(__file__).parents[1]
CALL = """
import shlex, subprocess, sys
from penstock.cli import main as cli

def call(line):
    sys.argv = shlex.split(line)
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, line
"""
"""What runs a command of penstock where torch is imported already, which takes seconds."""

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / page).read_text())


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def walk(page: str, folder: Path) -> str:
    """Python blocks share one session; shell lines that come between them run where they stand.

    The first of them in a shell, as a reader types it.
    """
    script, run_line = [CALL], "subprocess.run({!r}, shell=True, check=True)"
    for language, text in blocks(page):
        if language == "python":
            script.append(text)
            continue
        for line in text.splitlines():
            script.append(run_line.format(line))
            run_line = "call({!r})"
    (folder / "walk.py").write_text("\n".join(script))
    return run([sys.executable, "-W", "error", "walk.py"], folder)


@pytest.mark.timeout(300)
def test_large_models_can_be_walked(tmp_path: Path) -> None:
    output = walk("docs/large-models.md", tmp_path)
    assert "('cuda:0', 'cuda:1') ['cuda:0', 'cuda:0', 'cuda:1', 'cuda:1']" in output
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()


@pytest.mark.timeout(300)
def test_quantised_weights_can_be_walked(tmp_path: Path) -> None:
    output = walk("docs/quantised.md", tmp_path)
    assert "0.weight ['qdata', 'scale', 'zero_point']" in output
    assert "no-scale.safetensors: 3.weight.scale; give the missing shards" in output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_what_is_said_of_a_library_can_be_walked(library: str, tmp_path: Path) -> None:
    output = walk(f"docs/{library}.md", tmp_path)
    assert "bytes" in output


def test_the_commands_that_answer_questions_exist(penstock: Command) -> None:
    rows = re.findall(r"`penstock ([a-z]+) ([^`]*)`", (ROOT / "docs/questions.md").read_text())
    assert {name for name, _ in rows} >= {"plan", "preflight", "simulate", "run", "doctor"}
    for name, arguments in rows:
        known = penstock(name, "--help").out
        for option in re.findall(r"(--?[a-z-]+) ", f"{arguments} "):
            assert option in known, (name, option)


@pytest.mark.timeout(300)
def test_the_first_steps_can_be_walked(tmp_path: Path) -> None:
    output = walk("docs/first-steps.md", tmp_path)
    assert "below the floor" in output
    assert "reads are marked" in output
    assert (tmp_path / "out.safetensors").exists()


@pytest.mark.timeout(300)
def test_the_readme_example_runs(tmp_path: Path) -> None:
    (example,) = [text for language, text in blocks("README.md") if language == "python"]
    (tmp_path / "example.py").write_text(example)
    output = run([sys.executable, "-W", "error", "example.py"], tmp_path)
    assert "is the least that can run it" in output


def test_the_readme_names_files_that_exist() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows
    for row in rows:
        first, *others = re.findall(r"`([^`]+)`", row)
        folder = first.rpartition("/")[0]
        for path in [first, *(f"{folder}/{name}" for name in others)]:
            assert list(ROOT.glob(path)), path


def test_links_between_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
