"""A terminal shows which call is prepared; whatever is no terminal shows nothing."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from penstock.integrations import apply, load
from penstock.integrations.progress import shown
from tests.integrations import models


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """Makes stderr a terminal. A test calls it, because pytest captures stderr anew before each."""

    def make():
        monkeypatch.delenv("PENSTOCK_LOG", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        written = Terminal()
        monkeypatch.setattr("sys.stderr", written)
        return written

    return make


def test_prompt_and_one_token_are_shown(open_terminal, tmp_path):
    models.llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    terminal = open_terminal()
    load(tmp_path / "model", "400KB", cache=tmp_path / "cache")
    said = terminal.getvalue()
    assert "LlamaForCausalLM: prompt" in said
    assert "LlamaForCausalLM: one token" in said
    before = len(said)
    load(tmp_path / "model", "400KB", cache=tmp_path / "cache")
    assert "preparing" not in terminal.getvalue()[before:]  # what is kept takes no time


def test_other_calls_are_shown_by_their_method_and_arguments(open_terminal, tmp_path):
    terminal = open_terminal()
    apply(nn.Sequential(nn.Linear(4, 4)), "1MB", example=torch.ones(2, 4), cache=tmp_path).restore()
    assert "forward of input [2, 4]" in terminal.getvalue()


def test_logs_and_files_show_nothing(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setenv("PENSTOCK_LOG", "info")
    with shown("this"):
        pass
    monkeypatch.delenv("PENSTOCK_LOG")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with shown("this"):
        pass
    assert not terminal.getvalue()
