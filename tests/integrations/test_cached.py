"""Weight files that several write at once, and a program that reads another file of the same layout."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock.integrations.cached import same_layout, store, with_other_file

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


def test_weights_that_several_write_at_once_are_written_once(tmp_path):
    tensors, found = {"weight": torch.ones(300, 300)}, []
    threads = [threading.Thread(target=lambda: found.append(store(tensors, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0].is_file()
