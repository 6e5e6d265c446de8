"""Checks the rules of ARCHITECTURE.md on imports: none goes in a circle, and each in an allowed direction.

All imports give full names: a relative one is a finding, since the rules are on full names. Counts every
import of penstock's own modules, at the top of a file or inside a function; only those under
`if TYPE_CHECKING:` do not count. Prints one line a finding; exit status 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx

PACKAGE = "penstock"
MAX_FILES = 14
"""Files side by side in a folder, `__init__.py` not counted."""

ALLOWED = {
    "schedule": {"schedule"},
    "schedule.facts": {"schedule.facts"},
    "schedule.verify": {"schedule.verify", "schedule.facts"},
    "passes": {"passes", "schedule"},
    "native": {"native", "schedule.facts"},
    "runtime": {"runtime", "native", "passes", "schedule", "_version"},
}
"""What each room may import, by the room's name; the most specific entry decides. Others may import all."""

WITHOUT_TORCH = "schedule"
"""The room that never imports torch."""

CORE, CAPABILITIES = ("passes", "runtime", "schedule"), {"sparse", "training"}
DOORS = {"passes.annotate", "runtime.registered"}
"""The modules of the core that may import a room of a capability; others may not, not even for types."""

LIBRARIES = {
    "diffusers": ("integrations", "models"),
    "executorch": ("backends.executorch",),
    "onnx": ("backends.onnx",),
    "onnx_ir": ("backends.onnx",),
    "onnxruntime": ("backends.onnx",),
    "peft": ("integrations",),
    **dict.fromkeys(("bitsandbytes", "torchao"), ("integrations",)),
    "transformers": ("cli.generate", "integrations", "models"),
}
"""Optional libraries, and the rooms that may import them, also for types."""


def modules_below(package: Path) -> dict[str, Path]:
    """Every module of the package by its full name, links followed."""
    found = {}
    for path in _files(package):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _files(folder: Path) -> Iterator[Path]:
    # Path.rglob follows no links before Python 3.13.
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        elif path.suffix == ".py":
            yield path


def imports_of(tree: ast.AST, *, typed: bool = False) -> Iterator[tuple[str, int]]:
    """Names of modules, or of what is imported from them, that a file imports; for types too if `typed`."""
    for node in ast.iter_child_nodes(tree):
        guards = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
        if not typed and isinstance(node, ast.If) and ast.unparse(node.test) in guards:
            yield from imports_of(ast.Module(node.orelse, []))
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
        yield from imports_of(node, typed=typed)


def import_graph(modules: dict[str, Path]) -> networkx.DiGraph:
    """Modules as nodes, imports as edges with the line of the first one."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(modules)
    for name, path in modules.items():
        for imported, line in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules and target != name and not graph.has_edge(name, target):
                graph.add_edge(name, target, line=line)
    return graph


def circles(graph: networkx.DiGraph) -> Iterator[str]:
    """One shortest circle of each set of modules that import one another."""
    for component in networkx.strongly_connected_components(graph):
        if len(component) > 1:
            inner = graph.subgraph(component)
            shortest = min(networkx.simple_cycles(inner, length_bound=4), key=len, default=sorted(component))
            yield (
                f"{len(component)} modules import one another in a circle: {' -> '.join(shortest)}"
                f" -> {shortest[0]}"
            )


def wrong_directions(graph: networkx.DiGraph, modules: dict[str, Path]) -> Iterator[str]:
    """Imports that go against `ALLOWED`."""
    for name, target, line in graph.edges(data="line"):
        room, other = name.removeprefix(f"{PACKAGE}."), target.removeprefix(f"{PACKAGE}.")
        entry = max((key for key in ALLOWED if _within(room, key)), key=len, default=None)
        if entry is not None and not any(_within(other, allowed) for allowed in ALLOWED[entry]):
            yield f"{modules[name]}:{line}: {entry} may not import {other}"


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def forbidden(modules: dict[str, Path]) -> Iterator[str]:
    """Relative imports, and imports of torch where there may be none."""
    for name, path in modules.items():
        room = name.removeprefix(f"{PACKAGE}.")
        for imported, line in imports_of(ast.parse(path.read_text(encoding="utf-8"))):
            if imported.startswith("."):
                yield f"{path}:{line}: relative import of {imported}: give the full name"
            elif _within(imported, "torch") and _within(room, WITHOUT_TORCH):
                yield f"{path}:{line}: {WITHOUT_TORCH} may not import torch"


def shut_rooms(modules: dict[str, Path]) -> Iterator[str]:
    """Imports of a capability's room elsewhere than at the core's doors, and of libraries in other rooms."""
    for name, path in modules.items():
        room = name.removeprefix(f"{PACKAGE}.")
        core = room.startswith(CORE) and room not in DOORS and not CAPABILITIES.intersection(room.split("."))
        for imported, line in imports_of(ast.parse(path.read_text(encoding="utf-8")), typed=True):
            package, *parts = imported.split(".")
            if core and package == PACKAGE and CAPABILITIES.intersection(parts):
                yield f"{path}:{line}: only {' and '.join(sorted(DOORS))} may import {'.'.join(parts)}"
            rooms = LIBRARIES.get(package)
            if rooms and not any(_within(room, allowed) for allowed in rooms):
                yield f"{path}:{line}: only {', '.join(rooms)} may import {package}"


def crowds(modules: dict[str, Path]) -> Iterator[str]:
    """Folders with too many files side by side, and folders that do not say what they are for."""
    folders: dict[Path, int] = {}
    for path in modules.values():
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    for folder, count in folders.items():
        if count > MAX_FILES:
            yield f"{folder}: {count} files side by side, at most {MAX_FILES}: give some a room of their own"
        start = folder / "__init__.py"
        if not start.exists() or not ast.get_docstring(ast.parse(start.read_text(encoding="utf-8"))):
            yield f"{folder}: no __init__.py that says in a sentence what the folder is for"


def main(package: Path) -> int:
    modules = modules_below(package)
    graph = import_graph(modules)
    findings = [*circles(graph), *wrong_directions(graph, modules), *forbidden(modules)]
    findings += [*shut_rooms(modules), *crowds(modules)]
    for finding in findings:
        print(finding)
    print(f"structure: {len(modules)} modules, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("src") / PACKAGE
    sys.exit(main(given))
