"""Models run streamed from their own checkpoints, chosen and drawn ones, or it is said why not."""

import json
from dataclasses import replace

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

import penstock
from benchmarks.zoo import random_models as zoo_random
from benchmarks.zoo.__main__ import ENTRIES, main, render, works
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.random_models import Found
from benchmarks.zoo.visit import CLOSE, first_line, is_listed, visit
from tests.benchmarks.in_process import invoke
from tests.engines import COMPILER
from tests.hunt import nightly_but, scaled

RENAMED = {"Qwen3-MoE", "Mixtral", "DeepSeek-V3", "ViT", "AutoencoderKL decode"}
COMPILED = {"Llama"} if COMPILER else set()
pytestmark = pytest.mark.timeout(300)


ROUNDS_AS_EAGER = Version(torch.__version__) >= Version("2.13")
"""Whether `OPTIONS` of the zoo round bfloat16 inside kernels for a CPU; those of torch 2.12 do not."""


NAMES = [entry.name for entry in ENTRIES]


@pytest.mark.parametrize("name", nightly_but(["T5", "Qwen3-MoE"], NAMES))
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
        loaded = read(model, folder)
        with torch.no_grad():
            loaded[3].bias[5] += 1e-6
        return loaded

    row = visit(replace(TOY, load=read_other), ["eager"])
    assert not works(row)
    assert [one.equal for one in row.runs["eager"].streamed] == [False, False]
    assert "| **other bits** | not run |" in render([row])


def test_the_command_writes_a_table_and_figures(tmp_path):
    document = tmp_path / "zoo.md"
    document.write_text("before\n<!-- benchmarks.zoo writes from here -->\n<!-- to here -->\nafter\n")
    paths = ["--json", str(tmp_path / "zoo.json"), "--docs", str(document)]

    done = invoke(main, "--only", "ViT", "--lowering", "eager", *paths)

    assert done.exit_code == 0, done.output
    assert "1 of 1 models work" in document.read_text()
    assert "| ViT | 331.00 KiB | renamed |" in document.read_text()
    (row,) = json.loads((tmp_path / "zoo.json").read_text())["rows"]
    assert [one["equal"] for one in row["runs"]["eager"]["streamed"]] == [True, True]


SEED, COUNT = 1909, scaled(1)


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * 2


class Undecided(Doubled):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -x


class Remembering(Doubled):
    def forward(self, x):
        self.seen = x.sum()
        return super().forward(x)


@pytest.fixture
def made(monkeypatch):
    """A library of the modules above."""

    def make(name):
        torch.manual_seed(0)
        return globals()[name]().eval().requires_grad_(False)

    monkeypatch.setitem(zoo_random.LIBRARIES, "made", (make, lambda _: {"x": torch.zeros(1, 4)}))


@pytest.mark.parametrize("name", nightly_but(["Undecided"], ["Doubled", "Undecided", "Remembering"]))
def test_whatever_runs_in_memory_is_equal(made, name):
    assert zoo_random.visit("made", name) == Found("made", name, "equal")


def test_only_refusals_that_the_documents_list_are_right(made, monkeypatch):
    """An error of penstock's that no row of docs/zoo.md has is wrong, as any other error is."""
    raised = penstock.PassError("the moon is full: wait")

    def refuse(*_):
        raise raised

    monkeypatch.setattr(zoo_random, "_applied", refuse)
    assert zoo_random.visit("made", "Doubled").verdict == "wrong"
    raised = penstock.StreamError(
        "make_fx cannot record a streamed module, whose weights come and go while it runs: give make_fx the "
        "model itself"
    )
    assert zoo_random.visit("made", "Doubled").verdict == "refused"
    raised = RuntimeError(str(raised))
    assert zoo_random.visit("made", "Doubled").verdict == "wrong"


def test_a_budget_below_the_floor_is_listed(tmp_path):
    program = penstock.compile(torch.export.export(Doubled().eval(), (torch.zeros(1, 4),)), tmp_path / "m")
    with pytest.raises(penstock.BudgetError) as caught:
        program.load(program.floor_bytes - 1)
    assert is_listed(first_line(caught.value, tmp_path))
    assert is_listed(
        "PassError: the model calls torch.random.fork_rng in its forward, which torch.export drops"
    )
    assert not is_listed("BudgetError: the budget of 3 B is odd")
    assert not is_listed("ValueError: the budget of 3 B is below the floor of 4 B: give at least 4 bytes")


@pytest.mark.nightly
@pytest.mark.random
def test_a_few_architectures_of_a_seed_are_equal_or_refused():
    print(f"seed {SEED}")
    counted = 0
    for found in zoo_random.sample("transformers", COUNT, SEED, zoo_random.visit):
        assert found.verdict != "wrong", found
        counted += found.verdict != "not counted"
    assert counted == COUNT
