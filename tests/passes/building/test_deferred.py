"""Deferred initialisation: the values that a constructor would have given, for as much as is asked for."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock.passes.building import deferred as recording


class Odd(nn.Module):
    """Ties, views, buffers of all kinds, draws of several kinds, and a decision on a value."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer(
            "steps", 1.0 / (10000 ** (torch.arange(0, 24, 2).float() / 24)), persistent=False
        )
        self.register_buffer("order", torch.randperm(24))
        self.plain = torch.tensor([[1.5, 2.5], [3.5, 4.5]])
        self.scales = [float(x) for x in torch.linspace(0, 1, 4)]
        nn.init.trunc_normal_(self.blocks[1].weight, std=0.02)
        nn.init.orthogonal_(self.blocks[2].weight)
        if self.order.sum().item() != 276:
            raise AssertionError
        with torch.no_grad():
            self.blocks[0].weight[:, 3].zero_()
            self.blocks[0].bias.copy_(self.plain.flatten().repeat(6))
        self.low = nn.Linear(24, 8).to(torch.bfloat16)


def eager(seed=3):
    torch.manual_seed(seed)
    return Odd()


def deferred(seed=3):
    torch.manual_seed(seed)
    return penstock.deferred_init(Odd)


def test_no_memory_is_taken_and_the_generator_stays_as_it_is():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = penstock.deferred_init(Odd)
    assert all(t.is_meta for t in (*found.module.parameters(), *found.module.buffers()))
    found.materialize()
    assert torch.equal(torch.get_rng_state(), before)
    big = penstock.deferred_init(lambda: nn.Linear(1 << 20, 1 << 20))
    assert big.module.weight.shape == (1 << 20, 1 << 20)


def test_the_whole_model_is_what_the_constructor_gives():
    found, expected = deferred().materialize(), eager()
    state = expected.state_dict()
    assert list(found.state_dict()) == list(state)
    for name, value in found.state_dict().items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name]), name
    assert torch.equal(found.steps, expected.steps)
    assert torch.equal(found.plain, expected.plain)
    assert found.scales == expected.scales
    assert found.head.weight is found.embed.weight
    assert found.embed.weight.requires_grad


@pytest.mark.parametrize("name", ["blocks.2", "blocks", "head", "low", "norm"])
def test_one_submodule_is_what_the_constructor_gives_it(name):
    found, expected = deferred(), eager().get_submodule(name)
    part = found.materialize(name)
    for key, value in part.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key]), key
    assert found.module.blocks[0].weight.is_meta == (name != "blocks")


def test_parts_may_be_asked_for_in_any_order_and_again():
    found, expected = deferred(), eager()
    last = found.materialize("blocks.2").weight
    found.materialize("blocks.0")
    found.materialize("blocks")
    assert found.module.blocks[2].weight is last
    found.materialize()
    assert all(
        torch.equal(a, b) for a, b in zip(found.module.parameters(), expected.parameters(), strict=True)
    )


def test_some_rows_of_one_parameter():
    found, expected = deferred(), eager()
    rows = found.materialize_slice("blocks.2.weight", slice(5, 9))
    assert torch.equal(rows, expected.blocks[2].weight[5:9])
    assert found.module.blocks[2].weight.is_meta


class Largest(TorchDispatchMode):
    """Keeps the most elements of a storage that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


def scaled():
    """Two parameters of 900 rows and 8 columns: drawn in float32, scaled, and converted."""
    module = nn.Module()
    module.first = nn.Parameter(nn.init.normal_(torch.empty(900, 8), std=0.02))
    module.second = nn.Parameter(nn.init.uniform_(torch.empty(900, 8)).mul_(3).to(torch.bfloat16))
    module.third = nn.Parameter(torch.ones(900, 8) * 5)
    return module


@pytest.mark.parametrize("name", ["first", "second", "third"])
@pytest.mark.parametrize("rows", [slice(5, 9), slice(0, 30), slice(-7, None), slice(20, 60, 3), slice(9, 5)])
def test_rows_are_made_without_the_rest_of_their_parameter(monkeypatch, name, rows):
    monkeypatch.setattr(recording, "_CHUNK", 256)
    torch.manual_seed(1)
    found = penstock.deferred_init(scaled)
    with Largest() as largest:
        got = found.materialize_slice(name, rows)
    torch.manual_seed(1)
    assert torch.equal(got, getattr(scaled(), name)[rows])
    assert largest.elements <= 2 * 256  # of 7,200: the rows, or what is drawn at a time


@pytest.mark.parametrize(
    "name", ["embed.weight", "blocks.0.weight", "blocks.1.weight", "order", "low.weight"]
)
def test_rows_are_what_the_constructor_gives_however_it_makes_them(name):
    found, expected = deferred(), eager().state_dict()[name]
    assert torch.equal(found.materialize_slice(name, slice(3, 7)), expected[3:7])


def in_bfloat16():
    """A model built as transformers builds one: what is given no dtype gets torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = nn.Module()
        module.linear, module.norm = nn.Linear(6, 5), nn.LayerNorm(5)
        module.filled = nn.Parameter(torch.full((4, 3), 0.1))
        module.register_buffer("counted", torch.arange(8) / 3)
        module.register_buffer("drawn", torch.rand(7, 2))
        return module
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["linear.weight", "norm.weight", "filled", "counted", "drawn"])
def test_values_are_those_of_the_default_dtype_of_the_constructor(name):
    torch.manual_seed(2)
    found = penstock.deferred_init(in_bfloat16)
    torch.manual_seed(2)
    expected = in_bfloat16().state_dict()[name]
    rows = found.materialize_slice(name, slice(1, 4))
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, expected[1:4])
    assert torch.equal(found.materialize().state_dict()[name], expected)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("draw", [nn.init.normal_, nn.init.uniform_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1024, 1039, 3 * 256 + 5])
def test_what_is_drawn_only_for_the_state_is_drawn_in_pieces(monkeypatch, draw, dtype, size):
    monkeypatch.setattr(recording, "_CHUNK", 256)

    def build():
        module = nn.Module()
        module.first = nn.Parameter(draw(torch.empty(size, dtype=dtype)))
        module.second = nn.Parameter(draw(torch.empty(40, dtype=dtype)))
        return module

    torch.manual_seed(1)
    found = penstock.deferred_init(build)
    values = found.values(found.module.second)
    torch.manual_seed(1)
    assert torch.equal(values, build().second)


def test_seeding_in_the_constructor_counts():
    def build():
        first = nn.Linear(4, 4)
        torch.manual_seed(11)
        return nn.Sequential(first, nn.Linear(4, 4))

    torch.manual_seed(5)
    found = penstock.deferred_init(build).materialize()
    torch.manual_seed(5)
    expected = build()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_a_legacy_constructor_converts_numbers_of_numpy():
    table = np.arange(6.0).reshape(2, 3)  # float64

    def build():
        module = nn.Embedding(2, 3)
        with torch.no_grad():
            module.weight[:] = torch.FloatTensor(table)
        return module

    found = penstock.deferred_init(build).materialize()
    assert torch.equal(found.weight, torch.tensor(table, dtype=torch.float32))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.zeros(3), "expected a function that returns a module, got Tensor"),
        (nn.Linear(2, 2), "expected a function that builds the model, got a Linear that is built"),
        (lambda: nn.Linear(2, "x"), r"without memory at .*test_deferred\.py:\d+, in <lambda>"),
        (
            lambda: nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(1))),
            "a generator of its own",
        ),
        (
            lambda: nn.Linear(2, 2, device="cuda"),
            r"asks for cuda:0 at .*test_deferred\.py:\d+, .*: build it on the CPU .* or use fake_export",
        ),
        (lambda: nn.Linear(2, 2).cuda(), "asks for cuda:0 at "),
    ],
)
def test_what_cannot_be_deferred_is_refused(build, message):
    with pytest.raises(penstock.PassError, match=message):
        penstock.deferred_init(build)


def test_names_that_there_are_not_are_refused():
    found = deferred()
    with pytest.raises(penstock.PassError, match=r"there is no submodule 'blocks\.7'"):
        found.materialize("blocks.7")
    with pytest.raises(penstock.PassError, match="there is no parameter or buffer 'nothing'"):
        found.materialize_slice("nothing", slice(1))
    with pytest.raises(
        penstock.PassError, match=r"'blocks\.2' is a Linear, expected the name of a parameter"
    ):
        found.materialize_slice("blocks.2", slice(1))
