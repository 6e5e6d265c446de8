"""Kinds of blocks that random programs are made of: layers that keep nothing from call to call.

A block is made of a `random.Random`, a width and a dtype. It takes `x` [batch, length, width] of that dtype
and `ids` [batch, length] below `TOKENS`, and returns a tensor like `x`. What it draws stands in its `repr`.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

TOKENS = 24
HEADS = 4


class Block(nn.Module):
    """The base of all kinds."""

    def __init__(self, drawn, width, dtype):
        super().__init__()
        self.width, self.dtype, self.drawn = width, dtype, dict[str, Any]()
        self.make(drawn)

    def make(self, drawn):
        """Make the weights."""
        raise NotImplementedError

    def draw(self, drawn, name, *choices):
        """Draw a choice and note it."""
        self.drawn[name] = drawn.choice(choices)
        return self.drawn[name]

    def weight(self, *shape, grad=False):
        scale = max(1, shape[-1]) ** -0.5 if shape else 1.0
        return nn.Parameter((torch.randn(shape) * scale).to(self.dtype), requires_grad=grad)

    def linear(self, inner, outer, *, bias=True):
        return nn.Linear(inner, outer, bias=bias, dtype=self.dtype)

    def extra_repr(self):
        return ", ".join(f"{name}={value}" for name, value in self.drawn.items())


class Linear(Block):
    """A product with a weight that lies in any order, with or without grad and bias."""

    def make(self, drawn):
        order = self.draw(drawn, "order", "dense", "transposed", "sliced", "expanded")
        weight = self.weight(self.width, self.width)
        if order == "transposed":
            weight = self.weight(self.width, self.width).t()
        elif order == "sliced":
            weight = self.weight(2 * self.width, self.width)[::2]
        elif order == "expanded":
            weight = self.weight(1, self.width).expand(self.width, -1)
        self.matrix = nn.Parameter(weight.detach(), requires_grad=self.draw(drawn, "grad", True, False))
        self.bias = self.weight(self.width) if self.draw(drawn, "bias", True, False) else None

    def forward(self, x, ids):
        return functional.linear(x, self.matrix, self.bias)


class Gated(Block):
    """A gated product of two linears, the activation drawn."""

    def make(self, drawn):
        self.up = self.linear(self.width, 4 * self.width, bias=self.draw(drawn, "bias", True, False))
        self.down = self.linear(2 * self.width, self.width)
        self.activation = self.draw(drawn, "activation", "silu", "gelu", "relu", "hardswish", "mish", "elu")
        self.norm = nn.RMSNorm(self.width, dtype=self.dtype)

    def forward(self, x, ids):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(getattr(functional, self.activation)(gate) * up)


class Norms(Block):
    """A norm of any kind; those that keep statistics are in eval mode."""

    def make(self, drawn):
        kind = self.draw(drawn, "norm", "layer", "rms", "group", "batch", "instance", "plain", "normalize")
        made = {
            "layer": lambda: nn.LayerNorm(self.width, dtype=self.dtype),
            "rms": lambda: nn.RMSNorm(self.width, dtype=self.dtype),
            "group": lambda: nn.GroupNorm(4, self.width, dtype=self.dtype),
            "batch": lambda: nn.BatchNorm1d(self.width, dtype=self.dtype),
            "instance": lambda: nn.InstanceNorm1d(
                self.width, affine=True, track_running_stats=True, dtype=self.dtype
            ),
            "plain": lambda: nn.LayerNorm(self.width, elementwise_affine=False),
            "normalize": nn.Identity,
        }
        self.norm = made[kind]()
        for name, buffer in self.norm.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape) + ("var" in name))

    def forward(self, x, ids):
        kind = self.drawn["norm"]
        if kind == "normalize":
            return functional.normalize(x, dim=-1)
        if kind in {"group", "batch", "instance"}:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x)


class Attention(Block):
    """Attention whose queries, keys and values are views of one weight, with a mask of several kinds."""

    def make(self, drawn):
        self.qkv = self.linear(self.width, 3 * self.width, bias=self.draw(drawn, "bias", True, False))
        self.out = self.linear(self.width, self.width, bias=False)
        self.mask_kind = self.draw(drawn, "mask", "none", "causal", "buffer", "added")
        mask = torch.ones(32, 32).tril()
        if self.mask_kind == "buffer":
            self.register_buffer("mask", mask.bool(), persistent=self.draw(drawn, "persistent", True, False))
        elif self.mask_kind == "added":
            self.register_buffer("mask", mask.log().to(self.dtype), persistent=False)

    def forward(self, x, ids):
        batch, length, width = x.shape
        q, k, v = (
            functional.linear(x, w, b).view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for w, b in zip(
                self.qkv.weight.chunk(3),
                [None] * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3),
                strict=True,
            )
        )
        mask = self.mask[:length, :length] if self.mask_kind in {"buffer", "added"} else None
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.mask_kind == "causal")
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Library(Block):
    """torch's own attention and transformer layers, whose kernels depend on their weights' flags.

    They are not called in ways that eager PyTorch runs by a kernel of its own, which no exported program has.
    """

    def make(self, drawn):
        kind = self.draw(drawn, "layer", "attention", "cross", "encoder", "decoder")
        options = {"dropout": 0.1, "dtype": self.dtype}
        if kind in {"attention", "cross"}:
            options |= {"bias": self.draw(drawn, "bias", True, False), "add_zero_attn": kind == "attention"}
            options["batch_first"] = self.draw(drawn, "batch first", True, False)
            self.layer = nn.MultiheadAttention(self.width, HEADS, **options)
        else:
            made = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
            options["norm_first"] = self.draw(drawn, "norm first", True, False)
            self.layer = made(self.width, HEADS, 2 * self.width, **options)
        self.layer.requires_grad_(self.draw(drawn, "grad", True, False))

    def forward(self, x, ids):
        kind, other = self.drawn["layer"], x.tanh()
        if kind == "encoder":
            return self.layer(x)
        if kind == "decoder":
            return self.layer(x, other)
        found, weights = self.layer(x, other if kind == "cross" else x, other)
        return x + found + weights.sum()


class Recurrent(Block):
    """Recurrent layers: of several kinds, deep, in two directions, or cell by cell."""

    def make(self, drawn):
        kind = self.draw(drawn, "cell", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell")
        if kind.endswith("Cell"):
            self.cell = getattr(nn, kind)(self.width, self.width, dtype=self.dtype)
        else:
            both = self.draw(drawn, "both ways", True, False)
            self.cell = getattr(nn, kind)(
                self.width,
                self.width // 2 if both else self.width,
                num_layers=self.draw(drawn, "layers", 1, 2),
                bidirectional=both,
                batch_first=True,
                bias=self.draw(drawn, "bias", True, False),
                dtype=self.dtype,
            )
        self.cell.requires_grad_(self.draw(drawn, "grad", True, False))

    def forward(self, x, ids):
        if not self.drawn["cell"].endswith("Cell"):
            return self.cell(x)[0]
        state = None
        for _ in range(2):
            state = self.cell(x[:, 0], state)
        return x + (state[0] if isinstance(state, tuple) else state)[:, None]


class Convolution(Block):
    """Convolutions over the length, or over length and width as an image."""

    def make(self, drawn):
        kind = self.draw(drawn, "convolution", "plain", "depthwise", "transposed", "dilated", "image")
        options = {"dtype": self.dtype, "bias": self.draw(drawn, "bias", True, False)}
        if kind == "image":
            self.layer = nn.Conv2d(1, 8, 3, padding=1, **options)
            self.back = nn.Conv2d(8, 1, 1, **options)
        elif kind == "transposed":
            self.layer = nn.ConvTranspose1d(self.width, self.width, 3, padding=1, **options)
        else:
            options |= {"groups": self.width} if kind == "depthwise" else {}
            options |= {"dilation": 2, "padding": 2} if kind == "dilated" else {"padding": 1}
            options["padding_mode"] = self.draw(drawn, "padding", "zeros", "replicate")
            self.layer = nn.Conv1d(self.width, self.width, 3, **options)

    def forward(self, x, ids):
        if self.drawn["convolution"] == "image":
            return x + self.back(self.layer(x[:, None]).relu())[:, 0]
        return x + self.layer(x.transpose(1, 2)).transpose(1, 2)


class Rows(Block):
    """Rows of a table, read in any way; some tables are large enough for reads by rows."""

    def make(self, drawn):
        self.way = self.draw(
            drawn,
            "read",
            "embedding",
            "padded",
            "index",
            "select",
            "gather",
            "one hot",
            "bag",
            "take",
            "last",
        )
        rows = TOKENS if self.draw(drawn, "size", "small", "small", "large") == "small" else 16384
        self.table = nn.Embedding(rows, self.width, padding_idx=3, dtype=self.dtype)
        self.bag = nn.EmbeddingBag.from_pretrained(self.table.weight.detach(), mode="sum", freeze=True)

    def forward(self, x, ids):
        table, way = self.table.weight, self.way
        if way in {"embedding", "padded"}:
            rows = functional.embedding(ids, table, 3 if way == "padded" else None)
        elif way == "index":
            rows = table[ids]
        elif way == "select":
            rows = table.index_select(0, ids.flatten()).view_as(x)
        elif way == "gather":
            rows = table.gather(0, ids.flatten()[:, None].expand(-1, self.width)).view_as(x)
        elif way == "one hot":
            rows = functional.one_hot(ids, TOKENS).to(x.dtype) @ table[:TOKENS]
        elif way == "bag":
            rows = self.bag(ids)[:, None]
        elif way == "take":
            rows = torch.take_along_dim(table[:TOKENS], ids[0][:, None], 0)
        else:
            rows = table[-1] + table[2:5].sum(0) + table[ids[:, -1:]]
        return x + rows


class Experts(Block):
    """Experts that tokens are routed to: batched, grouped, or in a loop over all of them with masks."""

    def make(self, drawn):
        self.way = self.draw(drawn, "way", "gathered", "loop", "dense", "grouped", "separate")
        self.count = self.draw(drawn, "experts", 4, 6)
        self.router = self.linear(self.width, self.count, bias=False)
        hidden = self.width * self.draw(drawn, "size", 1, 8)
        if self.way == "separate":
            self.experts = nn.ModuleList(self.linear(self.width, self.width) for _ in range(self.count))
        else:
            self.up = self.weight(self.count, self.width, hidden)
            self.down = self.weight(self.count, hidden, self.width)

    def forward(self, x, ids):
        flat = x.reshape(-1, self.width)
        share, chosen = self.router(flat).softmax(-1).topk(2, -1)
        if self.way == "gathered":
            up, down = self.up[chosen[:, 0]], self.down[chosen[:, 0]]
            found = torch.bmm(torch.bmm(flat[:, None], up).relu(), down)[:, 0] * share[:, :1]
        elif self.way == "grouped":
            order = chosen[:, 0].argsort(stable=True)
            counts = functional.one_hot(chosen[:, 0], self.count).sum(0)
            ends = counts.cumsum(0).to(torch.int32)
            rows = flat[order].to(torch.bfloat16)
            hidden = torch._grouped_mm(rows, self.up.to(torch.bfloat16), offs=ends).relu()
            back = torch._grouped_mm(hidden, self.down.to(torch.bfloat16), offs=ends)
            found = torch.zeros_like(flat).index_copy(0, order, back.to(flat.dtype))
        elif self.way == "dense":
            every = torch.einsum("nw,ewh->neh", flat, self.up).relu()
            every = torch.einsum("neh,ehw->new", every, self.down)
            found = every.gather(1, chosen[:, :, None].expand(-1, -1, self.width)).sum(1)
        else:
            found = torch.zeros_like(flat)
            for k in range(self.count):
                part = self.experts[k](flat) if self.way == "separate" else (flat @ self.up[k]).relu()
                part = part if self.way == "separate" else part @ self.down[k]
                found = found + part * (share * (chosen == k)).sum(-1, keepdim=True)
        return x + found.view_as(x)


class Products(Block):
    """Products of several kinds with weights."""

    def make(self, drawn):
        self.kind = self.draw(drawn, "product", "bilinear", "einsum", "baddbmm", "outer", "distance", "kron")
        self.left, self.right = self.weight(self.width, self.width), self.weight(self.width, self.width)
        self.small = self.weight(self.width // 4, 4)
        self.bilinear = nn.Bilinear(self.width, 4, self.width, dtype=self.dtype)

    def forward(self, x, ids):
        if self.kind == "bilinear":
            return self.bilinear(x, x[..., :4].contiguous())
        if self.kind == "einsum":
            return torch.einsum("blw,wv,uv->blu", x, self.left, self.right)
        if self.kind == "baddbmm":
            return torch.baddbmm(x, x, self.left.expand(x.shape[0], -1, -1), alpha=0.5)
        if self.kind == "outer":
            return x @ torch.outer(self.left[0], self.right[0])
        if self.kind == "distance":
            near = torch.cdist(x.float(), self.left.float()).to(x.dtype)
            return x + near.softmax(-1)
        return x @ torch.kron(self.small, self.small.t().contiguous())


class Sorted(Block):
    """Values that decide an order, cumulative sums, and choices by mask."""

    def make(self, drawn):
        self.kind = self.draw(
            drawn, "by", "sort", "topk", "cumsum", "where", "masked", "flip", "roll", "unique"
        )
        self.matrix = self.weight(self.width, self.width, grad=True)
        self.register_buffer("order", torch.randperm(self.width))

    def forward(self, x, ids):  # noqa: PLR0911
        y = x @ self.matrix
        if self.kind == "sort":
            return y.sort(dim=-1, stable=True).values
        if self.kind == "topk":
            return y + y.topk(3, -1).values.sum(-1, keepdim=True)
        if self.kind == "cumsum":
            return y.cumsum(1)
        if self.kind == "where":
            return torch.where((ids > 7)[..., None], y, x)
        if self.kind == "masked":
            return y.masked_fill((ids % 2 == 0)[..., None], 0.5)
        if self.kind == "flip":
            return y.flip(-1)[..., self.order]
        if self.kind == "roll":
            return y.roll(1, -1).index_select(-1, self.order)
        return y + ids.flatten().bincount(minlength=TOKENS)[:TOKENS].sum().to(x.dtype)


LAYERS = (Linear, Gated, Norms, Attention, Library, Recurrent, Convolution, Rows, Experts, Products, Sorted)
