"""Checks of a method's input leaves, made on every call.

Export records what it assumed about the inputs as ranges of symbols and as guards. A call that breaks an
assumption would run and give wrong results, so all of them are checked before anything runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from penstock.passes.calls.expressions import parse
from penstock.passes.graph.nodes import dtype_name
from penstock.schedule.facts.errors import PassError, StreamError

_NO_VALUE = (ArithmeticError, LookupError, TypeError, ValueError)


class InputChecks:
    """Checks the leaves of calls. A guard is a pair: its text, and an expression (`expressions.py`).

    Raises PassError for a guard that is no expression.
    """

    def __init__(self, leaves: Iterable[Leaf], guards: Iterable[tuple[str, str]]) -> None:
        self._leaves = list(leaves)
        self._guards = [(text, parse(source)) for text, source in guards]

    def check(self, leaves: Sequence[Any]) -> dict[str, int]:
        """Returns the sizes of the symbols. Raises StreamError, which names the input, for a wrong leaf.

        It is raised for another type, dtype, device, rank or size, a size out of its range, a repeated symbol
        with two sizes, a guard that does not hold, and a Python value other than the exported one.
        """
        seen = _Seen({}, [])
        for expected, leaf in zip(self._leaves, leaves, strict=True):
            expected.check(leaf, seen)
        for name, expression, got in seen.derived:
            if expression.value(seen.sizes) not in (None, got):
                _refuse_input(name, f"{expression.value(seen.sizes)}, which is {expression.text}", got)
        for text, guard in self._guards:
            try:
                holds = guard(seen.sizes, leaves)
            except _NO_VALUE as error:
                raise StreamError(f"{text} cannot be checked for this call: {error}; compile again") from None
            if not holds:
                raise StreamError(
                    f"the sizes {self._named(seen.sizes)} break {text}, which held at export and which the "
                    "program relies on: export it for such sizes too"
                )
        return seen.sizes

    def _named(self, sizes: Mapping[str, int]) -> str:
        """The sizes of symbols as text, with the names that users know."""
        dimensions = [size for leaf in self._leaves for size in leaf.dimensions]
        names = {
            dimension.linear[0]: dimension.text
            for dimension in dimensions
            if dimension.linear and dimension.linear[1:] == (1, 0)
        }
        return ", ".join(f"{names.get(symbol, symbol)}={size}" for symbol, size in sizes.items())


@dataclass(frozen=True)
class _Seen:
    """The sizes found in a call's leaves so far: of symbols, and of expressions of several symbols."""

    sizes: dict[str, int]
    derived: list[tuple[str, Dimension, int]]


@dataclass(frozen=True)
class Dimension:
    """A dynamic size: `linear` is (symbol, scale, shift), or None where it depends on several `symbols`.

    A linear size is scale * symbol + shift. `text` is the expression in names that users know, `source` the
    same on `symbols` (`expressions.py`), and `example` its value at export. `lower` and `upper` are included
    in the range; None stands for no limit.
    """

    text: str
    lower: int
    upper: int | None
    example: int
    linear: tuple[str, int, int] | None
    symbols: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        """Raises PassError for a `source` that is no expression, or a scale that no size can have."""
        parse(self.source)
        if self.linear is not None and self.linear[1] <= 0:
            raise PassError(f"{self.text:.80} has the scale {self.linear[1]}: compile again")

    def value(self, sizes: Mapping[str, int]) -> Any:
        """Returns the value at these sizes, None when one of its symbols has none, or it has none itself."""
        if not set(self.symbols) <= sizes.keys():
            return None
        try:
            computed = parse(self.source)(sizes, ())
            return computed if math.isfinite(computed) else None
        except _NO_VALUE:
            return None

    def check(self, name: str, got: int, seen: _Seen) -> None:
        """Raises StreamError for a size that is out of range or contradicts a symbol's size in `seen`."""
        if got < self.lower or (self.upper is not None and got > self.upper):
            _refuse_input(name, f"{self.lower} to {'any size' if self.upper is None else self.upper}", got)
        if self.linear is None:
            seen.derived.append((name, self, got))
            return
        symbol, scale, shift = self.linear
        root, remainder = divmod(got - shift, scale)
        known = seen.sizes.setdefault(symbol, root)
        if remainder or known != root:
            _refuse_input(name, f"{scale * known + shift}, which is {self.text} as in the other inputs", got)


@dataclass(frozen=True)
class TensorLeaf:
    """A leaf that must be a tensor of this dtype, type of device, and shape."""

    name: str
    dtype: torch.dtype
    device: str
    sizes: tuple[int | Dimension, ...]

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return tuple(size for size in self.sizes if isinstance(size, Dimension))

    def check(self, leaf: Any, seen: _Seen) -> None:
        if not isinstance(leaf, torch.Tensor):
            _refuse_input(self.name, "a tensor", type(leaf).__name__)
        if leaf.is_nested:  # which has no shape
            _refuse_input(self.name, "a tensor with a shape", "a nested one")
        if leaf.dtype != self.dtype:
            _refuse_input(self.name, dtype_name(self.dtype), dtype_name(leaf.dtype))
        if leaf.device.type != self.device:
            _refuse_input(self.name, f"a tensor on {self.device}", f"one on {leaf.device}")
        if leaf.dim() != len(self.sizes):
            _refuse_input(self.name, f"{len(self.sizes)} dimensions", f"shape {tuple(leaf.shape)}")
        for position, (expected, got) in enumerate(zip(self.sizes, leaf.shape, strict=True)):
            if not isinstance(expected, int):
                expected.check(f"{self.name}.shape[{position}]", got, seen)
            elif got != expected:
                _refuse_input(f"{self.name}.shape[{position}]", f"{expected}, a static size", got)


@dataclass(frozen=True)
class NumberLeaf:
    """A leaf that must be a Python number of this type, whose value each call chooses."""

    name: str
    type: type
    dimension: Dimension | None

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return () if self.dimension is None else (self.dimension,)

    def check(self, leaf: Any, seen: _Seen) -> None:
        if type(leaf) is not self.type:
            _refuse_input(self.name, f"a value of type {self.type.__name__}", type(leaf).__name__)
        if self.dimension is not None and isinstance(leaf, int):
            self.dimension.check(self.name, leaf, seen)


@dataclass(frozen=True)
class ConstantLeaf:
    """A leaf that must have the Python value that it had at export."""

    name: str
    value: Any
    dimensions: ClassVar[tuple[Dimension, ...]] = ()

    def check(self, leaf: Any, seen: _Seen) -> None:
        if isinstance(leaf, torch.Tensor):
            _refuse_input(self.name, f"the exported value {self.value!r}", "a tensor")
        if type(leaf) is not type(self.value) or not (
            leaf == self.value or (_is_nan(leaf) and _is_nan(self.value))
        ):
            _refuse_input(self.name, f"the exported value {self.value!r}", repr(leaf))


def failed_check(what: str) -> StreamError:
    """Return the error for a check that a program makes of its own, by what torch says of it."""
    first = (what.splitlines() or [""])[0].rstrip(".:; ")
    first = re.sub(r"^Runtime assertion failed for expression (.+) on node '\w+'$", r"\1", first)
    return StreamError(
        f"a check of the program fails for this call: {first}; pass inputs that the model takes"
    )


Leaf = TensorLeaf | NumberLeaf | ConstantLeaf


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _refuse_input(name: str, expected: str, got: object) -> NoReturn:
    raise StreamError(f"input {name}: expected {expected}, got {got}; pass what the program was exported for")
