"""Models with tables and stacks of experts that are large enough to be read by units."""

import torch
from torch import nn

from tests.schedule.traces import machine

SLOW = machine(1e8)
"""A disk so slow that units are always worth it."""


def seeded(nbytes=0):
    return torch.Generator().manual_seed(nbytes)


class Tables(nn.Module):
    """Rows of tables by every operator that reads rows, and a table whose rows are also read whole."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4096, 96)  # 1.5 MiB: rows of 384 bytes share granules
        self.rows = nn.Parameter(torch.randn(1200, 300))  # rows of 1,200 bytes cross granules
        self.register_buffer("pair", torch.randn(2, 2048, 128))
        self.dense = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.head = nn.Linear(96, 4096, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, index):
        x = self.words(ids)
        for one in self.dense:
            x = torch.tanh(one(x))
        return self.head(x), self.rows[index], torch.index_select(self.pair[1], 0, index)


class Rows(nn.Module):
    """One table of 1,024 rows of 4,096 bytes, each a granule of its own."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(1024, 1024)

    def forward(self, ids):
        rows = self.words(ids)
        return rows * 2


class Experts(nn.Module):
    """Layers of experts, called as transformers calls them; the route is an input."""

    def __init__(self, dtype, *, layers=3, experts=16, width=128):
        super().__init__()
        self.gate_up = nn.ParameterList(
            torch.randn(experts, 4 * width, width, generator=seeded(i)).to(dtype) * width**-0.5
            for i in range(layers)
        )
        self.down = nn.ParameterList(
            torch.randn(experts, width, 2 * width, generator=seeded(i)).to(dtype) * width**-0.5
            for i in range(layers)
        )
        self.mix = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers))
        self.product = torch._grouped_mm
        if dtype != torch.bfloat16:
            import transformers.integrations.moe  # noqa: F401 - which registers the operator

            self.product = torch.ops.transformers.grouped_mm_fallback

    def stacks(self, layer):
        """The weights of a layer's experts."""
        return self.gate_up[layer], self.down[layer]

    def forward(self, x, routes):
        for k, (mix, route) in enumerate(zip(self.mix, routes, strict=True)):
            up, down = self.stacks(k)
            x = mix(x)
            chosen = route.reshape(-1)
            order = torch.argsort(chosen)
            counts = torch.histc(chosen.float(), up.shape[0], 0, up.shape[0] - 1)
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, value = self.product(x[order // route.shape[1]], up.transpose(-2, -1), ends).chunk(2, -1)
            out = self.product(torch.tanh(gate) * value, down.transpose(-2, -1), ends)
            back = torch.empty_like(order).index_put_((order,), torch.arange(order.shape[0]))
            x = x + out[back].view(*route.shape, -1).mean(1)
        return x


class Quantised(Experts):
    """Experts of 8 bits, numbers and then integers, each with a scale for a row or for half of it."""

    def __init__(self, dtype):
        super().__init__(dtype, layers=2, experts=32)
        self.dtype = dtype
        for name in ("gate_up", "down"):
            for k, stack in enumerate(getattr(self, name)):
                blocks = stack.detach().float().unflatten(2, (2, -1))  # two in each row
                scale = blocks.abs().amax((2, 3) if k == 0 else 3) / 120
                divided = blocks / (scale[..., None, None] if k == 0 else scale[..., None])
                kind = torch.float8_e4m3fn if k == 0 else torch.int8
                self.register_buffer(f"{name}_{k}", divided.round().to(kind).flatten(2))
                self.register_buffer(f"{name}_{k}_scale", scale)
            delattr(self, name)

    def stacks(self, layer):
        return self._stack(f"gate_up_{layer}"), self._stack(f"down_{layer}")

    def _stack(self, name):
        stack, scale = getattr(self, name), getattr(self, f"{name}_scale")
        if scale.dim() == 2:
            return (stack.to(torch.float32) * scale[:, :, None]).to(self.dtype)
        blocks = stack.view(stack.shape[0], stack.shape[1], 2, -1).to(self.dtype)
        scaled = (blocks * scale.to(self.dtype)[..., None]).reshape(stack.shape)
        return scaled


class Mixed(nn.Module):
    """A table, dense layers that are larger than all experts, and two layers of experts."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4096, 128)
        self.wide = nn.ModuleList(nn.Linear(128, size) for size in (4096, 1024, 9000))
        self.back = nn.ModuleList(nn.Linear(size, 128) for size in (4096, 1024, 9000))
        self.experts = Experts(torch.float32, layers=2)

    def forward(self, ids, routes):
        x = self.table(ids)
        for wide, back in zip(self.wide, self.back, strict=True):
            x = x + back(torch.relu(wide(x)))
        mixed = self.experts(x, routes)
        return mixed


def routes(tokens, seed, *, layers=3, experts=16, asked=2):
    """Different experts for each token and layer: (layers, tokens, asked)."""
    drawn = torch.rand(layers, tokens, experts, generator=seeded(seed))
    return drawn.topk(asked).indices


class Head(nn.Module):
    """An embedding, a dense layer and a head of 64 MiB, of one storage with the embedding if `tied`."""

    def __init__(self, dtype, *, tied):
        super().__init__()
        rows = (64 << 20) // (1024 * dtype.itemsize)
        self.words = nn.Embedding(rows, 1024, dtype=dtype)
        self.dense = nn.Linear(1024, 1024, dtype=dtype)
        self.head = nn.Linear(1024, rows, bias=not tied, dtype=dtype)
        with torch.no_grad():
            self.words.weight.copy_(torch.randn(1024, 1024, generator=seeded()).repeat(rows // 1024, 1) / 32)
            self.head.weight.copy_(self.words.weight.roll(7, 0))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        logits = self.head(torch.tanh(self.dense(self.words(ids))))
        return logits
