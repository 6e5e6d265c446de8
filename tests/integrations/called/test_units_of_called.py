"""Weights that are read by units where the model's own Python runs: the bits of the model, and few bytes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock import LoadOptions
from penstock.integrations.called.measuring import OwnMemory
from tests.integrations.called.odd_modules import Block
from tests.integrations.called.within import CHECKED, POISONED, agrees, pair, tokens


class Table(nn.Module):
    """Rows of a table, a dense part, and a head, which may be the table."""

    def __init__(self, rows=8192, width=64, *, tied=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, width, **options)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, rows if tied else 32, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.head(x)


class Experts(nn.Module):
    """A mixture whose stacks are read in one of several ways."""

    def __init__(self, way, count=16, width=128):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.gate = nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, width) / width**0.5)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = getattr(self, self.way)(flat, chosen)
        return (out * shares[..., None]).sum(1).reshape(x.shape)

    def gathered(self, flat, chosen):
        x = flat.repeat_interleave(2, 0)[..., None]
        ids = chosen.reshape(-1)
        hidden = torch.bmm(self.up[ids], x).relu()
        return torch.bmm(self.down[ids], hidden).reshape(-1, 2, flat.shape[-1])

    def grouped(self, flat, chosen):
        ids, order = chosen.reshape(-1).sort()
        ends = torch.histc(ids.float(), len(self.up), 0, len(self.up) - 1).cumsum(0).int()
        x = flat[order // 2]
        hidden = functional.grouped_mm(x, self.up.transpose(-2, -1), offs=ends).relu()
        made = functional.grouped_mm(hidden, self.down, offs=ends)
        return made[order.argsort()].reshape(-1, 2, flat.shape[-1])

    def looped(self, flat, chosen):
        out = flat.new_zeros(*chosen.shape, flat.shape[-1])
        for e in chosen.unique():
            rows, column = torch.where(chosen == e)
            out[rows, column] = functional.linear(
                functional.linear(flat[rows], self.up[e]).relu(), self.down[int(e)]
            )
        return out

    def whole(self, flat, chosen):
        every = torch.einsum("th,ehk->tek", flat, self.up).relu()
        made = torch.einsum("tek,ekh->teh", every, self.down)
        return made.gather(1, chosen[..., None].expand(-1, -1, flat.shape[-1]))


class Mixture(nn.Module):
    def __init__(self, way, layers=3):
        super().__init__()
        self.table = nn.Embedding(4096, 128)
        self.layers = nn.ModuleList(Experts(way) for _ in range(layers))
        self.head = nn.Linear(128, 64)

    def forward(self, ids):
        x = self.table(ids)
        for one in self.layers:
            x = x + one(x)
        return self.head(x)


class TestRows:
    @pytest.mark.parametrize(
        "options", [POISONED, CHECKED, LoadOptions()], ids=["poisoned", "checked", "native"]
    )
    def test_a_table_is_read_by_rows_below_its_size(self, called, options):
        model, reference = pair(Table())
        streamed = called(model, 200 << 10, options)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (5, 5, 1, 1, 3)))
        assert streamed.plan.pool is not None
        assert streamed.stats.misses == 0
        assert streamed.stats.peak_bytes <= 200 << 10

    def test_a_tied_table_is_read_by_rows_and_whole(self, called):
        model, reference = pair(Table(4096, tied=True))
        streamed = called(model, 0.99, LoadOptions())

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (5, 1, 1, 5)))
        assert streamed.stats.misses == 0

    @pytest.mark.parametrize("options", [{"padding_idx": 3}, {"padding_idx": -1}, {"max_norm": 1.0}], ids=str)
    def test_an_embedding_has_its_options(self, called, options):
        model, reference = pair(Table(**options))
        called(model, 0.99 if "max_norm" in options else 200 << 10)

        assert agrees(
            model, reference, tokens(1, 5), tokens(1, 1), torch.tensor([[3, 8191, 3]]), tokens(1, 5)
        )

    def test_an_index_out_of_range_is_refused_as_in_pytorch(self, called):
        model, reference = pair(Table())
        called(model, 200 << 10)
        assert agrees(model, reference, tokens(1, 5), tokens(1, 5))

        with pytest.raises(IndexError, match="out of range"):
            model(torch.tensor([[8192]]))
        assert agrees(model, reference, tokens(1, 5))


class TestExperts:
    @pytest.mark.parametrize("way", ["grouped", "gathered", "looped"])
    @pytest.mark.parametrize("share", [0.04, 0.4])
    def test_only_what_a_call_asks_for_is_read(self, called, way, share):
        model, reference = pair(Mixture(way))
        streamed = called(model, share)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 1, 1, 30, 1)))
        before = streamed.stats
        assert agrees(model, reference, *(tokens(1, 1, seed=n) for n in range(20)))
        after = streamed.stats
        assert after.misses == 0
        stacks = sum(
            value.nbytes for name, value in reference.named_parameters() if ".up" in name or ".down" in name
        )
        assert (after.bytes_moved - before.bytes_moved) / 20 < stacks / 4

    def test_stacks_that_every_call_multiplies_are_read_whole(self, called):
        model, reference = pair(Mixture("whole"))
        streamed = called(model, 0.6)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 6, 1, 1)))
        assert streamed.stats.misses == 0

    def test_another_way_is_right_whenever_it_comes(self, called):
        model, reference = pair(Mixture("grouped"))
        called(model, 0.6)

        for way in ("grouped", "looped", "gathered", "whole", "grouped"):
            for one in (*model.layers, *reference.layers):
                one.way = way
            assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 1, 1)))


class TestTiles:
    @pytest.mark.parametrize("tied", [False, True])
    def test_a_large_head_is_read_by_tiles_below_its_size(self, called, tied, monkeypatch):
        monkeypatch.setattr("penstock.integrations.called.by_units.units.TILED", 4 << 20)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.head = nn.Embedding(8192, 256), nn.Linear(256, 8192, bias=False)
                if tied:
                    self.head.weight = self.table.weight

            def forward(self, ids):
                return self.head(self.table(ids).tanh())

        model, reference = pair(Net())
        streamed = called(model, 2 << 20)

        assert agrees(model, reference, *(tokens(1, n, seed=n, most=8192) for n in (3, 3, 1, 1)))
        assert streamed.stats.misses == 0
        assert streamed.stats.peak_bytes <= 2 << 20

    def test_slices_of_a_large_stack_are_no_tiles(self, called, monkeypatch):
        monkeypatch.setattr("penstock.integrations.called.by_units.units.TILED", 512 << 10)
        model, reference = pair(Mixture("looped"))
        called(model, 0.4)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 1, 1, 1)))


class Chosen(nn.Module):
    """Experts that are modules, of which values choose, or whoever calls it."""

    def __init__(self, count=16):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(128, count)
        self.experts = nn.ModuleList(Block(128) for _ in range(count))
        self.order = None

    def forward(self, x):
        order = self.order
        if order is None:
            order = self.gate(x).softmax(-1).topk(2, -1).indices.unique().tolist()
        for number in order:
            x = x + self.experts[number](x) / 8
        return x


class TestModules:
    def test_experts_that_are_modules_are_units_of_a_stack(self, called):
        model, reference = pair(nn.Sequential(Chosen(), Chosen()))
        streamed = called(model, 0.3)

        x = torch.randn(40, 1, 128, generator=torch.Generator().manual_seed(2))
        assert agrees(model, reference, *x[:10])
        before = streamed.stats
        assert agrees(model, reference, *x[10:])
        after = streamed.stats
        assert after.misses == 0
        assert (after.bytes_moved - before.bytes_moved) / 30 < streamed.facts.nbytes / 5
        assert after.peak_bytes <= 0.3 * streamed.facts.nbytes
        assert agrees(model, reference, x[:, 0])

    def test_any_order_of_modules_is_right_without_a_miss(self, called):
        model, reference = pair(Chosen(8))
        streamed = called(model, 0.4)
        x = torch.randn(2, 128)

        for order in ([5, 2], [7], [0, 1, 2], [6, 5, 4, 3, 2, 1, 0], [3, 3, 7], [7, 1], [7, 1]):
            model.order = reference.order = order
            assert agrees(model, reference, x)
        assert streamed.stats.misses == 0

    def test_layers_that_run_in_their_order_are_steps(self, called):
        model, reference = pair(Chosen(8))
        streamed = called(model, 0.4)

        for count in (8, 8, 5, 8):
            model.order = reference.order = list(range(count))
            assert agrees(model, reference, torch.randn(2, 128))
        assert not streamed._units.roots


class ReadsParts(nn.Module):
    """It reads the weights of its parts itself, beside calling them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(functional.linear(x, part.weight * 2.0, part.bias) + part(x))
        return x + self.parts[0].weight.t()[:1].contiguous()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 128, 128) / 11)

    def forward(self, x):
        return torch.tanh(x @ self.weight[0])


class ReadsTwo(nn.Module):
    """An operator of its own reads the weights of two parts whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = Stack(), Stack(), Stack()

    def forward(self, x):
        x = x @ (self.first.weight @ self.second.weight).sum(0)
        x = x + x @ (self.third.weight @ self.first.weight).sum(0)
        return self.first(x) + self.second(x) + self.third(x)


class TestOperators:
    def test_two_weights_that_one_operator_reads_whole_are_there_together(self, called):
        model, reference = pair(ReadsTwo())
        called(model, 0.4, POISONED)

        x = torch.randn(2, 128)
        assert agrees(model, reference, x, x, x, x)

    def test_each_weight_that_a_parent_reads_is_a_step_of_its_own(self, called, monkeypatch):
        model, reference = pair(ReadsParts())
        streamed = called(model, 0.2)  # less than two of eight

        x = torch.randn(2, 256)
        assert agrees(model, reference, x, x, x, x)
        before = streamed.stats
        monkeypatch.setattr(OwnMemory, "read", None)  # the plan has all that is read
        assert agrees(model, reference, x)
        after = streamed.stats
        assert after.misses == before.misses == 0
        assert after.peak_bytes <= 0.2 * streamed.facts.nbytes
