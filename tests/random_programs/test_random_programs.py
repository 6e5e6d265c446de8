"""Random programs in which every kind appears, and how the generator judges what goes wrong."""

import pytest
import torch

import penstock
from penstock.runtime import artifact
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


def test_a_seed_makes_one_program():
    one, other = draw(PLAIN), draw(PLAIN)
    assert one.describe() == other.describe() != draw(PLAIN + 1).describe()
    values, others = one.module.state_dict(), other.module.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in values.items())


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


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (penstock.PassError("the moon is full: wait"), "wrong"),
        (KeyError("moon"), "wrong"),
        (
            penstock.BudgetError("the budget of 3 B is below the floor of 4 B: give at least 4 bytes"),
            "refused",
        ),
    ],
)
def test_only_a_refusal_that_the_documents_list_is_right(error, verdict, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(artifact, "annotate_with_values", refuse)
    assert judged(tmp_path)[0] == verdict


@pytest.mark.parametrize("what", ["module", "torch"])
def test_what_is_left_behind_is_wrong(what, tmp_path, monkeypatch):
    real = penstock.compile

    def leaving(exported, path):
        if what == "module":
            weights = {id(one): one for program in _programs(exported) for one in program.state_dict.values()}
            next(iter(weights.values())).data = torch.zeros(1)
        else:
            torch.manual_seed(3)
        return real(exported, path)

    monkeypatch.setattr(penstock, "compile", leaving)
    verdict, why = judged(tmp_path)
    assert verdict == "wrong"
    assert ("the module was changed" if what == "module" else "torch was left with") in why


def _programs(exported):
    return exported.values() if isinstance(exported, dict) else [exported]


def test_bytes_that_the_plan_does_not_name_are_wrong(tmp_path, monkeypatch):
    real = StreamedModule.stats.fget

    def more(self):
        from dataclasses import replace

        found = real(self)
        return replace(found, bytes_moved=found.bytes_moved * 3 + (found.passes << 20))

    monkeypatch.setattr(StreamedModule, "stats", property(more))
    verdict, why = judged(tmp_path)
    assert verdict == "wrong"
    assert "bytes moved" in why
