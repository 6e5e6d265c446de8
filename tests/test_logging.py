"""Who hears what the library logs: nobody unless PENSTOCK_LOG or the program asks; commands print it."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import penstock as library
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401

LOGS = """
import logging, penstock
logging.getLogger("penstock.runtime.artifact").debug("small")
logging.getLogger("penstock.runtime.artifact").info("large")
logging.getLogger("penstock.integrations.applied").warning("odd")
"""
LARGE, ODD = "penstock.runtime.artifact: large", "penstock.integrations.applied: odd"


def heard(level, code=LOGS):
    """The lines that a fresh interpreter writes to stderr; nothing may go to stdout."""
    environment = {key: value for key, value in os.environ.items() if key != "PENSTOCK_LOG"}
    environment |= {} if level is None else {"PENSTOCK_LOG": level}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (None, []),
        ("", []),
        ("warning", [ODD]),
        ("info", [LARGE, ODD]),
        ("INFO", [LARGE, ODD]),
        ("debug", ["penstock.runtime.artifact: small", LARGE, ODD]),
        ("loud", ["penstock: PENSTOCK_LOG=loud is no level: give debug, info, warning", ODD]),
    ],
)
def test_the_variable_chooses_what_is_printed(level, lines):
    assert heard(level) == lines


def test_a_program_hears_it_by_its_own_handlers_as_well():
    assert heard(None, "import logging\nlogging.basicConfig(level='INFO', format='%(message)s')" + LOGS) == [
        "large",
        "odd",
    ]


def test_what_the_variable_prints_is_not_printed_again_by_handlers_of_the_root():
    code = "import logging\nlogging.basicConfig(level='INFO', format='%(message)s')" + LOGS
    assert heard("info", code) == [LARGE, ODD]


def test_compile_names_the_artifact_that_it_writes(tmp_path, said):
    program = torch.export.export(torch.nn.Linear(8, 8), (torch.ones(1, 8),))
    library.compile(program, tmp_path / "model.penstock")
    assert said() == f"writing 288 bytes of weights to {tmp_path}/model.penstock"


def test_a_command_prints_the_bytes_that_it_writes_and_leaves_the_log_as_it_was(
    tmp_path, penstock, monkeypatch
):
    save_file({"weight": torch.ones(300)}, tmp_path / "model.safetensors")
    for number in (1, 2):
        done = penstock("convert", tmp_path / "model.safetensors", "-o", tmp_path / f"{number}.safetensors")
        assert done.status == 0
        said = f"penstock: writing 1,200 bytes of tensors to {tmp_path}/{number}.safetensors"
        assert done.err.splitlines() == [said]
    monkeypatch.setenv("PENSTOCK_LOG", "info")  # whose handler would print it, had it been set at the start
    done = penstock("convert", tmp_path / "model.safetensors", "-o", tmp_path / "3.safetensors")
    assert (done.status, done.err) == (0, "")
