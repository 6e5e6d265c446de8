"""Weights that are read by units where the model's own Python runs: the bits of the model, and few bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.integrations.cached import stored_tensors
from penstock.integrations.called.component import CalledModule
from penstock.integrations.called.facts import make_facts
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.hollow import Hollow
from penstock.integrations.own_files import keep_weights
from penstock.runtime.cache import Cache
from penstock.runtime.loading import LoadOptions
from tests.integrations.models import frozen

POISONED = LoadOptions(arena="contiguous", poison=True)
CHECKED = LoadOptions(debug=True)

Called = Callable[..., CalledModule]


class Room(Cap):
    """A cap that leaves `budget` bytes for weights, whatever calls take beside them."""

    budget = 0
    module: CalledModule

    @property
    def room(self) -> int:
        return self.budget + (self.module._room_beside() if self.module._measured else 1 << 39)


@pytest.fixture
def called(tmp_path: Path) -> Iterator[Called]:
    """Returns a function that has a model called within a share of its weights, or so many bytes."""
    made: list[CalledModule] = []

    def within(model: nn.Module, budget: float, options: LoadOptions = CHECKED) -> CalledModule:
        kept = keep_weights(model, stored_tensors(model), Cache.at(tmp_path / str(len(made))), "model")
        facts = make_facts(model, kept)
        Hollow(model, "call the model itself", torch.device("cpu"), called=True)
        cap = Room(1 << 40)
        cap.module = module = CalledModule("model", model, facts, kept, cap, options=options)
        cap.budget = int(budget * facts.nbytes) if budget <= 1 else int(budget)
        made.append(module)
        return module

    yield within
    for one in made:
        one.let_go()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def agrees(model: nn.Module, reference: nn.Module, *calls: Any) -> bool:
    """Tell whether all calls have the same bits."""
    return all(torch.equal(model(one), reference(one)) for one in calls)


def tokens(*shape: int, most: int = 4096, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


class Table(nn.Module):
    """Rows of a table, a dense part, and a head, which may be the table."""

    def __init__(self, rows: int = 8192, width: int = 64, *, tied: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, width, **options)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, rows if tied else 32, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.head(x)


class Experts(nn.Module):
    """A mixture whose stacks are read in one of several ways."""

    def __init__(self, way: str, count: int = 16, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.gate = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = getattr(self, self.way)(flat, chosen)
        return (out * shares[..., None]).sum(1).reshape(x.shape)

    def gathered(self, flat: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        x = flat.repeat_interleave(2, 0)[..., None]
        ids = chosen.reshape(-1)
        hidden = torch.bmm(self.up[ids], x).relu()
        return torch.bmm(self.down[ids], hidden).reshape(-1, 2, flat.shape[-1])

    def grouped(self, flat: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ids, order = chosen.reshape(-1).sort()
        ends = torch.histc(ids.float(), len(self.up), 0, len(self.up) - 1).cumsum(0).int()
        x = flat[order // 2]
        hidden = F.grouped_mm(x, self.up.transpose(-2, -1), offs=ends).relu()
        made = F.grouped_mm(hidden, self.down, offs=ends)
        return made[order.argsort()].reshape(-1, 2, flat.shape[-1])

    def looped(self, flat: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = flat.new_zeros(*chosen.shape, flat.shape[-1])
        for e in chosen.unique():
            rows, column = torch.where(chosen == e)
            out[rows, column] = F.linear(F.linear(flat[rows], self.up[e]).relu(), self.down[int(e)])
        return out

    def whole(self, flat: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        every = torch.einsum("th,ehk->tek", flat, self.up).relu()
        made = torch.einsum("tek,ekh->teh", every, self.down)
        return made.gather(1, chosen[..., None].expand(-1, -1, flat.shape[-1]))


class Mixture(nn.Module):
    def __init__(self, way: str, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 128)
        self.layers = nn.ModuleList(Experts(way) for _ in range(layers))
        self.head = nn.Linear(128, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for one in self.layers:
            x = x + one(x)
        return self.head(x)


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    model = frozen(model)
    return model, copy.deepcopy(model)


class TestRows:
    @pytest.mark.parametrize("options", [POISONED, CHECKED, LoadOptions()], ids=["poisoned", "checked", "native"])
    def test_a_table_is_read_by_rows_below_its_size(self, called: Called, options: LoadOptions) -> None:
        model, reference = pair(Table())
        streamed = called(model, 200 << 10, options)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (5, 5, 1, 1, 3)))
        assert streamed.plan is not None and streamed.plan.pool is not None
        assert streamed.stats is not None and streamed.stats.misses == 0
        assert streamed.stats.peak_bytes <= 200 << 10

    def test_a_tied_table_is_read_by_rows_and_whole(self, called: Called) -> None:
        model, reference = pair(Table(4096, tied=True))
        streamed = called(model, 0.99, LoadOptions())

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (5, 1, 1, 5)))
        assert streamed.stats is not None and streamed.stats.misses == 0

    @pytest.mark.parametrize("options", [{"padding_idx": 3}, {"padding_idx": -1}, {"max_norm": 1.0}], ids=str)
    def test_an_embedding_has_its_options(self, called: Called, options: dict[str, Any]) -> None:
        model, reference = pair(Table(**options))
        called(model, 0.99 if "max_norm" in options else 200 << 10)

        assert agrees(model, reference, tokens(1, 5), tokens(1, 1), torch.tensor([[3, 8191, 3]]), tokens(1, 5))

    def test_an_index_out_of_range_is_refused_as_in_pytorch(self, called: Called) -> None:
        model, reference = pair(Table())
        called(model, 200 << 10)
        assert agrees(model, reference, tokens(1, 5), tokens(1, 5))

        with pytest.raises(IndexError, match="out of range"):
            model(torch.tensor([[8192]]))
        assert agrees(model, reference, tokens(1, 5))


class TestExperts:
    @pytest.mark.parametrize("way", ["grouped", "gathered", "looped"])
    @pytest.mark.parametrize("share", [0.04, 0.4])
    def test_only_what_a_call_asks_for_is_read(self, called: Called, way: str, share: float) -> None:
        model, reference = pair(Mixture(way))
        streamed = called(model, share)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 1, 1, 30, 1)))
        before = streamed.stats
        assert agrees(model, reference, *(tokens(1, 1, seed=n) for n in range(20)))
        after = streamed.stats
        assert before is not None and after is not None and after.misses == 0
        stacks = sum(value.nbytes for name, value in reference.named_parameters() if ".up" in name or ".down" in name)
        assert (after.bytes_moved - before.bytes_moved) / 20 < stacks / 4

    def test_stacks_that_every_call_multiplies_are_read_whole(self, called: Called) -> None:
        model, reference = pair(Mixture("whole"))
        streamed = called(model, 0.6)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 6, 1, 1)))
        assert streamed.stats is not None and streamed.stats.misses == 0

    def test_another_way_is_right_whenever_it_comes(self, called: Called) -> None:
        model, reference = pair(Mixture("grouped"))
        called(model, 0.6)

        for way in ("grouped", "looped", "gathered", "whole", "grouped"):
            for one in (*model.layers, *reference.layers):
                one.way = way
            assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 1, 1)))
