"""Programs that the command line is given: loaded where they can be, refused in one line where not."""

from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.cli.terminal.options import check_outputs, load_exported
from penstock.schedule.facts.errors import SourceError
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401
from tests.forked import run_forked

COMMANDS = """
import os, sys, torch
from penstock.cli import main as cli

for given in ("compile --trust model.pt2 model.penstock", "run model.penstock --budget 100%"):
    child = os.fork()
    if not child:
        sys.argv = ["penstock", *given.split()]
        cli.main()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, given
    assert "transformers" not in sys.modules
"""
"""Commands in processes of their own, each forked from one that has imported torch."""


def test_a_program_whose_outputs_are_of_a_library_is_compiled_and_run_without_importing_it(tmp_path):
    from transformers.modeling_outputs import BaseModelOutput

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return BaseModelOutput(last_hidden_state=self.layer(x))

    torch.export.save(torch.export.export(Model(), (torch.zeros(1, 4),)), tmp_path / "model.pt2")
    done = run_forked(COMMANDS, folder=tmp_path, warnings="default")
    assert done.status == 0, done.err
    assert "Traceback" not in done.err
    assert "last_hidden_state" in done.out


def test_what_is_no_program_is_refused_without_the_log_of_torch(tmp_path, penstock):
    (tmp_path / "model.pt2").write_text("{}")
    done = penstock("compile", "--trust", tmp_path / "model.pt2", tmp_path / "model.penstock")
    assert done.status == 2
    assert done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--arena mappd", "there is no arena 'mappd': choose mapped, pooled, contiguous or paged"),
        ("--engine c", "there is no engine 'c': choose auto, native or python"),
        ("--device gpu", "there is no device 'gpu': choose 'cpu', 'cuda'"),
        ("--device sim:rtx", "there is no hardware 'rtx': give one of"),
    ],
)
def test_names_are_checked_before_an_artifact_is_opened(tmp_path, penstock, option, sentence):
    done = penstock("run", tmp_path / "none.penstock", "--budget", "50%", *option.split())
    assert done.status == 2
    assert done.err.startswith(f"penstock: {sentence}")


@pytest.mark.parametrize("look", ["is_dir", "exists", "is_file"])
def test_a_path_that_the_system_does_not_look_at_is_an_error_of_penstock(look, tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(5, "Input/output error", str(path))

    path = tmp_path / "out.pt2"
    check = partial(load_exported, trust=True) if look == "is_file" else partial(check_outputs, force=False)
    with monkeypatch.context() as patch:
        patch.setattr(Path, look, refuse)
        with pytest.raises(SourceError, match=r"out\.pt2 .*Input/output error"):
            check(path)
