"""Weights that are read by units where the model's own Python runs: the bits of the model, and few bytes."""

from __future__ import annotations

import copy
import random
import warnings
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
from penstock.schedule.facts.errors import StreamError
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
    @pytest.mark.parametrize(
        "options", [POISONED, CHECKED, LoadOptions()], ids=["poisoned", "checked", "native"]
    )
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

        assert agrees(
            model, reference, tokens(1, 5), tokens(1, 1), torch.tensor([[3, 8191, 3]]), tokens(1, 5)
        )

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
        stacks = sum(
            value.nbytes for name, value in reference.named_parameters() if ".up" in name or ".down" in name
        )
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


class TestTiles:
    @pytest.mark.parametrize("tied", [False, True])
    def test_a_large_head_is_read_by_tiles_below_its_size(
        self, called: Called, tied: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.integrations.called.units.TILED", 4 << 20)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.head = nn.Embedding(8192, 256), nn.Linear(256, 8192, bias=False)
                if tied:
                    self.head.weight = self.table.weight

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.head(self.table(ids).tanh())

        model, reference = pair(Net())
        streamed = called(model, 2 << 20)

        assert agrees(model, reference, *(tokens(1, n, seed=n, most=8192) for n in (3, 3, 1, 1)))
        assert streamed.stats is not None and streamed.stats.misses == 0
        assert streamed.stats.peak_bytes <= 2 << 20

    def test_slices_of_a_large_stack_are_no_tiles(
        self, called: Called, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.integrations.called.units.TILED", 512 << 10)
        model, reference = pair(Mixture("looped"))
        called(model, 0.4)

        assert agrees(model, reference, *(tokens(1, n, seed=n) for n in (6, 1, 1, 1)))


class Block(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chosen(nn.Module):
    """Experts that are modules, of which values choose, or whoever calls it."""

    def __init__(self, count: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(128, count)
        self.experts = nn.ModuleList(Block() for _ in range(count))
        self.order: list[int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self.order
        if order is None:
            order = self.gate(x).softmax(-1).topk(2, -1).indices.unique().tolist()
        for number in order:
            x = x + self.experts[number](x) / 8
        return x


class TestModules:
    def test_experts_that_are_modules_are_units_of_a_stack(self, called: Called) -> None:
        model, reference = pair(nn.Sequential(Chosen(), Chosen()))
        streamed = called(model, 0.3)

        x = torch.randn(40, 1, 128, generator=torch.Generator().manual_seed(2))
        assert agrees(model, reference, *x[:10])
        before = streamed.stats
        assert agrees(model, reference, *x[10:])
        after = streamed.stats
        assert before is not None and after is not None and after.misses == 0
        assert (after.bytes_moved - before.bytes_moved) / 30 < streamed.facts.nbytes / 5
        assert after.peak_bytes <= 0.3 * streamed.facts.nbytes
        assert agrees(model, reference, x[:, 0])

    def test_any_order_of_modules_is_right_without_a_miss(self, called: Called) -> None:
        model, reference = pair(Chosen(8))
        streamed = called(model, 0.4)
        x = torch.randn(2, 128)

        for order in ([5, 2], [7], [0, 1, 2], [6, 5, 4, 3, 2, 1, 0], [3, 3, 7], [7, 1], [7, 1]):
            model.order = reference.order = order
            assert agrees(model, reference, x)
        assert streamed.stats is not None and streamed.stats.misses == 0

    def test_layers_that_run_in_their_order_are_steps(self, called: Called) -> None:
        model, reference = pair(Chosen(8))
        streamed = called(model, 0.4)

        for count in (8, 8, 5, 8):
            model.order = reference.order = list(range(count))
            assert agrees(model, reference, torch.randn(2, 128))
        assert not streamed._units.roots


class ReadsParts(nn.Module):
    """It reads the weights of its parts itself, beside calling them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(F.linear(x, part.weight * 2.0, part.bias) + part(x))
        return x + self.parts[0].weight.t()[:1].contiguous()


class TestOperators:
    def test_a_weight_that_a_parent_reads_is_a_step_of_its_own(self, called: Called) -> None:
        model, reference = pair(ReadsParts())
        streamed = called(model, 0.2)  # less than two of eight

        x = torch.randn(2, 256)
        assert agrees(model, reference, x, x, x, x)
        before = streamed.stats
        assert agrees(model, reference, x)
        after = streamed.stats
        assert before is not None and after is not None and after.misses == before.misses == 0
        assert after.peak_bytes <= 0.2 * streamed.facts.nbytes


class Runs(nn.Module):
    """It runs a function on an expert of a stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = nn.Parameter(torch.randn(16, 128, 256))
        self.square = nn.Parameter(torch.randn(16, 128, 128))

    def forward(self, run: Callable[..., Any]) -> Any:
        return run(self.stack, self.square)


def outcome(model: nn.Module, run: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    try:
        return model(run)
    except StreamError:
        return StreamError
    except Exception as error:
        return type(error)


ENDS = torch.arange(1, 17, dtype=torch.int32) // 4

TRAPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "vmap": lambda w, _: torch.vmap(lambda one: one.sum(0))(w[2:5]),
    "grad": lambda w, _: torch.func.grad(lambda x: (x @ w[3]).sum())(torch.ones(128)),
    "to_same": lambda w, _: w[3].to("cpu").to(torch.float32) + 1,
    "contiguous": lambda w, _: w[3].t().contiguous().view(-1)[:9] * 2,
    "numpy": lambda w, _: torch.from_numpy(w[3].numpy()) + 1,
    "dlpack": lambda w, _: torch.from_dlpack(w[3]) + 1,
    "two_slices": lambda w, s: torch.stack([w[1], w[9], w[14]]).sum(0),
    "two_stacks": lambda w, s: s[4] @ w[11],
    "square": lambda w, s: (
        F.linear(torch.ones(3, 128), s[3]) + F.linear(torch.ones(3, 128), s.transpose(1, 2)[3])
    ),
    "square_grouped": lambda w, s: (
        F.grouped_mm(torch.ones(4, 128), s.mT, offs=ENDS) + F.grouped_mm(torch.ones(4, 128), s, offs=ENDS)
    ),
    "around": lambda w, _: torch.as_strided_copy(w[3], (4, 4), (1, 4), 128 * 256 * 7),
    "as_strided": lambda w, _: torch.as_strided(w[3], (4, 4), (1, 4), 128 * 256 * 7) + 1,
    "numbers": lambda w, _: w[[3, 5]].sum() + w[torch.tensor([True] * 2 + [False] * 14)].sum(),
    "scalar": lambda w, _: w[torch.tensor(3), 1:5, ::2].sum() + w[-1].sum() + float(w[2, 3, 4]),
    "complex": lambda w, _: torch.view_as_complex(w[3].view(128, 128, 2)).conj().sum(),
    "bytes": lambda w, _: w[3].view(torch.int32).sum(),
    "iterated": lambda w, _: sum(one.sum() for one in w),
    "scripted": lambda w, _: _scripted(w[3]),
    "autocast": lambda w, s: _cast(w, s),
    "whole": lambda w, s: w.sum() + s.mean(),
    "out": lambda w, _: torch.add(w[3], 1, out=torch.empty(128, 256)),
    "returned": lambda w, _: w[3, :4],
}


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0) * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(_doubled)


def _cast(w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(torch.ones(3, 128), s[3]) @ w[2]


class TestTraps:
    @pytest.mark.parametrize("options", [CHECKED, LoadOptions()], ids=["checked", "native"])
    def test_a_slice_has_its_own_bytes_or_is_refused(self, called: Called, options: LoadOptions) -> None:
        model, reference = pair(Runs())
        called(model, 0.8, options)

        for name, run in [*TRAPS.items(), *TRAPS.items()]:
            assert torch.equal(
                model(lambda w, s: w[5] + s[2, 0, 0]), reference(lambda w, s: w[5] + s[2, 0, 0])
            )
            made = outcome(model, run)
            assert made is StreamError or torch.equal(made, outcome(reference, run)), name

    def test_a_view_that_is_kept_reads_its_units_again(self, called: Called) -> None:
        model, reference = pair(Runs())
        called(model, 0.5)
        views: list[Any] = []

        for number in range(6):
            for one in (model, reference):
                one(lambda w, s: views.append(w[3][:2]))
                one(lambda w, s, number=number: w[number] + 1)
            made, expected = (
                one(lambda w, s, k=k: views[k] + 1) for k, one in ((-2, model), (-1, reference))
            )
            assert torch.equal(made, expected)
        with pytest.raises(StreamError, match="stack is not in memory"):
            views[0] + 1

    @pytest.mark.parametrize(
        "write",
        [lambda w, s: w[3].mul_(2.0).sum(), lambda w, s: w.__setitem__(3, 1.0) or w.sum()],
        ids=["mul", "set"],
    )
    def test_what_is_written_stays_in_memory(self, called: Called, write: Callable[..., Any]) -> None:
        model, reference = pair(Runs())
        called(model, 0.9)

        for run in (lambda w, s: w[3].sum(), write, lambda w, s: w[3].sum(), write, lambda w, s: w.sum()):
            assert torch.equal(model(run), reference(run))

    def test_only_what_is_read_by_units_stays_watched(self, called: Called) -> None:
        class Dense(Runs):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.einsum("ab,ebc->ac", x, self.square) @ self.stack[3]

        model, reference = pair(Dense())
        streamed = called(model, 0.9)
        assert agrees(model, reference, *torch.ones(3, 2, 128))
        assert [root.part.shape for root in streamed._units.roots.values()] == [(16, 128, 256)]
        asked = torch.overrides.has_torch_function
        assert not asked([model.stack, model.square])

    @pytest.mark.parametrize("part", range(2))
    def test_operators_of_torch_are_right_on_a_slice(self, called: Called, part: int) -> None:
        common = pytest.importorskip("torch.testing._internal.common_methods_invocations")
        skipped = (
            "empty",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "normal",
            "uniform",
            "multi_head",
        )
        model, reference = pair(Runs())
        called(model, 0.8)
        drawn = random.Random(part)
        warnings.simplefilter("ignore")
        every = [one for one in common.op_db if not any(name in one.name for name in skipped)]
        for op in drawn.sample([one for one in every if torch.float32 in one.dtypes], 40):
            samples = [one for one, _ in zip(op.sample_inputs("cpu", torch.float32), range(2), strict=False)]
            for sample in samples:
                if isinstance(sample.input, torch.Tensor) and sample.input.numel() <= 128 * 256:

                    def run(w: torch.Tensor, s: torch.Tensor, op: Any = op, sample: Any = sample) -> Any:
                        own = w[3].view(-1)[: sample.input.numel()].view(sample.input.shape)
                        return op.op(own, *sample.args, **sample.kwargs)

                    made, expected = outcome(model, run), outcome(reference, run)
                    assert made is StreamError or same(made, expected), op.name


def same(made: Any, expected: Any) -> bool:
    if not isinstance(made, torch.Tensor):
        if isinstance(made, tuple | list):
            return len(made) == len(expected) and all(map(same, made, expected))
        return bool(made == expected) or made != made
    if not isinstance(expected, torch.Tensor) or (made.dtype, made.shape, made.layout) != (
        expected.dtype,
        expected.shape,
        expected.layout,
    ):
        return False
    made, expected = (one.to_dense() if one.layout != torch.strided else one for one in (made, expected))
    return torch.allclose(
        made.to(torch.complex128), expected.to(torch.complex128), rtol=0, atol=0, equal_nan=True
    )
