"""The leaves that a method takes: recorded as facts, and checked on every call.

What export only assumed about them it wrote down as ranges of symbols and as guards. A call that
breaks one would run, and be wrong: so all of them are checked before anything runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import bound_sympy

from penstock.passes.graphs import dtype_name, placeholders_of, size_hint
from penstock.schedule.errors import PassError, StreamError
from penstock.schedule.model import Input, Method, Symbol

_NAMES = {**SYMPY_INTERP, "math": math, "inf": math.inf}


def describe_method(exported: ExportedProgram, name: str, graph: int) -> Method:
    """Returns what a method takes: its leaves in pytree order and the symbols in their shapes.

    A dimension that is an expression of symbols (`2*s0`) counts as a symbol of that name.
    """
    symbols: dict[str, Symbol] = {}
    inputs: list[Input] = []
    for node in user_placeholders(exported):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = [_size(exported, size) for size in value.shape]
            shape = tuple(size if isinstance(size, int) else size.text for size in sizes)
            inputs.append(Input(node.name, dtype_name(value.dtype), shape, str(value.device)))
            dynamic = [size for size in sizes if isinstance(size, _Dimension)]
            symbols |= {
                size.text: Symbol(size.text, size.lower, size.upper, size.example) for size in dynamic
            }
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            inputs.append(Input(node.name, value.node.pytype.__name__))
        else:
            inputs.append(Input(node.name, type(value).__name__, value=repr(value)))
    return Method(name, graph, tuple(inputs), tuple(symbols.values()))


def user_placeholders(exported: ExportedProgram) -> list[fx.Node]:
    """Returns the placeholders that are no weights, in pytree order."""
    specs = exported.graph_signature.input_specs
    nodes = placeholders_of(exported.graph)
    return [node for node, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT]


class InputChecks:
    """Checks the leaves of calls of one exported program that was moved from one device to another."""

    def __init__(self, exported: ExportedProgram, source: torch.device, target: torch.device) -> None:
        nodes = user_placeholders(exported)
        self._leaves = [_leaf(exported, node, source, target) for node in nodes]
        self._guards = guards_of(exported)

    def check(self, leaves: Sequence[Any]) -> None:
        """Raises StreamError naming the input, what was expected and what it got.

        For another type, dtype, device, rank or size, a size out of its range, a repeated symbol with two
        sizes, a guard that does not hold, and a Python value other than the exported one.
        """
        seen = _Seen({}, [])
        for expected, leaf in zip(self._leaves, leaves, strict=True):
            expected.check(leaf, seen)
        for name, expression, got in seen.derived:
            if expression.value(seen.sizes) not in (None, got):
                _refuse(name, f"{expression.value(seen.sizes)}, which is {expression.text}", got)
        for text, code in self._guards:
            if not eval(code, _NAMES, {"leaves": leaves}):
                raise StreamError(
                    f"the sizes {seen.sizes} break {text}, which held at export and which the program "
                    "relies on: export it for such sizes too"
                )


def guards_of(exported: ExportedProgram) -> list[tuple[str, CodeType]]:
    """Returns what export assumed about the inputs beyond ranges: each as text, and as code on `leaves`.

    Export writes it down as Python on its own names of the inputs, which a stored program keeps.
    Raises PassError for an input that has no such name here.
    """
    sources = _sources(exported)
    guards = []
    for text in dict.fromkeys(getattr(exported, "_guards_code", ())):
        source = text
        for name, position in sources:
            source = source.replace(name, f"leaves[{position}]")
        if "L[" in source:
            raise PassError(
                f"the program relies on {text}, which names an input that cannot be found in its calls: "
                "export with strict=True, or pass inputs in lists, tuples and dictionaries only"
            )
        guards.append((text, compile(source, "<guard>", "eval")))
    return guards


def _sources(exported: ExportedProgram) -> list[tuple[str, int]]:
    """Returns the names that guards may have for a leaf, and its position, for every leaf."""
    spec = exported.call_spec.in_spec
    if spec is None:
        return []
    signature = exported.module_call_graph[0].signature
    names = list(signature.forward_arg_names or ()) if signature else []
    positional, by_name = spec.children()
    paths: list[tuple[str, ...]] = []
    for position, child in enumerate(positional.children()):
        name = names[position] if position < len(names) else ""
        base, _, index = name.rpartition("_")
        # Of `*rest` the signature has rest_0, rest_1, ...
        starts = (f"L['{name}']", f"L['{base}'][{index}]") if index.isdigit() else (f"L['{name}']",)
        paths += [tuple(start + path for start in starts) for path in _paths(child)]
    for name, child in zip(by_name.context or (), by_name.children(), strict=True):
        paths += [(f"L['{name}']{path}",) for path in _paths(child)]
    named = [(name, leaf) for leaf, candidates in enumerate(paths) for name in candidates]
    return named + [(f"L['flat_args'][{leaf}]", leaf) for leaf in range(len(paths))]


def _paths(spec: pytree.TreeSpec) -> list[str]:
    """Returns how each leaf of a tree is reached from its root."""
    if spec.is_leaf():
        return [""]
    children = zip(_keys(spec), spec.children(), strict=True)
    return [key + path for key, child in children for path in _paths(child)]


def _keys(spec: pytree.TreeSpec) -> list[str]:
    """Returns how a node's children are reached from it; "?" in a class that does not say."""
    if spec.type in (list, tuple):
        return [f"[{position}]" for position in range(spec.num_children)]
    names = spec.context
    # Registered classes have the names of their fields first, and what else they need behind.
    if isinstance(names, list) and names and isinstance(names[0], list):
        names = names[0]
    if not isinstance(names, list | tuple) or len(names) != spec.num_children:
        return ["?"] * spec.num_children
    return [f".{name}" if dataclasses.is_dataclass(spec.type) else f"[{name!r}]" for name in names]


class _Expression:
    """A symbolic expression as compiled Python."""

    def __init__(self, expression: sympy.Basic) -> None:
        self.text = str(expression)
        self._symbols = {str(symbol) for symbol in expression.free_symbols}
        self._code: CodeType = compile(PythonPrinter().doprint(expression), "<size>", "eval")

    def value(self, sizes: dict[str, int]) -> Any:
        """Returns the value at these sizes, None when one of its symbols has none."""
        return eval(self._code, _NAMES, sizes) if self._symbols <= sizes.keys() else None


@dataclass(frozen=True)
class _Seen:
    """What a call's leaves have said so far: symbols, and sizes that depend on several of them."""

    sizes: dict[str, int]
    derived: list[tuple[str, _Expression, int]]


class _Dimension:
    """A dynamic size: `scale * symbol + shift`, or an expression that the others give a value."""

    def __init__(self, exported: ExportedProgram, size: torch.SymInt) -> None:
        expression = size.node.expr
        ranges = bound_sympy(expression, exported.range_constraints)
        self.text = str(expression)
        self.lower = 0 if ranges.lower in (-int_oo, -sympy.oo) else max(int(ranges.lower), 0)
        self.upper = None if ranges.upper in (int_oo, sympy.oo) else int(ranges.upper)
        self.example = max(size_hint(size), self.lower)
        self._linear = _linear(expression)
        self._expression = _Expression(expression)

    def check(self, name: str, got: int, seen: _Seen) -> None:
        if got < self.lower or (self.upper is not None and got > self.upper):
            _refuse(name, f"{self.lower} to {'any size' if self.upper is None else self.upper}", got)
        if self._linear is None:
            seen.derived.append((name, self._expression, got))
            return
        symbol, scale, shift = self._linear
        root, rest = divmod(got - shift, scale)
        known = seen.sizes.setdefault(symbol, root)
        if rest or known != root:
            _refuse(name, f"{scale * known + shift}, which is {self.text} as in the other inputs", got)


@dataclass(frozen=True)
class _TensorLeaf:
    name: str
    dtype: torch.dtype
    device: str
    sizes: tuple[int | _Dimension, ...]

    def check(self, leaf: Any, seen: _Seen) -> None:
        if not isinstance(leaf, torch.Tensor):
            _refuse(self.name, "a tensor", type(leaf).__name__)
        if leaf.dtype != self.dtype:
            _refuse(self.name, dtype_name(self.dtype), dtype_name(leaf.dtype))
        if leaf.device.type != self.device:
            _refuse(self.name, f"a tensor on {self.device}", f"one on {leaf.device}")
        if leaf.dim() != len(self.sizes):
            _refuse(self.name, f"{len(self.sizes)} dimensions", f"shape {tuple(leaf.shape)}")
        for position, (expected, got) in enumerate(zip(self.sizes, leaf.shape, strict=True)):
            if not isinstance(expected, int):
                expected.check(f"{self.name}.shape[{position}]", got, seen)
            elif got != expected:
                _refuse(f"{self.name}.shape[{position}]", f"{expected}, a static size", got)


@dataclass(frozen=True)
class _NumberLeaf:
    name: str
    type: type
    dimension: _Dimension | None

    def check(self, leaf: Any, seen: _Seen) -> None:
        if type(leaf) is not self.type:
            _refuse(self.name, f"a value of type {self.type.__name__}", type(leaf).__name__)
        if self.dimension is not None and isinstance(leaf, int):
            self.dimension.check(self.name, leaf, seen)


@dataclass(frozen=True)
class _ConstantLeaf:
    name: str
    value: Any

    def check(self, leaf: Any, seen: _Seen) -> None:
        if isinstance(leaf, torch.Tensor):
            _refuse(self.name, f"the exported value {self.value!r}", "a tensor")
        if type(leaf) is not type(self.value) or not (
            leaf == self.value or (_is_nan(leaf) and _is_nan(self.value))
        ):
            _refuse(self.name, f"the exported value {self.value!r}", repr(leaf))


def _leaf(
    exported: ExportedProgram, node: fx.Node, source: torch.device, target: torch.device
) -> _TensorLeaf | _NumberLeaf | _ConstantLeaf:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        device = target.type if value.device.type == source.type else value.device.type
        sizes = tuple(_size(exported, size) for size in value.shape)
        return _TensorLeaf(node.name, value.dtype, device, sizes)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        dimension = _Dimension(exported, value) if isinstance(value, torch.SymInt) else None
        return _NumberLeaf(node.name, value.node.pytype, dimension)
    return _ConstantLeaf(node.name, value)


def _size(exported: ExportedProgram, size: int | torch.SymInt) -> int | _Dimension:
    return size if isinstance(size, int) else _Dimension(exported, size)


def _linear(expression: sympy.Expr) -> tuple[str, int, int] | None:
    """Returns symbol, scale and shift of an expression linear in one symbol, else None."""
    symbols = list(expression.free_symbols)
    if len(symbols) != 1 or not expression.is_polynomial(*symbols):
        return None
    polynomial = sympy.Poly(expression, *symbols)
    if polynomial.degree() != 1 or polynomial.all_coeffs()[0] <= 0:
        return None
    scale, shift = polynomial.all_coeffs()
    return str(symbols[0]), int(scale), int(shift)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    raise StreamError(f"input {name}: expected {expected}, got {got}; pass what the program was exported for")
