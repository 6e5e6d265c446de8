"""Small models, each with one thing that makes following or streaming its weights hard."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F  # noqa: N812


class Calls(nn.Module):
    """A model of named tensors, called by a function."""

    def __init__(self, call, **tensors):
        super().__init__()
        self.call = call
        for name, value in tensors.items():
            self.register_buffer(name, value)

    def forward(self, *args):
        return self.call(self, *args)


@dataclass(frozen=True)
class Case:
    """A model, what to call it with, and the kinds of weights it should have besides streamable."""

    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], dict[str, Any]] = dict
    dynamic_shapes: Any = None
    train: bool = False
    kinds: dict[str, str] = field(default_factory=dict)


CASES = {}


def case(args, **options):
    def add(model):
        CASES[model.__name__] = Case(model, args, **options)
        return model

    return add


class Linears(nn.Module):
    """Linear layers of eight numbers, by name."""

    names = ("a", "b")

    def __init__(self):
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Linear(8, 8))


def rows(*shape):
    return lambda: (torch.randn(*shape),)


def tokens():
    return (torch.randint(0, 16, (2, 5)),)


@case(rows(3, 8))
class Views(nn.Module):
    """Reads through permute, chunk, transpose, dropout in eval mode and `to` without effect."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 24))
        self.v = nn.Parameter(torch.randn(8, 8))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        first, second, third = self.w.chunk(3, dim=1)
        late = self.v.permute(1, 0)
        x = torch.relu(x @ first)
        x = torch.relu(x @ self.drop(second).transpose(0, 1).to(torch.float32))
        return torch.relu(x @ third) @ late[:, 2:6].reshape(8, 4)


@case(tokens)
class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


@case(rows(3, 8))
class OneStorage(nn.Module):
    """Weights that are views of one flat tensor, at offsets and with strides of their own."""

    def __init__(self):
        super().__init__()
        flat = torch.randn(200)
        self.a = nn.Parameter(flat[:64].view(8, 8))
        self.b = nn.Parameter(flat[64:192].view(8, 16)[:, ::2])
        self.c = nn.Parameter(flat[192:200])

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b + self.c


@case(rows(3, 8))
class Reused(Linears):
    def forward(self, x):
        return self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))


@case(rows(2, 3, 9, 9))
class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 2, 2)

    def forward(self, x):
        return self.up(torch.relu(self.norm(self.conv(x))))


@case(rows(2, 5, 6))
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        return y, h + c


@case(
    lambda: (torch.randn(1, 2, 8), torch.tensor([3, 4])),
    kinds={"keys": "mutable", "values": "mutable", "count": "mutable"},
)
class Cache(nn.Module):
    """Attention over a static cache, written in three ways."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("keys", torch.zeros(1, 2, 6, 4))
        self.register_buffer("values", torch.zeros(1, 2, 6, 4), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x, places):
        q, k, v = (t.view(1, 2, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        self.keys.index_copy_(2, places, k)
        self.values[:, :, 3:5] = v
        self.count.add_(2)
        return F.scaled_dot_product_attention(q, self.keys, self.values), self.count + 1


@case(
    rows(4, 6),
    train=True,
    kinds=dict.fromkeys(("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"), "mutable"),
)
class TrainingStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.norm(x))


@case(rows(3, 8))
class Branches(Linears):
    names = ("a", "b", "c")

    def forward(self, x):
        y = torch.cond(x.sum() > 0, lambda x: self.a(x) + 1, lambda x: torch.relu(self.b(x)), (x,))
        return self.c(y)


@case(rows(3, 8))
class Loop(Linears):
    def forward(self, x):
        def more(i, x):
            return i < 3

        def once(i, x):
            return i + 1, torch.tanh(self.a(x))

        _, y = while_loop(more, once, (torch.tensor(0), x))
        return self.b(y)


@case(rows(4, 3, 8))
class Scan(Linears):
    def forward(self, xs):
        def combine(carry, x):
            carry = torch.tanh(self.a(carry) + x)
            return carry, carry.clone() * 2

        last, ys = scan(combine, torch.zeros(3, 8), xs)
        return self.b(last), ys


@case(rows(3, 8))
class WithoutGrad(Linears):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.randn(8))

    def forward(self, x):
        with torch.no_grad():
            scale = torch.sigmoid(self.scale * 2)
            y = self.a(x) * scale
        return self.b(y)


@case(rows(3, 8), kinds={"table": "returned", "shift": "returned"})
class Returned(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))
        self.shift = nn.Parameter(torch.randn(8))
        self.used = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.table @ self.used, self.table.t()[1:], self.shift


@case(rows(3, 8))
class Unused(Linears):
    names = ("a", "idle")

    def forward(self, x):
        return self.a(x)


@case(rows(3, 8))
class Dtypes(nn.Module):
    """Zero-size, complex, float8, integer, bool and non-contiguous weights, and a scalar constant."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.randn(0, 8))
        self.waves = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.register_buffer("small", torch.randn(8, 8).to(torch.float8_e4m3fn))
        self.register_buffer("counts", torch.randint(0, 5, (8,), dtype=torch.int16))
        self.register_buffer("mask", torch.rand(8) > 0.5)
        self.turned = nn.Parameter(torch.randn(8, 8).t())
        self.fraction = torch.tensor(0.5)

    def forward(self, x):
        x = torch.cat([x, self.empty]) @ self.turned
        x = (x.to(torch.complex64) @ self.waves).real @ self.small.to(torch.float32)
        return torch.where(self.mask, x, x * self.counts) + self.fraction * torch.tensor([2.0])


@case(rows(3, 8))
class NoWeights(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


@case(rows(3, 8))
class WrittenInput(Linears):
    names = ("a",)

    def forward(self, x):
        x.mul_(2)
        return self.a(x)


@case(
    lambda: (torch.randn(3, 8), {"pair": [torch.randn(8), 2], "flag": True}),
    kwargs=lambda: {"scale": torch.randn(3, 1), "mode": "relu", "nothing": None},
)
class Nested(Linears):
    names = ("a",)

    def forward(self, x, extra, *, scale, mode, nothing=None):
        y = self.a(x + extra["pair"][0]) * extra["pair"][1]
        y = torch.relu(y) if mode == "relu" and extra["flag"] else y
        return {"out": y * scale, "list": [y.sum(), None, 3]}


@case(
    lambda: (torch.randn(4, 6, 8), torch.randn(6, 8)),
    dynamic_shapes=(
        {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2)},
        {0: torch.export.Dim("length", min=2)},
    ),
)
class Dynamic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.randn(100, 8))

    def forward(self, x, y):
        steps = torch.arange(x.shape[1])
        return self.a(x + y) + self.position[steps] + torch.zeros(x.shape[0], 1, 1)
