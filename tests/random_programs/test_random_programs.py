"""Random programs in which every kind appears, and how the generator judges what goes wrong."""

import pytest
import torch

from penstock.runtime.module import StreamedModule
from penstock.runtime.program import Program
from tests.hunt import nightly_but, scaled
from tests.random_programs.comparing import check
from tests.random_programs.drawn import HEADS, KINDS, STEMS, draw

SEEDS = (0, 2, 4, 5, 13, 38, 43, 56, 60, 70, 74, 86, 91, 105, 136, 158, 161, 176, 183, 198)
"""Of the first two hundred, seeds that together draw all kinds, and whose programs all run."""

QUICK = (5, 38, 56, 136, 158, 176)
"""Those of them that `make test` runs: they have most kinds, and take a second or two."""

PLAIN = 0
"""A seed whose program streams, on which faults are tried."""


@pytest.mark.random
@pytest.mark.parametrize("seed", nightly_but(QUICK, SEEDS) if scaled(1) == 1 else range(scaled(20)))
def test_a_random_program_has_the_bits_of_eager_pytorch(seed, tmp_path):
    outcome = check(seed, tmp_path)
    assert outcome.verdict != "wrong", f"{draw(seed).describe()}\n{outcome.where}"
    assert seed not in SEEDS or outcome.verdict == "equal"


def test_every_kind_is_drawn():
    drawn = frozenset.union(*(draw(seed).kinds for seed in SEEDS))
    assert drawn == {one.__name__ for one in (*KINDS, *STEMS)} | {*HEADS, "dynamic", "strict", "methods"}


def judged(tmp_path):
    outcome = check(PLAIN, tmp_path)
    return outcome.verdict, outcome.why


def test_other_bits_are_wrong(tmp_path, monkeypatch):
    def off(self, *args, **kwargs):
        results = StreamedModule.run(self, *args, **kwargs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one + one.abs().max(), results)

    real = Program.load

    def loading(self, *args, **kwargs):
        module = real(self, *args, **kwargs)
        module.run = off.__get__(module)
        return module

    monkeypatch.setattr(Program, "load", loading)
    verdict, why = judged(tmp_path)
    assert verdict == "wrong"
    assert "call 0 of" in why
