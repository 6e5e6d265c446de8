"""Architectures that nobody chose: a few in each run of the tests, and how the zoo judges them."""

import pytest
import torch
from torch import nn

import penstock
from benchmarks.zoo import random_models as zoo_random
from benchmarks.zoo.random_models import Found, visit
from benchmarks.zoo.visit import first_line, is_listed
from tests.hunt import nightly_but, scaled

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
    assert visit("made", name) == Found("made", name, "equal")


def test_only_refusals_that_the_documents_list_are_right(made, monkeypatch):
    """An error of penstock's that no row of docs/zoo.md has is wrong, as any other error is."""
    raised = penstock.PassError("the moon is full: wait")

    def refuse(*_):
        raise raised

    monkeypatch.setattr(zoo_random, "_applied", refuse)
    assert visit("made", "Doubled").verdict == "wrong"
    raised = penstock.StreamError(
        "make_fx cannot record a streamed module, whose weights come and go while it runs: give make_fx the "
        "model itself"
    )
    assert visit("made", "Doubled").verdict == "refused"
    raised = RuntimeError(str(raised))
    assert visit("made", "Doubled").verdict == "wrong"


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
    for found in zoo_random.sample("transformers", COUNT, SEED, visit):
        assert found.verdict != "wrong", found
        counted += found.verdict != "not counted"
    assert counted == COUNT
