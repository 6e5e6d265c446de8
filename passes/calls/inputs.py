"""The input leaves of a program: what it assumes of them, as facts of the payload and as checks."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from penstock.passes.calls.expressions import parse
from penstock.passes.graph.nodes import dtype_name, placeholders_of, size_hint
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import Input, Method, Symbol
from penstock.schedule.payload.text import short

_Record = TypeVar("_Record")


def checked(record: _Record) -> _Record:
    """The record, a dataclass. Raises PassError where a field has a value of another type than it says."""
    kind: Any = type(record)
    for name, hint in _hints(kind).items():
        if not _fits(value := getattr(record, name), hint):
            refuse(value, f"{name} of a {kind.__name__}")
    return record


def refuse(value: object, kind: str) -> NoReturn:
    """Raises PassError for a stored value that is not what it should be."""
    raise PassError(f"{short(value)} is no {kind}: compile again")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is tuple:
        each = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    if origin is Mapping:
        key, content = inner
        return isinstance(value, dict) and all(_fits(k, key) and _fits(v, content) for k, v in value.items())
    if hint is type:
        return value in (bool, int, float)
    return hint is Any or (type(value) is int if hint is int else isinstance(value, hint))


_NO_VALUE = (ArithmeticError, LookupError, TypeError, ValueError)


class InputChecks:
    """Checks the leaves of calls by guards: pairs of a text and an expression, or else PassError."""

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


def failed_check(message: str) -> StreamError:
    """Return the error for a check that a program makes of its own, by what torch says of it."""
    first = (message.splitlines() or [""])[0].rstrip(".:; ")
    first = re.sub(r"^Runtime assertion failed for expression (.+) on node '\w+'$", r"\1", first)
    return StreamError(
        f"a check of the program fails for this call: {first}; pass inputs that the model takes"
    )


Leaf = TensorLeaf | NumberLeaf | ConstantLeaf


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _refuse_input(name: str, expected: str, got: object) -> NoReturn:
    raise StreamError(f"input {name}: expected {expected}, got {got}; pass what the program was exported for")


def separate_inputs(module: nn.Module, example: Any) -> Any:
    """An example with a view in place of each tensor that stands twice, or is the module's own."""
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def separate(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in seen:
            seen.add(id(value))
            return value
        return value.detach().requires_grad_(value.requires_grad)

    return pytree.tree_map_only(torch.Tensor, separate, example)


@declare(ensures=("separate inputs",))
def refuse_shared_inputs(exported: ExportedProgram) -> ExportedProgram:
    """Return the program; raise PassError if it reads one input in the place of another.

    That is known where its example has one tensor for both, and only one of them is used.
    """
    inputs = list(_inputs(exported))
    read = {(id(value), of_call): name for node, name, value, of_call in inputs if node.users}
    for node, name, value, of_call in inputs:
        other = read.get((id(value), True)) or (of_call and read.get((id(value), False)))
        if other and not node.users:
            raise PassError(
                f"the program was exported with one tensor for {name} and {other}, and reads the latter for "
                "both: export it again with a clone() of the tensor for one of them"
            )
    return exported


def _inputs(exported: ExportedProgram) -> Iterator[tuple[fx.Node, str, object, bool]]:
    """The inputs of a program: the user's name, the export's tensor, and whether a call gives it."""
    nodes = {node.name: node for node in placeholders_of(exported.graph)}
    specs = exported.graph_signature.input_specs
    leaves = iter(pytree.tree_leaves(exported.example_inputs or ()))
    for spec in specs:
        node, of_call = nodes[spec.arg.name], spec.kind is InputKind.USER_INPUT
        if of_call:
            value, name = next(leaves, None), f"input {node.name!r}"
        else:
            tensors = exported.constants if spec.target in exported.constants else exported.state_dict
            value, name = tensors.get(str(spec.target)), f"its {spec.kind.name.lower()} {spec.target!r}"
        if isinstance(value, torch.Tensor):
            yield node, name, value, of_call


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
    """A name for each dynamic size: the user's own, or that of the first input with this size."""
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
