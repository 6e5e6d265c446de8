"""A random program of one seed: a module of blocks, how it is exported, and the calls that are made of it."""

import copy
import inspect
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from tests.random_programs.layer_kinds import LAYERS, TOKENS
from tests.random_programs.odd_kinds import ODD

KINDS = (*LAYERS, *ODD)

HEADS = ("tensor", "tied", "several", "mapping", "inputs", "weights", "repeated")
"""What a program returns."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Stem(nn.Module):
    """A program: blocks one after another, some of them twice. Each subclass takes other inputs."""

    def __init__(self, blocks, order, head):
        super().__init__()
        first = blocks[0]
        self.blocks, self.order, self.head = nn.ModuleList(blocks), tuple(order), head
        self.table = nn.Embedding(TOKENS, first.width, dtype=first.dtype)
        self.last = nn.Linear(first.width, TOKENS, bias=False, dtype=first.dtype)
        if head == "tied":
            self.last.weight = self.table.weight

    def run(self, y, x, ids):  # noqa: PLR0911
        for k in self.order:
            y = self.blocks[k](y, ids)
        if self.head == "tensor":
            return y
        logits = self.last(y)
        if self.head == "several":
            return logits, y.mean(), [ids + 1, None]
        if self.head == "mapping":
            return {"logits": logits, "sizes": (3, y[:, -1]), "nothing": None}
        if self.head == "inputs":
            return logits, x, ids
        if self.head == "weights":
            return logits, self.table.weight[:2], self.last.weight
        if self.head == "repeated":
            return logits, logits, logits.transpose(0, 1)
        return logits

    def arguments(self, x, ids):
        raise NotImplementedError


class Positional(Stem):
    """The last input is not used."""

    def forward(self, x, ids, unused):
        return self.run(x + self.table(ids), x, ids)

    def arguments(self, x, ids):
        return (x, ids, torch.zeros(2)), {}


class Keyword(Stem):
    """Keyword arguments, a number, and one that is left out."""

    def forward(self, x, *, ids, scale=1.0, nothing=None):
        return self.run(x * scale, x, ids)

    def arguments(self, x, ids):
        return (x,), {"ids": ids, "scale": 0.75}


class Nested(Stem):
    """Inputs in a dictionary of lists and tuples, and a truth value."""

    def forward(self, batch, last):
        x, (ids,) = batch["x"]
        return self.run((x if last else x * 2) + batch["more"], x, ids)

    def arguments(self, x, ids):
        return ({"x": [x, (ids,)], "more": x.roll(1, -1)}, True), {}


class Tokens(Stem):
    """Rows of a table alone."""

    def forward(self, ids):
        x = self.table(ids)
        return self.run(x, x, ids)

    def arguments(self, x, ids):
        return (ids,), {}


class Written(Stem):
    """An input that the call writes."""

    def forward(self, x, ids, log):
        log.add_(1)
        return self.run(x + log, x, ids)

    def arguments(self, x, ids):
        return (x, ids, torch.zeros(x.shape[-1], dtype=x.dtype)), {}


class Twice(Stem):
    """Two inputs, for which one tensor is given."""

    def forward(self, x, ids, other):
        return self.run(x - 0.5 * other, x, ids)

    def arguments(self, x, ids):
        return (x, ids, x), {}


STEMS = (Positional, Keyword, Nested, Tokens, Written, Twice)


@dataclass(frozen=True)
class Method:
    """How a method is exported: for which arguments, with dynamic sizes, by dynamo, and with grad mode on."""

    arguments: Arguments
    dynamic: bool
    strict: bool
    grad: bool


@dataclass(frozen=True)
class Drawn:
    """All that a seed says: the module, its methods, and calls of them with other arguments."""

    seed: int
    module: Stem
    methods: Mapping[str, Method]
    calls: Sequence[tuple[str, Arguments]]
    chosen: Mapping[str, Any]

    @cached_property
    def kinds(self):
        """The kinds of its blocks, of its stem and of its head, and how it is exported."""
        made = {type(one).__name__ for one in [*self.module.blocks, self.module]} | {self.module.head}
        made |= {
            name for name in ("dynamic", "strict") if any(getattr(m, name) for m in self.methods.values())
        }
        return frozenset(made | ({"methods"} if len(self.methods) > 1 else set()))

    def describe(self):
        """What is drawn, in lines."""
        lines = [f"seed {self.seed}: {', '.join(f'{k}={v}' for k, v in self.chosen.items())}"]
        for name, one in self.methods.items():
            lines.append(
                f"  {name}{_sizes(one.arguments)}, dynamic={one.dynamic}, strict={one.strict}, "
                f"grad={one.grad}"
            )
        lines.append(f"  calls: {', '.join(f'{name}{_sizes(given)}' for name, given in self.calls)}")
        for k in self.module.order:
            block = self.module.blocks[k]
            lines.append(f"  blocks[{k}]: {type(block).__name__}({block.extra_repr()})")
        return "\n".join(lines)

    def export(self):
        """Export every method of the module."""
        return {name: _export(self.module, one) for name, one in self.methods.items()}


class DifferentError(AssertionError):
    """Something differs from the module in eager PyTorch, or breaks a promise."""


def difference(one, other):
    """How two values differ, in words; empty if every bit is equal."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if type(one) is type(other) and one == other else f"{one!r}, expected {other!r}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{one.dtype}{list(one.shape)}, expected {other.dtype}{list(other.shape)}"
    if torch.equal(one, other) or torch.equal(_bytes(one), _bytes(other)):
        return ""
    return f"off by {float((one.double() - other.double()).abs().max()):.3g}"


def _bytes(value):
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


class NotExportedError(Exception):
    """torch exports the program in no way."""


def _export(module, method):
    """Export a method as it says, or without what torch refuses: dynamic sizes first, then dynamo."""
    ways = [(method.dynamic, method.strict), (False, method.strict), (False, not method.strict)]
    refusal = None
    for dynamic, strict in dict.fromkeys(ways):
        args, kwargs = copied(method.arguments)
        shapes = None
        if dynamic:
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            shapes = pytree.tree_map(_dynamic, dict(bound))
        try:
            with warnings.catch_warnings(action="ignore"), torch.set_grad_enabled(method.grad):
                return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=strict)
        except Exception as error:
            refusal = error
    raise NotExportedError(f"{type(refusal).__name__}: {refusal}")


def _dynamic(value):
    return {0: Dim.AUTO, 1: Dim.AUTO} if isinstance(value, Tensor) and value.dim() >= 2 else None


def _sizes(given):
    return [list(one.shape) if isinstance(one, Tensor) else one for one in pytree.tree_leaves(given)]


def copied(given):
    """The arguments with a copy of each tensor; what was one tensor stays one."""
    return copy.deepcopy(given)


def draw(seed):
    """The program of a seed."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    dtype = drawn.choice([torch.float32] * 5 + [torch.bfloat16] * 2 + [torch.float64])
    width = drawn.choice([16, 32, 48, 64])
    blocks = [drawn.choice(KINDS)(drawn, width, dtype) for _ in range(drawn.randint(2, 6))]
    order = [*range(len(blocks))]
    if drawn.random() < 0.3:
        order.append(drawn.randrange(len(blocks)))
    stem, head, grads = drawn.choice(STEMS), drawn.choice(HEADS), drawn.choice(["as made", "none", "all"])
    module = stem(blocks, order, head).eval()
    if grads != "as made":
        for weight in module.parameters():
            weight.requires_grad_(grads == "all" and weight.is_floating_point())

    sizes = {"forward": (drawn.choice([1, 2, 3]), drawn.choice([4, 5, 7]))}
    if drawn.random() < 0.25:
        sizes = {"prefill": sizes["forward"], "decode": (sizes["forward"][0], 2)}
    dynamic, strict, grad = drawn.random() < 0.5, drawn.random() < 0.3, drawn.random() < 0.7

    def arguments(batch, length):
        x = torch.randn(batch, length, width).to(dtype)
        return module.arguments(x, torch.randint(0, TOKENS, (batch, length)))

    methods = {
        name: Method(arguments(*size), dynamic and min(size) > 1, strict, grad)
        for name, size in sizes.items()
    }
    calls = []
    for k, name in enumerate([*sizes] * 3):
        batch, length = sizes[name]
        more = k >= len(sizes) and methods[name].dynamic and drawn.random() < 0.5
        calls.append((name, arguments(batch + 2, length + 3) if more else arguments(batch, length)))
    chosen = {"dtype": dtype, "width": width, "stem": stem.__name__, "head": head, "grads": grads}
    return Drawn(seed, module, methods, calls, chosen)
