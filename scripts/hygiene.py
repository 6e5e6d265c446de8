"""Checks those rules of the house style that no other checker covers.

Looks at the files that git tracks, or would. Prints one line a finding; exit status 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_FILE_BYTES = 1 << 20
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 5
SOURCES = {".py", ".sh", ".toml", ".md", ".txt", ".yml", ".yaml", ""}
ASCII_ONLY = {".py", ".sh", ".toml"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home|Users|work|opt|mnt)/[\w.-]+")
"""A path that exists on one machine only."""

MICRO = re.compile("[\u00b5\u03bc]s")
"""Microseconds with either sign for micro. They are `us` everywhere, as in the code, which is ASCII."""


def find_tracked(root: Path) -> list[Path]:
    """Files that git tracks or would track, without the links, relative to `root`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.decode()
    paths = sorted({Path(name) for name in listing.split("\0") if name})
    return [path for path in paths if (root / path).is_file() and not (root / path).is_symlink()]


def check_text(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """Findings of any text file as (line, sentence)."""
    lines = text.splitlines()
    if suffix == ".py" and len(lines) > MAX_FILE_LINES:
        yield len(lines), f"{len(lines)} lines: at most {MAX_FILE_LINES}, so split the file"
    for number, line in enumerate(lines, 1):
        if found := MACHINE_PATH.search(line):
            yield number, f"{found.group()} names a place on one machine"
        if MICRO.search(line):
            yield number, "the sign for microseconds: write us"
        if suffix in ASCII_ONLY and not line.isascii():
            yield number, "characters beyond ASCII"


def check_functions(text: str) -> Iterator[tuple[int, str]]:
    """Findings about the size of each function, without its docstring, as (line, sentence)."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            length -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {length} lines: at most {MAX_FUNCTION_LINES}"
        positional = [
            a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in {"self", "cls"}
        ]
        if len(positional) > MAX_POSITIONAL and not is_command(node):
            yield node.lineno, f"{node.name} takes {len(positional)} positional parameters"


def check_assertions(text: str) -> Iterator[tuple[int, str]]:
    """Findings about checks that hold whatever they are given, as (line, sentence)."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name("all"), args=[ast.Call(func=ast.Name("map"), args=[_, _, _, *_])]):
                yield (
                    node.lineno,
                    "map stops at the shorter list, so nothing may be compared: zip them strictly",
                )
            case ast.With(items=[ast.withitem(context_expr=raises)], body=[ast.Pass()]):
                if ast.unparse(raises).startswith("pytest.raises("):
                    yield node.lineno, "nothing is called that could raise"


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether this is a command of the command line: its parameters are options, and never positional."""
    calls = [decorator.func for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr == "command" for call in calls)


def check_file(root: Path, path: Path) -> Iterator[str]:
    """Findings about one file, each as a line to print."""
    if (root / path).stat().st_size > MAX_FILE_BYTES:
        yield f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB"
        return
    if path.suffix not in SOURCES:
        return
    text = (root / path).read_text(encoding="utf-8")
    findings = [*check_text(text, path.suffix)]
    if path.suffix == ".py":
        findings += check_functions(text)
        findings += check_assertions(text) if path.parts[0] == "tests" else ()
    for line, sentence in findings:
        yield f"{path}:{line}: {sentence}"


def check_names(paths: Iterable[Path]) -> Iterator[str]:
    """Yields a finding for each test file whose name another has: pytest imports one of them only."""
    known: dict[str, Path] = {}
    for path in paths:
        if path.parts[0] == "tests" and path.match("test_*.py") and known.setdefault(path.name, path) != path:
            yield f"{path}: has the name of {known[path.name]}"


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    paths = find_tracked(root)
    findings = [finding for path in paths for finding in check_file(root, path)]
    findings += check_names(paths)
    for finding in findings:
        print(finding)
    print(f"hygiene: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
