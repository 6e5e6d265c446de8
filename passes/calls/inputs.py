"""The input leaves of an exported program, what it assumes of them, and both as facts of the payload."""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from penstock.passes.calls.checks import ConstantLeaf, Dimension, Leaf, NumberLeaf, TensorLeaf
from penstock.passes.calls.expressions import parse
from penstock.passes.graph.nodes import dtype_name, placeholders_of, size_hint
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Input, Method, Symbol


def describe_method(exported: ExportedProgram, name: str, graph: int) -> Method:
    """Returns the inputs of a method: its leaves in pytree order and the symbols in their shapes.

    A symbol has the name that its dynamic size was given at export, or else the name of the first input that
    has this size (`x.shape[0]`). A dimension that is an expression of symbols (`2*batch`) counts as a symbol
    whose name is the expression.
    """
    names = _names_of_symbols(exported)
    symbols: dict[str, Symbol] = {}
    inputs: list[Input] = []
    for node in user_placeholders(exported):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes = [_size(exported, size, names) for size in value.shape]
            shape = tuple(size if isinstance(size, int) else size.text for size in sizes)
            inputs.append(Input(node.name, dtype_name(value.dtype), shape, str(value.device)))
            dynamic = [size for size in sizes if isinstance(size, Dimension)]
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


def leaves_of(exported: ExportedProgram) -> tuple[Leaf, ...]:
    """Returns, in pytree order, the rules that each leaf of a call must satisfy."""
    names = _names_of_symbols(exported)
    return tuple(_leaf(exported, node, names) for node in user_placeholders(exported))


def guards_of(exported: ExportedProgram) -> tuple[tuple[str, str], ...]:
    """Returns the guards: assumptions of export beyond ranges, each as text and as an expression on `leaves`.

    Export records them as Python on its own names of the inputs, which a stored program keeps. Those that
    follow from the leaves' sizes (one symbol in two inputs) are left out. Raises PassError for a guard that
    names an input which no leaf has, and for one that is no expression of `expressions.py`.
    """
    sources, nodes = _sources(exported), user_placeholders(exported)
    sizes = tuple(_sizes(node.meta.get("val")) for node in nodes)
    ranges = frozenset(exported.range_constraints.items())
    guards = []
    for code in dict.fromkeys(getattr(exported, "_guards_code", ())):
        text, source = code, code
        for name, position in sources:
            text = text.replace(name, nodes[position].name)
            source = source.replace(name, f"leaves[{position}]")
        if "L[" in source:
            raise PassError(
                f"the program relies on {code}, which names an input that cannot be found in its calls: "
                "export with strict=True, or pass inputs in lists, tuples and dictionaries only"
            )
        parse(source)
        if not _follows(source, sizes, ranges):
            guards.append((text.replace(".size()[", ".shape["), source))
    return tuple(guards)


_Sizes = tuple[sympy.Expr | None, ...]
"""The sizes of a leaf. One that checks do not tie to a symbol is None."""


def _sizes(value: object) -> _Sizes:
    shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
    expressions = [
        size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in shape
    ]
    return tuple(size if size.is_Integer or _linear(size) else None for size in expressions)


@lru_cache(maxsize=1024)
def _follows(
    source: str, leaves: tuple[_Sizes, ...], ranges: frozenset[tuple[sympy.Symbol, ValueRanges[Any]]]
) -> bool:
    """Tells whether a guard is a comparison that is known to hold for all sizes that the leaves may have.

    `ranges` has the range of each symbol. A program is asked for its guards several times, and sympy takes
    tens of milliseconds for one.
    """
    tree = ast.parse(source, mode="eval").body
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in _COMPARED:
        return False
    difference = _value(ast.BinOp(tree.left, ast.Sub(), tree.comparators[0]), leaves)
    difference = None if difference is None else sympy.simplify(difference)
    if difference is None or not difference.is_polynomial():
        return False
    bounds = bound_sympy(difference, dict(ranges))
    return bool(_COMPARED[type(tree.ops[0])](bounds))


def _value(tree: ast.expr, leaves: Sequence[_Sizes]) -> sympy.Expr | None:
    """What an expression of sizes and whole numbers in a guard is; None if it has anything else."""
    match tree:
        case ast.Constant(value=int(number)):
            return sympy.Integer(number)
        case ast.BinOp(left, operation, right) if type(operation) in _COMPUTED:
            sides = _value(left, leaves), _value(right, leaves)
            known = None not in sides and (sides[1] != 0 or type(operation) not in (ast.FloorDiv, ast.Mod))
            return _COMPUTED[type(operation)](*sides) if known else None
        case ast.UnaryOp(ast.USub(), operand):
            value = _value(operand, leaves)
            return None if value is None else -value
        case ast.Subscript(
            ast.Call(
                ast.Attribute(ast.Subscript(ast.Name("leaves"), ast.Constant(int(leaf))), "size"), [], []
            ),
            ast.Constant(int(dimension)),
        ):
            return leaves[leaf][dimension]
    return None


_COMPUTED: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_COMPARED: Mapping[type[ast.cmpop], Callable[[Any], bool]] = {
    ast.Eq: lambda difference: difference.lower == difference.upper == 0,
    ast.NotEq: lambda difference: difference.lower > 0 or difference.upper < 0,
    ast.Gt: lambda difference: difference.lower > 0,
    ast.GtE: lambda difference: difference.lower >= 0,
    ast.Lt: lambda difference: difference.upper < 0,
    ast.LtE: lambda difference: difference.upper <= 0,
}
"""Whether a comparison holds, by the bounds of the difference of its sides."""


def _sources(exported: ExportedProgram) -> list[tuple[str, int]]:
    """Returns pairs of a name that guards may have for a leaf, and the position of that leaf."""
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
        # For `*rest`, the signature has rest_0, rest_1, ...
        starts = (f"L['{name}']", f"L['{base}'][{index}]") if index.isdigit() else (f"L['{name}']",)
        paths += [tuple(start + path for start in starts) for path in _paths(child)]
    for name, child in zip(by_name.context or (), by_name.children(), strict=True):
        paths += [(f"L['{name}']{path}",) for path in _paths(child)]
    named = [(name, leaf) for leaf, candidates in enumerate(paths) for name in candidates]
    return named + [(f"L['flat_args'][{leaf}]", leaf) for leaf in range(len(paths))]


def _paths(spec: pytree.TreeSpec) -> list[str]:
    """Returns the Python expressions, such as `[0]['mask']`, that lead from a tree's root to its leaves."""
    if spec.is_leaf():
        return [""]
    children = zip(_keys(spec), spec.children(), strict=True)
    return [key + path for key, child in children for path in _paths(child)]


def _keys(spec: pytree.TreeSpec) -> list[str]:
    """Returns the Python expressions that lead from a node to its children; "?" if they are not known."""
    if spec.type in (list, tuple):
        return [f"[{position}]" for position in range(spec.num_children)]
    names = spec.context
    # The context of a registered class begins with the names of its fields, if it has any.
    if isinstance(names, list) and names and isinstance(names[0], list):
        names = names[0]
    if not isinstance(names, list | tuple) or len(names) != spec.num_children:
        return ["?"] * spec.num_children
    return [f".{name}" if dataclasses.is_dataclass(spec.type) else f"[{name!r}]" for name in names]


_Names = Mapping[sympy.Symbol, sympy.Symbol]
"""Maps the symbols of export to symbols that have the names by which users know these sizes."""


def _names_of_symbols(exported: ExportedProgram) -> _Names:
    """Returns a name for each dynamic size: the user's own, or that of the first input with this size.

    A program that torch.export.save wrote has lost the user's names.
    """
    places: dict[sympy.Symbol, str] = {}
    input_names: dict[sympy.Symbol, str] = {}
    for node in user_placeholders(exported):
        value = node.meta.get("val")
        sizes = [(node.name, value)]
        if isinstance(value, torch.Tensor):
            sizes = [(f"{node.name}.shape[{position}]", size) for position, size in enumerate(value.shape)]
        for place, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                places.setdefault(size.node.expr, place)
                input_names = input_names or _given_names(size.node.shape_env)
    return {symbol: sympy.Symbol(input_names.get(symbol, place)) for symbol, place in places.items()}


def _given_names(environment: Any) -> dict[sympy.Symbol, str]:
    """Returns the names of `torch.export.Dim`s by their symbols."""
    symbols = getattr(environment, "source_to_var", {})
    names = getattr(environment, "source_name_to_debug_name", {})
    return {environment.replace(symbols[place]): name for place, name in names.items() if place in symbols}


def _leaf(exported: ExportedProgram, node: fx.Node, names: _Names) -> Leaf:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes = tuple(_size(exported, size, names) for size in value.shape)
        return TensorLeaf(node.name, value.dtype, value.device.type, sizes)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        dimension = dimension_of(exported, value, names) if isinstance(value, torch.SymInt) else None
        return NumberLeaf(node.name, value.node.pytype, dimension)
    return ConstantLeaf(node.name, value)


def _size(exported: ExportedProgram, size: int | torch.SymInt, names: _Names) -> int | Dimension:
    return size if isinstance(size, int) else dimension_of(exported, size, names)


def dimension_of(
    exported: ExportedProgram, size: torch.SymInt, names: _Names = MappingProxyType({})
) -> Dimension:
    """Returns the dimension of a symbolic size of a program; its text has `names` in place of symbols."""
    expression = size.node.expr
    ranges = bound_sympy(expression, exported.range_constraints)
    lower = 0 if ranges.lower in (-int_oo, -sympy.oo) else max(int(ranges.lower), 0)
    return Dimension(
        text=str(expression.xreplace(names)),
        lower=lower,
        upper=None if ranges.upper in (int_oo, sympy.oo) else int(ranges.upper),
        example=max(size_hint(size), lower),
        linear=_linear(expression),
        symbols=tuple(sorted(str(symbol) for symbol in expression.free_symbols)),
        source=PythonPrinter().doprint(expression),
    )


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
