"""A compiled program that reads another weight file, of the same layout, in the place of one."""

from __future__ import annotations

from dataclasses import replace

import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock.integrations.emptied.rebound import same_layout, with_other_file

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def linear(seed: int, width: int = 8) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, width).eval().requires_grad_(False)


def test_the_values_are_those_of_the_other_file_and_are_verified(tmp_path):
    for number, module in enumerate((linear(1), linear(2), linear(3, width=9))):
        save_file(module.state_dict(), tmp_path / f"{number}.safetensors")
    first, second, third = sorted(tmp_path.glob("*.safetensors"))
    assert same_layout(first, second)
    assert not same_layout(first, third)
    exported = torch.export.export(linear(1), (X,))
    program = penstock.compile(exported, tmp_path / "a.penstock", weights=first, pack=False)
    changed = with_other_file(program, first, second)
    assert changed.verify() == program.verify()
    for one, reference in ((program, linear(1)), (changed, linear(2))):
        with one.load("100%") as module:
            assert torch.equal(module(X), reference(X))
    inlined = tuple(replace(storage, kind="inlined") for storage in program.payload.storages)
    program.payload = replace(program.payload, storages=inlined)
    assert with_other_file(program, first, second) is None
