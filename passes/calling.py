"""How an exported program is called: its trees, its leaves, and what becomes of its outputs.

The graph takes flat leaves and returns flat values. Everything between that and the exported
module's own arguments and results is here, with a check of every leaf before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

from penstock.passes.graphs import dtype_name, size_hint
from penstock.schedule.errors import PassError, StreamError
from penstock.schedule.model import Input, Method, Symbol

_WRITTEN_BACK = {OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION}
_UNDERSTOOD = {*_WRITTEN_BACK, OutputKind.USER_OUTPUT}


def describe_method(exported: ExportedProgram, name: str, graph: int) -> Method:
    """Returns what a method takes: its leaves in pytree order and the symbols in their shapes.

    A dimension that is an expression of symbols (`2*s0`) counts as a symbol of that name.
    """
    symbols: dict[str, Symbol] = {}

    def dimension(size: int | torch.SymInt) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        lower, upper = _bounds(exported, expression)
        example = (
            min(max(size_hint(size), lower), lower if upper is None else upper) if upper else size_hint(size)
        )
        symbols[str(expression)] = Symbol(str(expression), lower, upper, max(example, lower))
        return str(expression)

    inputs = []
    for node in _user_placeholders(exported):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape = tuple(dimension(size) for size in value.shape)
            inputs.append(Input(node.name, dtype_name(value.dtype), shape, str(value.device)))
        elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            inputs.append(Input(node.name, type(value).__name__.removeprefix("Sym").lower()))
        else:
            inputs.append(Input(node.name, type(value).__name__, value=repr(value)))
    return Method(name, graph, tuple(inputs), tuple(symbols.values()))


@dataclass(frozen=True)
class CallingConvention:
    """Turns a call's arguments into checked leaves, and flat values into the call's result."""

    exported: ExportedProgram
    source: torch.device
    target: torch.device

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the leaves in the graph's order.

        Raises StreamError naming the input, what was expected and what it got: for another tree, type,
        dtype, device, rank or size, for a size out of its range, for a repeated symbol with
        two sizes, and for a Python value other than the exported one.
        """
        in_spec = self.exported.call_spec.in_spec
        names = list(in_spec.children()[1].context or ()) if in_spec is not None else []
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        leaves, received = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if received != in_spec:
            raise StreamError(
                f"the call's arguments do not have the tree that was exported: expected {_one_line(in_spec)}, "
                f"got {_one_line(received)}; pass the same positional and keyword arguments as at export"
            )
        sizes: dict[sympy.Symbol, int] = {}
        for node, leaf in zip(_user_placeholders(self.exported), leaves, strict=True):
            self._check_leaf(node, leaf, sizes)
        return leaves

    def finish(
        self, values: Sequence[Any], leaves: Sequence[Any], tensors: Mapping[str, torch.Tensor]
    ) -> Any:
        """Writes mutations of functional programs back, and returns the outputs as the caller's tree.

        `tensors` holds the bound weights by FQN.
        """
        names = [node.name for node in _user_placeholders(self.exported)]
        outputs = []
        for spec, value in zip(self.exported.graph_signature.output_specs, values, strict=True):
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                leaves[names.index(str(spec.target))].copy_(value)
            elif spec.kind in _WRITTEN_BACK:
                tensors[str(spec.target)].copy_(value)
            else:
                outputs.append(value)
        return pytree.tree_unflatten(outputs, self.exported.call_spec.out_spec)

    def _check_leaf(self, node: fx.Node, leaf: Any, sizes: dict[sympy.Symbol, int]) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self._check_tensor(node.name, value, leaf, sizes)
        elif isinstance(value, torch.SymInt):
            if type(leaf) is not int:
                _refuse(node.name, "an int", f"{type(leaf).__name__}")
            self._check_size(node.name, value, leaf, sizes)
        elif isinstance(value, torch.SymFloat | torch.SymBool):
            return
        elif type(leaf) is not type(value) or not (leaf == value or (_is_nan(leaf) and _is_nan(value))):
            _refuse(node.name, f"the exported value {value!r}", f"{leaf!r}")

    def _check_tensor(
        self, name: str, value: torch.Tensor, leaf: Any, sizes: dict[sympy.Symbol, int]
    ) -> None:
        if not isinstance(leaf, torch.Tensor):
            _refuse(name, "a tensor", type(leaf).__name__)
        if leaf.dtype != value.dtype:
            _refuse(name, dtype_name(value.dtype), dtype_name(leaf.dtype))
        device = self.target if value.device.type == self.source.type else value.device
        if leaf.device.type != device.type:
            _refuse(name, f"a tensor on {device}", f"one on {leaf.device}")
        if leaf.dim() != value.dim():
            _refuse(name, f"{value.dim()} dimensions", f"shape {tuple(leaf.shape)}")
        for position, (expected, got) in enumerate(zip(value.shape, leaf.shape, strict=True)):
            self._check_size(f"{name}.shape[{position}]", expected, got, sizes)

    def _check_size(
        self, name: str, expected: int | torch.SymInt, got: int, sizes: dict[sympy.Symbol, int]
    ) -> None:
        if isinstance(expected, int):
            if got != expected:
                _refuse(name, f"{expected}, a static size", str(got))
            return
        expression = expected.node.expr
        lower, upper = _bounds(self.exported, expression)
        if got < lower or (upper is not None and got > upper):
            _refuse(name, f"{lower} to {'any' if upper is None else upper}", str(got))
        wanted = _solve(expression, got, sizes)
        if wanted != got:
            _refuse(name, f"{expression} = {wanted}, as in the inputs before", str(got))


def check_signature(exported: ExportedProgram) -> None:
    """Raises PassError for a program with outputs that are more than results and mutations."""
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in _UNDERSTOOD:
            raise PassError(
                f"output {spec.arg.name!r} is a {spec.kind.name.lower()}, expected results and mutations only: "
                "export the model for inference"
            )


def _user_placeholders(exported: ExportedProgram) -> list[fx.Node]:
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    specs = exported.graph_signature.input_specs
    return [n for n, spec in zip(placeholders, specs, strict=True) if spec.kind is InputKind.USER_INPUT]


def _bounds(exported: ExportedProgram, expression: sympy.Expr) -> tuple[int, int | None]:
    """Returns the inclusive range of a size; None where nothing bounds it from above."""
    ranges = bound_sympy(expression, exported.range_constraints)
    lower = max(int(ranges.lower), 0) if ranges.lower not in (-int_oo, -sympy.oo) else 0
    return lower, None if ranges.upper in (int_oo, sympy.oo) else int(ranges.upper)


def _solve(expression: sympy.Expr, got: int, sizes: dict[sympy.Symbol, int]) -> Any:
    """Returns what a size must be, given the symbols known so far; learns one unknown symbol."""
    known = expression.subs(sizes)
    unknown = list(known.free_symbols)
    if not unknown:
        return known
    if len(unknown) > 1:
        return got
    (symbol,) = unknown
    solutions = [root for root in sympy.solve(known - got, symbol) if root.is_integer]
    if not solutions:
        return f"a value of {expression}"
    sizes[symbol] = int(solutions[0])
    return got


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _one_line(spec: pytree.TreeSpec | None) -> str:
    return " ".join(str(spec).split())


def _refuse(name: str, expected: str, got: str) -> None:
    raise StreamError(f"input {name}: expected {expected}, got {got}; pass what the program was exported for")
