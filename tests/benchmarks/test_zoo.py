"""Models of transformers and diffusers run streamed from their own checkpoints, or it is said why not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.zoo.__main__ import ENTRIES, main, render, works
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.visit import CLOSE, visit
from tests.benchmarks.in_process import invoke
from tests.engines import COMPILER
from tests.hunt import nightly_but

RENAMED = {"Qwen3-MoE", "Mixtral", "DeepSeek-V3", "ViT", "AutoencoderKL decode"}
COMPILED = {"Llama"} if COMPILER else set()
pytestmark = pytest.mark.timeout(300)


ROUNDS_AS_EAGER = Version(torch.__version__) >= Version("2.13")
"""Whether `OPTIONS` of the zoo round bfloat16 inside kernels for a CPU; those of torch 2.12 do not."""


NAMES = [entry.name for entry in ENTRIES]


@pytest.mark.parametrize("name", nightly_but(["T5", "ViT", "Qwen3-MoE"], NAMES))
def test_models_stream_bit_for_bit_from_the_checkpoint_of_their_library(name):
    entry = ENTRIES[NAMES.index(name)]
    compiled = entry.name in COMPILED
    row = visit(entry, ["eager", "inductor"] if compiled else ["eager"])

    assert works(row), row
    assert row.runs["eager"].from_library == 0
    for run in row.runs.values():
        floor, half = run.streamed
        assert run.floor_bytes == floor.budget <= half.budget < row.weight_bytes
        assert floor.bytes_moved > 0
    if compiled:  # where rounding depends on where kernels end, one kernel more or less shows
        allowed = 0 if ROUNDS_AS_EAGER else CLOSE
        assert row.runs["inductor"].from_alone <= allowed, "AOTInductor by itself computes something else"
    assert (row.bound == "renamed") == (entry.name in RENAMED)


def write(model, folder):
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")


def read(model, folder):
    loaded = layers()
    loaded.load_state_dict(load_file(folder / "model.safetensors"))
    return loaded


def layers():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


TOY = Entry("toy", layers, {"input": torch.ones(1, 64)}, write=write, load=read)


def test_other_values_are_seen():
    def read_other(model, folder):
        loaded: Any = read(model, folder)
        with torch.no_grad():
            loaded[3].bias[5] += 1e-6
        return loaded

    row = visit(replace(TOY, load=read_other), ["eager"])
    assert not works(row)
    assert [one.equal for one in row.runs["eager"].streamed] == [False, False]
    assert "| **other bits** | not run |" in render([row])


def test_the_command_writes_a_table(tmp_path):
    document = tmp_path / "zoo.md"
    document.write_text("before\n<!-- benchmarks.zoo writes from here -->\n<!-- to here -->\nafter\n")
    done = invoke(main, "--only", "ViT", "--lowering", "eager", "--docs", str(document))

    assert done.exit_code == 0, done.output
    assert "1 of 1 models work" in document.read_text()
    assert "| ViT | 331.00 KiB | renamed |" in document.read_text()
    assert "| bit-equal | not run |" in document.read_text()
