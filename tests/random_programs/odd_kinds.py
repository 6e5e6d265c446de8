"""Kinds of blocks that random programs are made of: state, views, control flow, odd weights, functorch.

They are made and called as those of `layer_kinds.py`.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.random_programs.layer_kinds import TOKENS, Block

SLOTS = 8


class State(Block):
    """A buffer that each call reads and writes, in one of many ways."""

    def make(self, drawn):
        self.way = self.draw(
            drawn, "write", "add_", "index", "slice", "copy_", "index_copy_", "index_put_", "mul_",
            "scatter_", "fill_", "alias", "int"
        )  # fmt: skip
        self.matrix = self.weight(self.width, self.width)
        self.register_buffer("state", torch.zeros(SLOTS, self.width, dtype=self.dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        if self.way == "alias":
            self.register_buffer("part", self.state[2:4])

    def forward(self, x, ids):
        seen = (x @ self.matrix).mean((0, 1))
        y = x + self.state.sum(0) + self.calls
        self._write(seen, ids)
        return y + self.state[0]

    def _write(self, seen, ids):  # noqa: C901
        where = ids[0, :1] % SLOTS
        match self.way:
            case "add_":
                self.state.add_(seen)
            case "index":
                self.state[1] = seen
            case "slice":
                self.state[:, 2:4] = seen[:2]
            case "copy_":
                self.state.copy_(seen.expand(SLOTS, -1))
            case "index_copy_":
                self.state.index_copy_(0, where, seen[None])
            case "index_put_":
                self.state[where] += seen
            case "mul_":
                self.state.mul_(0.5).add_(seen, alpha=0.25)
            case "scatter_":
                self.state.scatter_(0, where[:, None].expand(1, self.width), seen[None])
            case "fill_":
                self.state[1].fill_(2)
                self.state[0].zero_()
            case "alias":
                self.part.add_(seen)
            case _:
                self.calls += 1


class Cache(Block):
    """Keys and values of the calls before, written at positions that a counter gives."""

    def make(self, drawn):
        self.qkv = self.linear(self.width, 3 * self.width, bias=False)
        self.rolled = self.draw(drawn, "rolled", True, False)
        self.register_buffer("keys", torch.zeros(SLOTS, self.width, dtype=self.dtype), persistent=False)
        self.register_buffer("values", torch.zeros(SLOTS, self.width, dtype=self.dtype), persistent=False)
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x, ids):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.rolled:
            self.keys.copy_(self.keys.roll(1, 0))
            self.values.copy_(self.values.roll(1, 0))
            self.keys[0], self.values[0] = k[0, -1], v[0, -1]
        else:
            self.keys.index_copy_(0, self.at, k[0, -1:])
            self.values.index_copy_(0, self.at, v[0, -1:])
            self.at.copy_((self.at + 1) % SLOTS)
        return x + (q @ self.keys.t()).softmax(-1) @ self.values


class Views(Block):
    """Weights that are views of one another, read through more views."""

    def make(self, drawn):
        self.both = self.weight(2 * self.width, self.width, grad=self.draw(drawn, "grad", True, False))
        self.lower = nn.Parameter(self.both.detach()[self.width :], requires_grad=False)
        self.register_buffer("turned", self.both.detach()[: self.width].t())
        self.way = self.draw(drawn, "read", "chunk", "unbind", "view", "strided", "flat", "diagonal", "dtype")

    def forward(self, x, ids):  # noqa: PLR0911
        width, both = self.width, self.both
        if self.way == "chunk":
            left, right = both.chunk(2)
            return x @ torch.cat([right, left])[:width] + x @ self.lower
        if self.way == "unbind":
            return x @ both.view(2, width, width).unbind(0)[1] + x @ self.turned
        if self.way == "view":
            return x @ both.view(width, 2 * width)[:, ::2]
        if self.way == "strided":
            return x @ both.as_strided((width, width), (1, width), 3)
        if self.way == "flat":
            return x + both.flatten()[7 : 7 + width] + self.lower.reshape(-1)[:width]
        if self.way == "diagonal":
            return x + self.lower.diagonal() + both.unfold(0, 2, 2)[:, 0, 0][:width]
        return x + both.view(torch.uint8)[: x.shape[-1], 0].to(x.dtype) + self.turned.movedim(0, 1)[0]


class Branches(Block):
    """Control flow whose bodies read weights."""

    def make(self, drawn):
        self.kind = self.draw(drawn, "flow", "cond", "nested", "while", "switch", "map")
        self.a, self.b = self.linear(self.width, self.width), self.linear(self.width, self.width, bias=False)
        self.c = self.weight(self.width, self.width)

    def forward(self, x, ids):
        x = x.contiguous()
        if self.kind == "cond":
            return torch.cond(ids.sum() % 2 == 0, self.a, self.b, (x,))
        if self.kind == "nested":

            def inner(y):
                return torch.cond(ids[0, 0] > 5, self.a, lambda z: z @ self.c, (y,))

            return torch.cond(x.sum() > 0, inner, lambda y: self.b(y) * 2, (x,))
        if self.kind == "while":

            def body(i, y):
                return i + 1, torch.tanh(y @ self.c)

            return torch._higher_order_ops.while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x))[1]
        if self.kind == "map":
            from torch._higher_order_ops.map import map as each

            return each(lambda row, c: row @ c, x, self.c)
        weight = torch.where(ids.sum() > 40, self.a.weight, self.b.weight)
        return x @ weight


class Functional(Block):
    """Transforms of functorch over weights, and higher-order operators."""

    def make(self, drawn):
        self.kind = self.draw(drawn, "transform", "vmap", "vmap in", "jvp", "scan", "prefix")
        self.stack = self.weight(3, self.width, self.width)

    def forward(self, x, ids):
        if self.kind == "vmap":
            return torch.vmap(lambda w: x @ w)(self.stack).sum(0)
        if self.kind == "vmap in":
            return torch.vmap(lambda row, w: torch.tanh(row @ w), in_dims=(0, None))(x, self.stack[1])
        if self.kind == "jvp":
            return torch.func.jvp(lambda y: torch.tanh(y @ self.stack[0]), (x,), (torch.ones_like(x),))[1]
        if self.kind == "scan":
            from torch._higher_order_ops.scan import scan

            return (
                scan(lambda a, b: (torch.tanh(a @ self.stack[0] + b), a + b), x[:, 0].contiguous(), x, dim=1)[
                    1
                ]
                + x
            )
        from torch._higher_order_ops.associative_scan import associative_scan

        return associative_scan(lambda a, b: a * 0.5 + b, x @ self.stack[0], dim=1, combine_mode="generic")


class Regions(Block):
    """Regions of a program: autocast, no grad, checkpoints, inference with dropout."""

    def make(self, drawn):
        self.kind = self.draw(drawn, "region", "autocast", "no grad", "grad", "checkpoint", "dropout")
        self.inner = self.linear(self.width, self.width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, ids):
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.inner(x)
            return y.to(x.dtype)
        if self.kind in {"no grad", "grad"}:
            with torch.set_grad_enabled(self.kind == "grad"):
                y = self.inner(x)
            return y + x
        if self.kind == "checkpoint":
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.drop(self.inner(x))


class Noise(Block):
    """Random numbers that a call draws from torch's generator."""

    def make(self, drawn):
        self.kind = self.draw(
            drawn, "noise", "dropout", "normal", "uniform", "bernoulli", "rand", "multinomial"
        )
        self.scale = self.weight(self.width)

    def forward(self, x, ids):
        if self.kind == "dropout":
            return functional.dropout(x, 0.25, training=True) * self.scale
        if self.kind == "normal":
            return x + torch.randn_like(x) * self.scale
        if self.kind == "uniform":
            return x + torch.empty_like(x).uniform_(-1, 1) * self.scale
        if self.kind == "bernoulli":
            return x * torch.bernoulli(self.scale.float().sigmoid()).to(x.dtype)
        if self.kind == "rand":
            return x + torch.rand(self.width, dtype=self.dtype) * self.scale
        rows = torch.multinomial(self.scale.float().sigmoid(), 4)
        return x + self.scale[rows].sum()


class Odd(Block):
    """Weights of odd forms: empty, scalar, of other dtypes, constants, attributes, unused."""

    def make(self, drawn):
        self.form = self.draw(
            drawn, "form", "empty", "scalar", "wide", "narrow", "half", "complex", "int8", "bool", "literal",
            "attribute", "unused", "list", "dict", "named", "one"
        )  # fmt: skip
        width = self.width
        self.matrix = self.weight(width, width)
        self.empty, self.scalar = self.weight(0, width), self.weight()
        self.single = nn.Parameter(torch.randn(1, 1, 1).to(self.dtype), requires_grad=False)
        kinds = {"wide": torch.float64, "narrow": torch.bfloat16, "half": torch.float16}
        self.cast = nn.Parameter(torch.randn(width, width).to(kinds.get(self.form, torch.float64)))
        self.waves = nn.Parameter(torch.randn(width // 2 + 1, dtype=torch.complex64))
        self.register_buffer("quantised", torch.randint(-128, 127, (width, width), dtype=torch.int8))
        self.register_buffer("chosen", torch.rand(width) > 0.5, persistent=False)
        self.attribute = torch.randn(width).to(self.dtype)
        self.parts = nn.ParameterList([self.weight(width) for _ in range(3)])
        self.named = nn.ParameterDict({"q-proj": self.weight(width, width), "0": self.weight(width)})

    def forward(self, x, ids):  # noqa: C901, PLR0911, PLR0912
        match self.form:
            case "empty":
                return torch.cat([self.matrix, self.empty])[: self.width] @ x.transpose(1, 2)[0, :, 0] + x
            case "scalar":
                return x * self.scalar
            case "wide" | "narrow" | "half":
                return (x.to(self.cast.dtype) @ self.cast).to(x.dtype)
            case "complex":
                turned = torch.fft.rfft(x.float()) * self.waves
                return torch.fft.irfft(turned, n=self.width).to(x.dtype)
            case "int8":
                return x @ (self.quantised.to(x.dtype) * 0.01)
            case "bool":
                return torch.where(self.chosen, x, -x) @ self.matrix
            case "literal":
                return (
                    x + torch.tensor([0.5, 1.5], dtype=x.dtype).sum() + torch.arange(self.width).to(x.dtype)
                )
            case "attribute":
                return x + self.attribute
            case "unused":
                return x.clone()
            case "list":
                return x + sum(self.parts) + self.parts[1]
            case "dict":
                return x @ self.named["q-proj"] + self.named["0"]
            case "named":
                return x @ dict(self.named_parameters())["matrix"]
            case _:
                return x * self.single


class Computed(Block):
    """Weights that are computed of others in each call."""

    def make(self, drawn):
        self.way = self.draw(drawn, "computed", "weight norm", "orthogonal", "spectral", "low rank", "mean")
        self.inner = self.linear(self.width, self.width)
        with torch.no_grad():
            if self.way == "weight norm":
                parametrizations.weight_norm(self.inner)
            elif self.way == "orthogonal" and self.dtype.itemsize > 2:
                parametrizations.orthogonal(self.inner)
            elif self.way == "spectral" and self.dtype.itemsize > 2:
                parametrizations.spectral_norm(self.inner)
        self.up, self.down = self.weight(self.width, 2), self.weight(2, self.width)

    def forward(self, x, ids):
        if self.way == "low rank":
            return functional.linear(x, self.inner.weight + self.up @ self.down, self.inner.bias)
        if self.way == "mean":
            weight = self.inner.weight
            return x @ ((weight - weight.mean()) / (weight.var() + 1e-5).sqrt())
        return self.inner(x)


class Plucked(Block):
    """Sizes that values decide, and checks of them."""

    def make(self, drawn):
        self.way = self.draw(drawn, "sizes", "nonzero", "masked", "item", "repeat", "check")
        self.matrix = self.weight(self.width, self.width)
        self.table = self.weight(TOKENS, self.width)

    def forward(self, x, ids):
        if self.way == "nonzero":
            rows = (ids.flatten() > 3).nonzero()[:, 0]
            return x + (self.table[ids.flatten()[rows]] @ self.matrix).sum(0)
        if self.way == "masked":
            return x + (x[ids > 3] @ self.matrix).sum(0)
        if self.way == "item":
            count = ids[0, 0].item()
            torch._check(count >= 0)
            torch._check(count < TOKENS)
            return x + self.table.narrow(0, 0, count).sum(0)
        if self.way == "repeat":
            return x + self.table.repeat_interleave(2, 0)[ids]
        torch._assert(bool((ids >= 0).all()) if not torch.compiler.is_exporting() else True, "ids are tokens")
        return x @ self.matrix


ODD = (State, Cache, Views, Branches, Functional, Regions, Noise, Odd, Computed, Plucked)
