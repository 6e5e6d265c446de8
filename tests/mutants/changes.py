"""The changes that `make mutants` makes of a syntax tree, one at a time."""

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

SWAPPED = {
    "min": "max",
    "any": "all",
    "bisect_left": "bisect_right",
    **dict(zip(("Lt", "Gt", "Eq", "Is", "In"), ("LtE", "GtE", "NotEq", "IsNot", "NotIn"), strict=True)),
    **{"Add": "Sub", "BitAnd": "BitOr", "And": "Or"},
}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
"""Operators and functions that are easily mistaken for each other."""

UNCHANGED = {"decorator_list", "annotation", "returns", "bases"}
"""Parts of a syntax tree that say nothing about behaviour, or at import alone."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file: `put` makes it in the file's syntax tree, or takes it back with False."""

    path: str
    scope: str
    line: str
    before: str
    after: str
    put: Callable[[bool], None]

    def __str__(self):
        return f"`{self.line}`, `{self.scope}`: `{self.before}` becomes `{self.after}`"


def replacements(node, scope):
    """Yields what may stand in the place of a node."""
    match node:
        case ast.Compare():
            for number, one in enumerate(node.ops):
                changed = copy.copy(node)
                changed.ops = [*node.ops[:number], _other(one), *node.ops[number + 1 :]]
                yield changed
        case ast.BoolOp() | ast.BinOp(op=ast.Add() | ast.Sub() | ast.BitAnd() | ast.BitOr()):
            changed = copy.copy(node)
            changed.op = _other(node.op)
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool() | int()):
            yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
        case ast.Name(id=name) if name in SWAPPED:
            yield ast.Name(SWAPPED[name], ast.Load())
        case ast.Continue():
            yield ast.Break()
        case (
            ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Delete() | ast.Return(value=None)
        ):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not scope.endswith("__init__"):
            yield ast.Pass()


def _other(kind):
    return getattr(ast, SWAPPED[type(kind).__name__])()


def mutants_of(path, tree):
    """Yields every mutant of a file."""
    seen: dict[str, int] = {}
    for holder, key, node, scope, statement in _places(tree, "", tree):
        news = list(replacements(node, scope))
        if key == "test" and not isinstance(node, ast.Compare | ast.UnaryOp):
            news.append(ast.UnaryOp(ast.Not(), node))
        if isinstance(key, tuple) and key[0] == "ifs":
            news.append(ast.Constant(True))
        for new in news:
            put = partial(_put, holder, key, node, ast.fix_missing_locations(ast.copy_location(new, node)))
            before = _line(statement)
            put(True)
            after = "pass" if isinstance(new, ast.Pass) else _line(new if node is statement else statement)
            put(False)
            found = Mutant(path, scope or "module", f"{path}:{statement.lineno}", before, after, put)
            name = f"{scope}: {before} -> {after}"
            seen[name] = number = seen.get(name, 0) + 1
            yield found if number == 1 else replace(found, after=f"{after} ({number})")


def replaced(path, tree, scope, before, after):
    """Return the mutant that has `after` in the first place of `before`, a statement or expression."""
    places = [
        place for place in _places(tree, "", tree) if place[3] == scope and ast.unparse(place[2]) == before
    ]
    if not places:
        raise ValueError(f"there is no `{before}` in {scope} of {path}")
    holder, key, node, _, statement = places[0]  # a call for its effect comes before its value
    parsed: Any = ast.parse(after).body[0]
    new = ast.copy_location(parsed if isinstance(node, ast.stmt) else parsed.value, node)
    put = partial(_put, holder, key, node, ast.fix_missing_locations(new))
    return Mutant(path, scope, f"{path}:{statement.lineno}", before, after, put)


def _put(holder, key, old, new, changed):
    if isinstance(key, tuple):
        getattr(holder, key[0])[key[1]] = new if changed else old
    else:
        setattr(holder, key, new if changed else old)


def _line(statement):
    return ast.unparse(statement).splitlines()[0]


def _places(node, scope, statement):
    """Yields every node that may be changed, where it hangs, and the scope and the statement it stands in."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or getattr(node, "arg", "") == "strict":
        return  # what a message says, and checks of what cannot be
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}".lstrip(".")
    for field, value in ast.iter_fields(node):
        if field in UNCHANGED:
            continue
        for number, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                inner = child if isinstance(child, ast.stmt) else statement
                if hasattr(child, "lineno"):
                    key = (field, number) if isinstance(value, list) else field
                    yield node, key, child, scope, inner
                yield from _places(child, scope, inner)
