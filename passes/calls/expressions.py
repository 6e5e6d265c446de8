"""Expressions on sizes, parsed by a grammar of their own: what a stored program assumes is data, never
Python.

Export writes what it assumes about sizes as Python, and an artifact stores that text. It may be a stranger's,
so nothing runs it. A parser that knows the forms below, and no others, makes a function of it:

    choice   = operation ["if" operation "else" choice]
    operation: or, and, not, one of == != < <= > >=, |, ^, &, + -, * / // %, the signs + -, **
    operand  = number | constant | "(" choice ")" | function "(" choice {"," choice} ")" | leaf | symbol
    leaf     = "leaves" "[" n "]" [".storage_offset()" | (".size()" | ".stride()" | ".shape") "[" n "]"]

Operators bind as in Python. The functions are those of FUNCTIONS, constants those of CONSTANTS. A symbol is
the name of a dynamic size.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch

from penstock.schedule.facts.errors import PassError

Compute = Callable[[Mapping[str, int], Sequence[Any]], Any]
"""Computes an expression at sizes, by symbol, for the leaves of a call.

It raises ArithmeticError, LookupError or TypeError where the expression has no value there.
"""

_LONGEST, _DEEPEST, _LARGEST = 100_000, 100, 1 << 256
"""The most characters of an expression, the most levels of it, and the largest number that it may reach."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,40}(?:\.\d{0,40})?(?:e[+-]?\d{1,4})?)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)"
    r"|(?P<sign>\.(?:size|stride|storage_offset)\(\)|\.shape|\*\*|//|[=!<>]=|[-+*/%|^&<>()\[\],]))",
    re.ASCII,
)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int) and abs(exponent) > _LARGEST.bit_length():
        raise OverflowError(f"the exponent {exponent} is too large")
    return base**exponent


def _round(value: Any, digits: Any = None) -> Any:
    if digits is not None and abs(digits) > _LARGEST.bit_length():
        raise OverflowError(f"{digits} digits are too many")
    return round(value, digits)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, bool, float, int, max, min)},
    "round": _round,
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "log2", "sqrt", "trunc")},
    **{f"math.{name}": getattr(math, name) for name in ("cos", "sin", "tan", "acos", "asin", "atan")},
    **{f"math.{name}": getattr(math, name) for name in ("cosh", "sinh", "tanh")},
    "torch.sym_float": float,
    "torch._sym_sqrt": math.sqrt,
}

CONSTANTS: Mapping[str, Any] = {
    "True": True,
    "False": False,
    "math.inf": math.inf,
    "math.nan": math.nan,
    "math.pi": math.pi,
}

_OPERATORS: Mapping[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "==": (4, operator.eq),
    "!=": (4, operator.ne),
    "<": (4, operator.lt),
    "<=": (4, operator.le),
    ">": (4, operator.gt),
    ">=": (4, operator.ge),
    "|": (5, operator.or_),
    "^": (6, operator.xor),
    "&": (7, operator.and_),
    "+": (8, operator.add),
    "-": (8, operator.sub),
    "*": (9, operator.mul),
    "/": (9, operator.truediv),
    "//": (9, operator.floordiv),
    "%": (9, operator.mod),
    "**": (11, _power),
}
"""How strongly each operator binds, and what it computes. "or" binds as 1, "and" as 2, "not" 3, a sign 10."""

_BINDS = {"or": 1, "and": 2} | {sign: binds for sign, (binds, _) in _OPERATORS.items()}


@lru_cache(maxsize=4096)
def parse(text: str) -> Compute:
    """The function that an expression is. Raises PassError for text that is none."""
    parser = _Parser(text)
    compute = parser.choice(0)
    parser.expect("")
    return compute


class _Parser:
    """Reads the tokens of one expression; the empty token ends it."""

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _LONGEST:
            self._refuse(f"{len(text)} characters, which are too many")
        self._tokens: list[tuple[str, str]] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            token = _TOKEN.match(text, position)
            if token is None:
                self._refuse(repr(text[position : position + 20]))
            self._tokens.append((str(token.lastgroup), token[str(token.lastgroup)]))
            position = token.end()
        self._tokens = [*reversed(self._tokens)]

    @property
    def _next(self) -> str:
        return self._tokens[-1][1] if self._tokens else ""

    def expect(self, token: str) -> None:
        if self._next != token:
            self._refuse(repr(self._next))
        if token:
            self._tokens.pop()

    def _refuse(self, got: str) -> NoReturn:
        shown = self._text if len(self._text) <= 80 else f"{self._text[:80]}..."
        raise PassError(
            f"{shown!r} is no expression of sizes that penstock knows, because of {got}: compile again, or "
            "export the program without this assumption"
        )

    def choice(self, depth: int) -> Compute:
        chosen = self._operation(0, depth)
        if self._next != "if":
            return chosen
        self.expect("if")
        condition = self._operation(0, depth)
        self.expect("else")
        other = self.choice(self._deeper(depth))
        return lambda sizes, leaves: (chosen if condition(sizes, leaves) else other)(sizes, leaves)

    def _deeper(self, depth: int) -> int:
        if depth == _DEEPEST:
            self._refuse(f"more than {_DEEPEST} levels")
        return depth + 1

    def _operation(self, binds: int, depth: int) -> Compute:
        """An expression of operators that bind more strongly than `binds`."""
        depth = self._deeper(depth)
        first = self._signed(depth)
        while (strength := _BINDS.get(self._next, 0)) > binds:
            operands = []
            while _BINDS.get(sign := self._next, 0) == strength:
                self.expect(sign)
                # A power binds to the right.
                operands.append((sign, self._operation(strength - 1 if sign == "**" else strength, depth)))
                if strength == 4 and _BINDS.get(self._next, 0) == strength:
                    self._refuse(f"a second comparison {self._next!r}")
            first = _joined(first, operands)
        return first

    def _signed(self, depth: int) -> Compute:
        sign = self._next
        if sign == "not":
            self.expect(sign)
            inverted = self._operation(3, depth)
            return lambda sizes, leaves: not inverted(sizes, leaves)
        if sign in ("-", "+"):
            self.expect(sign)
            signed = self._operation(10, depth)
            return (lambda sizes, leaves: -signed(sizes, leaves)) if sign == "-" else signed
        return self._operand(depth)

    def _operand(self, depth: int) -> Compute:
        kind, token = self._tokens.pop() if self._tokens else ("", "")
        if kind == "number":
            number = int(token) if token.isdigit() else float(token)
            return lambda sizes, leaves: number
        if token == "(":
            inner = self.choice(depth)
            self.expect(")")
            return inner
        if token in CONSTANTS:
            constant = CONSTANTS[token]
            return lambda sizes, leaves: constant
        if token in FUNCTIONS and self._next == "(":
            return self._call(FUNCTIONS[token], depth)
        if token == "leaves":
            return self._leaf()
        if kind != "name" or "." in token or token in FUNCTIONS or token in _WORDS or "__" in token:
            self._refuse(repr(token))
        return lambda sizes, leaves: sizes[token]

    def _call(self, function: Callable[..., Any], depth: int) -> Compute:
        self.expect("(")
        arguments = [self.choice(depth)]
        while self._next == ",":
            self.expect(",")
            arguments.append(self.choice(depth))
        self.expect(")")
        return lambda sizes, leaves: _limited(function(*(argument(sizes, leaves) for argument in arguments)))

    def _leaf(self) -> Compute:
        number = self._index()
        attribute = self._next
        if not attribute.startswith("."):
            return lambda sizes, leaves: _number(leaves[number])
        self.expect(attribute)
        if attribute == ".storage_offset()":
            return lambda sizes, leaves: _tensor(leaves[number]).storage_offset()
        dimension = self._index()
        if attribute == ".stride()":
            return lambda sizes, leaves: _tensor(leaves[number]).stride()[dimension]
        return lambda sizes, leaves: _tensor(leaves[number]).shape[dimension]

    def _index(self) -> int:
        self.expect("[")
        kind, token = self._tokens.pop() if self._tokens else ("", "")
        if kind != "number" or not token.isdigit():
            self._refuse(repr(token))
        self.expect("]")
        return int(token)


_WORDS = ("and", "or", "not", "if", "else", "leaves")


def _joined(first: Compute, operands: Sequence[tuple[str, Compute]]) -> Compute:
    """The value of operands with operators of one strength between them, from left to right."""
    if operands[0][0] in ("and", "or"):
        return _lazy(first, [operand for _, operand in operands], until=operands[0][0] == "or")
    steps = [(_OPERATORS[sign][1], operand) for sign, operand in operands]

    def compute(sizes: Mapping[str, int], leaves: Sequence[Any]) -> Any:
        value = first(sizes, leaves)
        for apply, operand in steps:
            value = _limited(apply(value, operand(sizes, leaves)))
        return value

    return compute


def _lazy(first: Compute, operands: Sequence[Compute], *, until: bool) -> Compute:
    """The first value that is as true as `until`, or the last one; what stands behind it is not computed."""

    def compute(sizes: Mapping[str, int], leaves: Sequence[Any]) -> Any:
        value = first(sizes, leaves)
        for operand in operands:
            if bool(value) is until:
                break
            value = operand(sizes, leaves)
        return value

    return compute


def _limited(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise OverflowError("it is larger than any size")
    return value


def _number(leaf: Any) -> Any:
    if not isinstance(leaf, int | float):
        raise TypeError(f"an input is a {type(leaf).__name__} and no number")
    return leaf


def _tensor(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"an input is a {type(leaf).__name__} and no tensor")
    return leaf
