"""Lines about work that takes long, at thresholds that are over at once, or never."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock
from penstock.cli.terminal.console import byte_progress, spinner
from penstock.runtime.system.announcing import VARIABLE, announced


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")


def lines(capsys):
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.splitlines()


def test_long_work_has_a_line_when_it_begins_and_one_when_it_ends(at_once, capsys):
    with announced("counting sheep"):
        assert lines(capsys) == ["penstock: counting sheep ..."]
        with announced("a part of that"):
            pass
    (line,) = lines(capsys)
    assert line.startswith("penstock: counting sheep took ")


@pytest.mark.parametrize("shown", [spinner, byte_progress])
def test_a_terminal_that_shows_work_has_no_line_of_it(shown, at_once, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
    with shown("counting sheep"), announced("a part of that"):
        pass
    err = capsys.readouterr().err
    assert "counting sheep" in err
    assert "penstock: " not in err


def test_the_line_comes_while_work_goes_on(monkeypatch, tmp_path):
    """Work that waits for its own line ends only if the line comes from beside it."""
    monkeypatch.setenv(VARIABLE, "0.001")
    said = tmp_path / "said"
    with said.open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with announced("waiting"):
            while not said.read_text():
                pass
    assert len(said.read_text().splitlines()) == 2


@pytest.mark.parametrize("after", ["3600", "inf"])
def test_short_work_says_nothing_nor_does_any_that_is_asked_not_to(monkeypatch, capsys, after):
    monkeypatch.setenv(VARIABLE, after)
    with announced("counting sheep"):
        pass
    assert lines(capsys) == []


def test_work_that_fails_ends_with_its_line_too(at_once, capsys):
    def fail():
        with announced("counting sheep"):
            raise KeyError("sheep")

    for _ in "twice":
        with pytest.raises(KeyError):
            fail()
        assert len(lines(capsys)) == 2


def test_compiling_planning_and_converting_are_announced(at_once, capsys, tmp_path):
    layer = torch.nn.Linear(64, 64).eval()
    exported = torch.export.export(layer, (torch.zeros(1, 64),))
    program = penstock.compile(exported, tmp_path / "layer.penstock")
    program.plan("100%")
    said = lines(capsys)
    assert said[0] == f"penstock: compiling {tmp_path / 'layer.penstock'} ..."
    assert said[2] == "penstock: planning ..."
    assert len(said) == 4


def test_a_command_without_a_terminal_says_so_on_stderr_alone(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(8, 8)}, tmp_path / "in.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "convert", "in.safetensors", "-o", "out.safetensors"],
        cwd=tmp_path,
        env=os.environ | {VARIABLE: "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_, last = [line for line in done.stderr.splitlines() if "out.safetensors" in line]
    assert first == "penstock: writing out.safetensors ..."
    assert last.startswith("penstock: writing out.safetensors took ")
    assert "penstock:" not in done.stdout
    assert Path(tmp_path, "out.safetensors").exists()
