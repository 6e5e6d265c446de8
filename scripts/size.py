"""Counts what somebody has to read, and fails where it is more than `size.toml` allows.

    scripts/size.py           prints one line a figure, with its limit

The limits go down by hand, after a change that made something smaller. Counted are the files that git tracks,
without links: lines as they stand, and tokens of code without comments, docstrings and layout, so that
formatting changes neither.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("passes", "schedule", "runtime", "native", "src")
LAYOUT = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


def main() -> None:
    """Print every figure, and exit with 1 if one is above its limit."""
    rules = tomllib.loads((ROOT / "scripts" / "size.toml").read_text(encoding="utf-8"))
    limits, too_large = rules["limits"], False
    for name, number in figures(read_tracked(), frozenset(rules["vague"])).items():
        over = number > limits[name]
        too_large |= over
        print(f"{name:<20}{number:>9,} of {limits[name]:>9,}{'  too large' if over else ''}")
    sys.exit(too_large)


def read_tracked() -> dict[Path, str]:
    """The text of every Python file and page that git tracks, by its path below the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    paths = [Path(name) for name in listed.decode().split("\0") if name.endswith((".py", ".md"))]
    present = [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in present}


def figures(texts: Mapping[Path, str], vague: Collection[str]) -> dict[str, int]:
    """The figures of a tree, by name; `vague` are the names that say nothing."""
    product = {path: text for path, text in texts.items() if path.suffix == ".py" and path.parts[0] in ROOMS}
    tests = {path: text for path, text in texts.items() if path.suffix == ".py" and path.parts[0] == "tests"}
    tools = [text for path, text in texts.items() if path.suffix == ".py" and path not in product | tests]
    pages = {path: len(text.split()) for path, text in texts.items() if path.suffix == ".md"}
    notes = {path for path in pages if path.parts[:2] == ("docs", "notes")}
    trees = {path: ast.parse(text) for path, text in product.items()}
    return {
        "modules": sum(path.name != "__init__.py" for path in product),
        "product lines": lines(product.values()),
        "product tokens": sum(map(tokens, product.values())),
        "imports": len(imports(trees)),
        "vague names": sum(name in vague for tree in trees.values() for name in names(tree)),
        "test lines": lines(tests.values()),
        "test tokens": sum(map(tokens, tests.values())),
        "tool lines": lines(tools),
        "page words": sum(words for path, words in pages.items() if path not in notes),
        "note words": sum(words for path, words in pages.items() if path in notes),
    }


def lines(texts: Iterable[str]) -> int:
    """The lines of all texts."""
    return sum(text.count("\n") for text in texts)


def tokens(text: str) -> int:
    """The tokens of a file's code; strings that stand alone document what is before them."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    every = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in prose for token in every)


def names(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to values: by assignments, loops, parameters and `except`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def imports(trees: Mapping[Path, ast.AST]) -> set[tuple[str, str]]:
    """Which product module imports which other one, those for type checkers included.

    A package counts where nothing else below it is imported.
    """
    known = {module_name(path) for path in trees}
    edges = set()
    for path, tree in trees.items():
        module, targets = module_name(path), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        targets &= known - {module}
        packages = {target for target in targets if any(other.startswith(f"{target}.") for other in targets)}
        edges |= {(module, target) for target in targets - packages}
    return edges


def module_name(path: Path) -> str:
    """The name under which a file of the product is imported."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else ("penstock", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    main()
