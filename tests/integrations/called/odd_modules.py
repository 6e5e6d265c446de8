"""Modules whose Python does odd things with weights, each with the inputs of a call."""

import warnings

import torch
from torch import nn
from torch.nn import functional

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """What the others are made of: blocks that are called one after another."""

    def __init__(self, count=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class EndsEarly(Blocks):
    """Values decide how many blocks run."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.norm() > 24:
                break
        return self.head(x)


class ReadsOfParts(Blocks):
    """The parent reads the weights of parts itself, in several ways."""

    def forward(self, x):
        x = functional.linear(super().forward(x), self.blocks[3].up.weight * 2.0)[..., :WIDTH]
        named = dict(self.named_parameters())
        stacked = torch.stack(
            [named["blocks.0.norm.weight"], self.blocks[1].norm.weight.to(torch.float64).float()]
        )
        return x + stacked.sum() + self.head.weight.mean()


class ReadsAnother(Blocks):
    """One of its layers reads the weight of another once a flag is set."""

    def __init__(self):
        super().__init__()
        self.flag = False
        self.head.forward = self._head  # type: ignore[method-assign]

    def _head(self, x):
        weight = self.blocks[0].up.weight[:WIDTH] if self.flag else self.head.weight
        return functional.linear(x, weight, self.head.bias)


class KeepsView(nn.Module):
    """It keeps a view of its weight from call number `since` on."""

    def __init__(self, since=1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), nn.Parameter(torch.zeros(WIDTH))
        self.since, self.calls, self.kept = since, 0, None

    def forward(self, x):
        self.calls += 1
        if self.calls == self.since:
            self.kept = self.weight.t()
        return x @ (self.weight.t() if self.kept is None else self.kept) + self.bias


class Writes(nn.Module):
    """Its forward writes one of its parameters."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 8),
            nn.Parameter(torch.zeros(WIDTH)),
        )

    def forward(self, x):
        self.shift.add_(1.0)
        return x @ self.weight + self.shift


class OneOf(nn.Module):
    """Several parts of one kind, called one after another."""

    def __init__(self, kind, count=4):
        super().__init__()
        self.parts = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Replaces(Blocks):
    """It replaces parameters of its parts for a moment."""

    def forward(self, x):
        for block in self.blocks:
            x = torch.func.functional_call(block.up, {"weight": block.up.weight * 0.5}, (x,))[
                ..., :WIDTH
            ] + block(x)
        before = self.head.weight
        self.head.weight = nn.Parameter(before * 0.25, requires_grad=False)
        x = self.head(x)
        self.head.weight = before
        return self.head(x)


class Nested(Blocks):
    """A part calls another one while it holds its own weights."""

    def __init__(self):
        super().__init__()
        inner = self.blocks[1].down
        own = self.head.forward
        self.head.forward = lambda x: own(x) + inner(functional.pad(x, (0, 3 * WIDTH)))  # type: ignore[method-assign]


class Results(Blocks):
    """It returns a weight and a view of one."""

    def forward(self, x):
        return super().forward(x), self.head.weight, self.blocks[0].up.weight[:2]


class Listed(Blocks):
    """It reads its weights through a list that it has kept of them."""

    def __init__(self):
        super().__init__()
        self.listed = [self.head.weight, self.head.bias]
        self.head.forward = lambda x: functional.linear(x, *self.listed)  # type: ignore[method-assign]


class Scripted(Blocks):
    """It gives a weight to a function that torch.jit.script has compiled."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.scaled = torch.jit.script(_scaled)

    def forward(self, x):
        return self.scaled(super().forward(x), self.head.weight)


def _scaled(x, weight):
    return x @ weight * 2.0


class Experts(nn.Module):
    """Values choose which of its parts run, and in which order."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 8, bias=False), nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        chosen = self.gate(x).mean(0).argsort()[:3]
        return sum(self.experts[int(e)](x) for e in chosen)


class Convolving(nn.Module):
    """Convolutions down and up, and what stays on the way down."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(8 << k, 16 << k, 3, padding=1, stride=2) for k in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(16 << k, 8 << k, 2, stride=2) for k in reversed(range(3)))

    def forward(self, x):
        before = []
        for layer in self.down:
            before.append(x)
            x = layer(x).relu()
        for layer in self.up:
            x = layer(x) + before.pop()
        return x


class Strided(nn.Module):
    """Its weights lie in memory in another order, with holes, within one another, or one row many times."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, WIDTH, 3, padding=1).to(memory_format=torch.channels_last)
        wide, row = torch.randn(WIDTH, 2 * WIDTH) / 8, torch.randn(WIDTH)
        self.list = nn.ParameterList([wide.t()[:WIDTH], *wide.chunk(2, 1), row.expand(WIDTH, WIDTH)])

    def forward(self, x):
        x = self.conv(x.reshape(-1, 8, 2, 4)).mean((2, 3)) * self.conv.weight.stride(1)
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return x


class LargeBuffers(nn.Module):
    """Its weights are buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.randn(512, 512) / 16)
        self.register_buffer("lost", torch.randn(512, 512) / 16, persistent=False)

    def forward(self, x):
        return functional.pad(x, (0, 512 - x.shape[-1])) @ self.packed @ self.lost


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 3, **options)


class Masked(nn.Module):
    """torch's encoder, whose fast path computes with nested tensors where a mask pads."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder(enable_nested_tensor=True)

    def forward(self, x):
        rows = x.reshape(2, -1, WIDTH)
        padded = torch.zeros(rows.shape[:2], dtype=torch.bool)
        padded[0, -1] = True
        return self.encoder(rows, src_key_padding_mask=padded)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(3))

    def forward(self, x):
        x = x.reshape(2, -1, WIDTH)
        for part in self.parts:
            x = part(x, x, x)[0]
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2), nn.GRU(WIDTH, WIDTH), nn.RNN(WIDTH, WIDTH)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)[0]
        return x


class Normed(OneOf):
    def __init__(self):
        norms = torch.nn.utils.parametrizations
        kinds = iter([norms.weight_norm, norms.spectral_norm, norms.weight_norm])
        super().__init__(lambda: next(kinds)(nn.Linear(WIDTH, WIDTH)), 3)


class ByStorage(Blocks):
    """It makes a tensor over the memory of a part's weight."""

    def forward(self, x):
        weight = torch.empty(0).set_(self.head.weight.untyped_storage(), 0, self.head.weight.shape)
        return super().forward(x) @ weight


class Autocast(nn.Module):
    """torch's encoder, of which one kernel asks whether autocast is on."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.encoder(x[None])


def inputs(rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


EQUAL = {
    one.__name__: one
    for one in (
        Blocks,
        EndsEarly,
        ReadsOfParts,
        ReadsAnother,
        Replaces,
        Nested,
        Results,
        Listed,
        Experts,
        Strided,
        LargeBuffers,
        Masked,
        Attention,
        Recurrent,
        Normed,
        ByStorage,
        Autocast,
    )
} | {"KeepsView": lambda: OneOf(KeepsView), "Writes": lambda: OneOf(Writes), "encoder": encoder}
"""Modules that must be equal to themselves in memory, call for call."""
