"""What commands print fits the terminal: in 80 columns no line is longer, and no value is broken."""

import re

import pytest
import torch
from torch import nn

import penstock as library
from penstock.cli.terminal import console
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401

FACTORY = """
import torch
def build():
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    return torch.nn.Sequential(*layers), (torch.zeros(1, 512),)
"""


class Deep(nn.Module):
    """Weights with the names of a transformers model."""

    def __init__(self):
        super().__init__()
        layer = {
            name: nn.Linear(512, 512) for name in ("self_attention_query_projection", "output_projection")
        }
        self.model = nn.ModuleDict({"decoder_layers": nn.ModuleList(nn.ModuleDict(layer) for _ in range(1))})

    def forward(self, hidden_states, position_embeddings):
        for layer in self.model["decoder_layers"]:
            for part in layer.values():
                hidden_states = part(hidden_states) + position_embeddings
        return hidden_states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    batch = torch.export.Dim("batch", min=2, max=64)
    sizes = ({0: batch}, {0: batch})
    exported = torch.export.export(Deep(), (torch.randn(4, 512), torch.randn(4, 512)), dynamic_shapes=sizes)
    library.compile(exported, folder / "model.penstock")
    (folder / "factory_of_columns.py").write_text(FACTORY)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "plan model.penstock --budget 60% --hardware rtx4090 --sweep --compare",
        "inspect model.penstock",
        "simulate model.penstock --budget 60% --hardware t4",
        "preflight factory_of_columns:build --hardware h200 --hardware rtx4090 --budget 50% --budget 1KiB",
        "doctor factory_of_columns:build",
        "run model.penstock --budget 60%",
        "verify model.penstock",
        "hardware",
    ],
)
def test_no_line_is_longer_and_no_value_is_broken(folder, penstock, monkeypatch, tmp_path, command):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where other tests' long paths are not remembered
    monkeypatch.setenv("COLUMNS", "80")
    done = penstock(*command.split())
    assert done.out, done.err
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    for line in lines:  # a line that begins with a unit was broken behind its number
        assert not re.match(r"\W*(?:[KMGT]iB|B|ms|us|ns|s)\b", line), done.out
    if "--sweep" in command:  # rich would break the words of headings
        words = done.out.split("Seconds a pass by budget")[1].split()
        assert {"everything", "recently", "demand"} <= set(words), done.out


def test_names_break_at_dots_and_numbers_stay_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    name = "model.layers.0.self_attention.query_projection.weight"
    console.print_table("A title that is longer than the table", ("weight", "bytes"), [[name, "16.00 MiB"]])
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[3:] if line.strip()] == [
        "model.layers.0.self_attention.",
        "query_projection.weight",
    ]
    assert "16.00 MiB" in text
    assert "A title that is longer than the table" in text
