"""Runs what the documents tell a reader to type, builds them, and checks what they name."""

import doctest
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from types import FunctionType

import pytest
import torch

import penstock.integrations
from benchmarks.plans import floors
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401
from tests.forked import run_forked
from tests.hunt import nightly_but

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

PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "docs/notes/*.md")
    for path in ROOT.glob(pattern)
)
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
FOLDERS = "passes|schedule|runtime|src|tests|benchmarks|scripts|examples|docs"
MEMBERS = (FunctionType, staticmethod, property, cached_property)
INTERNAL = {"lowered", "kind", "train", "requires_grad_", "load_state_dict"}
"""What these classes have for penstock itself, and what a streamed module refuses."""

NAMED = re.compile(r"^\.\. auto[cef]\w+:: ([\w.]+).*(?:\n   (:members:.*))?", re.MULTILINE)
"""A class or function of the reference, and which members it shows."""

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text())


def run(command, folder):
    environment = os.environ | {"PATH": PATH}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(code, folder, *, warnings="error"):
    """What a script prints, with warnings as errors by default, in a process of its own."""
    done = run_forked(code, folder=folder, warnings=warnings, PATH=PATH)
    assert done.status == 0, done.err
    return done.out


def walk(page, folder, *, shell=False):
    """Python blocks share one session; shell lines that come between them run where they stand.

    With `shell`, the first of them in a shell, as a reader types it.
    """
    lines, run_line = [CALL], "subprocess.run({!r}, shell=True, check=True)" if shell else "call({!r})"
    for language, text in blocks(page):
        if language == "python":
            lines.append(text)
            continue
        for line in text.splitlines():
            lines.append(run_line.format(line))
            run_line = "call({!r})"
    return script("\n".join(lines), folder)


WALKED = {
    "large-models": ["('cuda:0', 'cuda:1') ['cuda:0', 'cuda:0', 'cuda:1', 'cuda:1']"],
    "passes": [
        "['acquire', 'linear', 'release', 'relu', 'acquire', 'linear', 'release']",
        "up.weight is read by linear",
    ],
    "backends": ["steps (5,) read 263,168 bytes: layers.5.weight, layers.5.bias", "0 misses"],
    "quantised": [
        "0.weight ['qdata', 'scale', 'zero_point']",
        "no-scale.safetensors: 3.weight.scale; give the missing shards",
    ],
    "sparse": ["4096 bytes are enough for 16777216"],
    "transformers": ["bytes"],
    "diffusers": ["bytes"],
}
"""Pages whose code is run, and what it prints."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", nightly_but(["backends"], WALKED))
def test_a_page_can_be_walked(page, tmp_path):
    output = walk(f"docs/{page}.md", tmp_path)
    for expected in WALKED[page]:
        assert expected in output
    assert page != "large-models" or (tmp_path / "shards" / "model.safetensors.index.json").exists()


def test_a_backend_can_be_written_in_forty_lines():
    assert len([line for line in blocks("docs/backends.md")[0][1].splitlines() if line]) <= 40


def test_the_tests_that_answer_a_backends_questions_exist():
    text = (ROOT / "docs/backends.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 8
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), name


def test_the_table_of_floors_is_what_its_script_says():
    assert "\n".join(floors.render()) in (ROOT / "docs/backends.md").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_training_can_be_walked(tmp_path):
    output = walk("docs/training.md", tmp_path)
    assert re.findall(r"([\d,]+) bytes kept", output) == ["427,520", "427,520"]


def test_the_example_of_planning_prints_what_the_page_says(tmp_path):
    text = (ROOT / "docs/planning.md").read_text()
    (expected,) = re.findall(r"^It prints:\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (example,) = [code for language, code in blocks("docs/planning.md") if language == "python"]
    assert script(example, tmp_path) == expected


@pytest.mark.nightly
def test_the_export_for_executorch_runs(tmp_path):
    (example,) = [text for language, text in blocks("docs/executorch.md") if language == "python"]
    # Without errors for warnings: ExecuTorch has many.
    output = script(example, tmp_path, warnings="default")
    assert output.splitlines()[-1] == "['up.weight', 'up.bias', 'down.weight', 'down.bias']"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pte", "weights.ptd"]


def test_the_commands_that_answer_questions_exist(penstock):
    rows = re.findall(r"`penstock ([a-z]+) ([^`]*)`", (ROOT / "docs/questions.md").read_text())
    assert {name for name, _ in rows} >= {"plan", "preflight", "simulate", "run", "doctor"}
    for name, arguments in rows:
        known = penstock(name, "--help").out
        for option in re.findall(r"(--?[a-z-]+) ", f"{arguments} "):
            assert option in known, (name, option)


def test_the_first_steps_can_be_walked(tmp_path):
    output = walk("docs/first-steps.md", tmp_path, shell=True)
    assert "below the floor" in output
    assert "reads are marked" in output
    assert (tmp_path / "out.safetensors").exists()


def test_the_readme_example_runs(tmp_path):
    (example,) = [text for language, text in blocks("README.md") if language == "python"]
    output = script(example, tmp_path)
    assert "is the least that can run it" in output


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_and_modules_that_exist(page):
    text = (ROOT / page).read_text()
    for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./*-]*\w", text):
        assert "NAME" in path or list(ROOT.glob(path)), path
    for name in re.findall(r"(?<![\w.-])penstock(?:\.[A-Za-z]\w*)+", text):
        assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text())
    for target, anchor in links:
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE) if anchor else []
        names = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in names, f"{page} links to #{anchor} of {path.name}, which has {names}"


def test_the_table_of_rooms_is_whole():
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE))
    rooms = {
        path.parent
        for name in ("passes", "schedule", "runtime", "native", "src")
        for kind in ("py", "cpp")
        for path in ROOT.glob(f"{name}/**/*.{kind}")
    }
    links = {f"src/penstock/{name}" for name in ("passes", "schedule", "runtime", "native")}
    assert listed == {str(room.relative_to(ROOT)) for room in rooms} - links


def public():
    """What docs/reference names, with the members that it shows, and the files of ExecuTorch."""
    listed = {f"penstock.backends.executorch.{name}": ":members:" for name in ("Exported", "read", "save")}
    for page in (ROOT / "docs/reference").glob("*.rst"):
        for module in page.read_text().split(".. currentmodule:: "):
            for name, members in NAMED.findall(module):
                full = name if name.startswith("penstock.") else f"{module.split()[0]}.{name}"
                listed[full] = members
    found = {name: pkgutil.resolve_name(name) for name in listed}
    for name, members in listed.items():
        for member, value in vars(found[name]).items() if members else ():
            hidden = member[0] == "_" or member in INTERNAL or member not in (members[10:] or member)
            if isinstance(value, MEMBERS) and not hidden:
                found[f"{name}.{member}"] = value
    return found


def test_the_reference_has_everything_public():
    shown = {name.rpartition(".")[2] for name in public()}
    assert shown >= {*penstock.__all__, *penstock.integrations.__all__} - {"__version__"}


def test_what_is_public_says_what_it_takes():
    """A parameter is described under `Args:`, or named in the text."""
    silent = []
    for name, value in public().items():
        text = inspect.getdoc(value) or ""
        parameters = {*inspect.signature(value).parameters} if inspect.isfunction(value) else {"self"}
        patterns = [rf"`{one}`|^ +[*\w, ]*\b{one}\b[*\w, ]*: " for one in parameters - {"self"}]
        if not text or not all(re.search(pattern, text, re.MULTILINE) for pattern in patterns):
            silent.append(name)
    assert not silent


def test_the_examples_of_public_names_print_what_they_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), torch.rand(2, 64)
    exported = torch.export.export(model, (x,))
    program = penstock.compile(exported, "mlp.penstock")
    plan = program.plan("50%", hardware="h200")
    names = globals() | {"model": model, "x": x, "exported": exported, "program": program, "plan": plan}
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    for name, value in public().items():
        runner.run(parser.get_doctest(inspect.getdoc(value) or "", dict(names), name, None, 0))
    assert runner.tries > 20
    assert not runner.failures


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_pages_lead_to_one_another(tmp_path):
    """`make docs` builds them; any warning fails it."""
    command = re.search(r"-m (sphinx .*) build/docs$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command
    run([sys.executable, "-m", *command[1].split(), str(tmp_path)], ROOT)
    first = (tmp_path / "README.html").read_text()
    for page in PAGES:
        assert f'href="{Path(page).with_suffix(".html")}"' in first or page == "README.md", page
    assert "README.html" in (tmp_path / "index.html").read_text()
