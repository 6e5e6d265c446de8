"""`make mutants`: changes one thing in the product at a time, and sees whether the closest tests fail.

    python -m tests.mutants [ROOM ...] [--sample 30] [--seed 1] [--all] [--only TEXT]

Each mutant is compiled from a changed syntax tree, in a process forked for it, so that no file is changed. It
runs the tests that reached its line when nothing was changed, the quickest first, until one fails.
docs/testing.md says which changes are made, and lists those that no test can find, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import copy
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOMS = {
    "runtime/stream": ["tests/runtime/stream", "tests/runtime/test_misuse.py"],
    "runtime/arena": ["tests/runtime/arena", "tests/runtime/stream/test_arena_faults.py"],
    "schedule/verify": [
        "tests/schedule/verify",
        "tests/schedule/test_host.py",
        "tests/schedule/test_produced.py",
    ],
    "schedule/search": [f"tests/schedule/test_{name}.py" for name in ("golden_plans", "ladder", "planner")],
    "passes/weights": ["tests/passes/weights", "tests/passes/test_annotate.py"],
    "passes/probes.py": ["tests/passes/test_probes.py", "tests/runtime/stream/test_streamer.py"],
}
"""The tests that are closest to each room."""

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

MEMORY = 6 << 30
EQUIVALENT = re.compile(r"^- `(\S+)`, `(\S+)`: `(.+?)` becomes `(.+?)`", re.M)


@dataclass(frozen=True)
class Mutant:
    """One change of one file: `put` makes it in the file's syntax tree, or takes it back with False."""

    path: str
    scope: str
    line: str
    before: str
    after: str
    put: Callable[[bool], None]

    def __str__(self) -> str:
        return f"`{self.line}`, `{self.scope}`: `{self.before}` becomes `{self.after}`"


def replacements(node: ast.AST, scope: str) -> Iterator[ast.AST]:
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


def _other(kind: Any) -> Any:
    return getattr(ast, SWAPPED[type(kind).__name__])()


def mutants_of(path: str, tree: ast.AST) -> Iterator[Mutant]:
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


def _put(holder: Any, key: Any, old: ast.AST, new: ast.AST, changed: bool) -> None:
    if isinstance(key, tuple):
        getattr(holder, key[0])[key[1]] = new if changed else old
    else:
        setattr(holder, key, new if changed else old)


def _line(statement: ast.AST) -> str:
    return ast.unparse(statement).splitlines()[0]


def _places(node: ast.AST, scope: str, statement: ast.AST) -> Iterator[tuple[Any, Any, Any, str, ast.AST]]:
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


class Compiled(importlib.abc.MetaPathFinder):
    """Imports modules of penstock from the given syntax trees, by path."""

    def __init__(self, trees: Mapping[str, ast.AST]) -> None:
        self._trees = trees

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        file = "/".join(name.split(".")[1:]) + ".py"
        if not name.startswith("penstock.") or file not in self._trees:
            return None
        code = compile(self._trees[file], f"src/penstock/{file}", "exec")  # type: ignore[call-overload]
        loader = type("Loader", (importlib.machinery.SourceFileLoader,), {"get_code": lambda *_: code})
        return importlib.util.spec_from_file_location(name, f"src/penstock/{file}", loader=loader(name, file))


class Reached:
    """A plugin of pytest that notes how long each test took, and which lines of instrumented trees it ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, set[str]] = {}
        self._now = ""
        builtins.__reached__ = self._reach  # type: ignore[attr-defined]

    def _reach(self, line: str) -> None:
        self.lines.setdefault(line, set()).add(self._now)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._now = nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.seconds[report.nodeid] = spent if report.outcome == "passed" else 1e9


class Instrumented(ast.NodeTransformer):
    """Has every statement of a function say that it is reached."""

    def __init__(self, path: str) -> None:
        self._path, self._inside = path, False

    def visit(self, node: ast.AST) -> Any:
        inside, self._inside = self._inside, self._inside or isinstance(node, ast.FunctionDef)
        self.generic_visit(node)
        self._inside = inside
        if not inside or not isinstance(node, ast.stmt):
            return node
        return [*ast.parse(f"__reached__({f'{self._path}:{node.lineno}'!r})").body, node]


def forked(run: Callable[[], object], limit: float) -> str | None:
    """What `run` gave in a child, as JSON; empty where the child died, and None where it took longer."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            os.environ["PYTHONPATH"] = os.path.abspath("src")
            for number, name in ((0, os.devnull), (1, f"{folder}/out"), (2, f"{folder}/err")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
            try:
                Path(folder, "result").write_text(json.dumps(run()))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        deadline = time.monotonic() + limit
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have started
        result = Path(folder, "result")
        if os.environ.get("MUTANTS_SHOW"):
            print(Path(folder, "out").read_text()[-3000:], Path(folder, "err").read_text()[-3000:])
        return result.read_text() if result.exists() else ""


def _run(trees: Mapping[str, ast.AST], tests: list[str], plugin: object = None, each: float = 600.0) -> int:
    """Run tests with modules of these trees, until one fails; returns the exit status of pytest."""

    class Quick:
        def pytest_configure(self) -> None:
            """A failing example need not become smaller."""
            import hypothesis

            phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
            hypothesis.settings.register_profile("mutants", hypothesis.settings.default, phases=phases)
            hypothesis.settings.load_profile("mutants")

    sys.meta_path.insert(0, Compiled(trees))
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--timeout={each:.0f}", "--basetemp"]
    options += [f"{tempfile.tempdir}/pytest", *(["-x"] if plugin is None else [])]
    return int(pytest.main([*options, *tests], [Quick(), *([plugin] if plugin else [])]))


def _baseline(room: str, trees: Mapping[str, ast.AST]) -> Any:
    """How long each test takes that passes, and which of them reach a line; kept until a file changes."""
    closest = [
        file for test in map(Path, ROOMS[room]) for file in (test.rglob("*.py") if test.is_dir() else [test])
    ]
    files = sorted([*closest, *map(Path, trees)])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    kept = Path("build/mutants", f"{room.replace('/', '-')}-{digest}.json")
    if kept.exists():
        return json.loads(kept.read_text())
    changed = {path: Instrumented(path).visit(copy.deepcopy(tree)) for path, tree in trees.items()}
    reached = Reached()

    def measure() -> object:
        _run(changed, ROOMS[room], reached)
        lines = {line: sorted(tests) for line, tests in reached.lines.items()}
        return {"seconds": reached.seconds, "lines": lines}

    result = forked(measure, 1800)
    if not result:
        raise SystemExit(f"the tests of {room} could not be run")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(result)
    return json.loads(result)


def _judge(mutant: Mutant, tree: ast.AST, baseline: Any) -> str:
    """Returns "killed", "timeout" or "survived"."""
    seconds: dict[str, float] = {test: spent for test, spent in baseline["seconds"].items() if spent < 1e9}
    # What only a forked child of a test runs is not seen: then it may be any of them.
    reaching = seconds.keys() & baseline["lines"].get(mutant.line, ()) or seconds
    tests = sorted(reaching, key=seconds.__getitem__)
    each = 10 + 5 * max(seconds[test] for test in tests)
    mutant.put(True)
    try:
        result = forked(
            lambda: _run({mutant.path: tree}, tests, each=each), 20 + each + 3 * sum(map(seconds.get, tests))
        )
    finally:
        mutant.put(False)
    return {None: "timeout", "0": "survived"}.get(result, "killed")


def check_room(room: str, options: argparse.Namespace) -> tuple[int, int]:
    """Try a sample of a room's mutants. Returns how many were not equivalent, and survivors."""
    files = [room] if room.endswith(".py") else sorted(map(str, Path(room).glob("*.py")))
    trees = {file: ast.parse(Path(file).read_text()) for file in files}
    every = [mutant for file, tree in trees.items() for mutant in mutants_of(file, tree)]
    page = Path("docs/testing.md")
    equivalent = {match.groups() for match in EQUIVALENT.finditer(page.read_text() if page.exists() else "")}
    some = [one for one in every if options.only in str(one)]
    if not options.all and len(some) > options.sample:
        some = random.Random(f"{options.seed} {room}").sample(some, options.sample)
    counts = dict.fromkeys(("killed", "timeout", "survived", "equivalent"), 0)
    baseline = _baseline(room, trees)
    for mutant in some:
        known = (mutant.path, mutant.scope, mutant.before, mutant.after) in equivalent
        verdict = "equivalent" if known else _judge(mutant, trees[mutant.path], baseline)
        counts[verdict] += 1
        if verdict in ("survived", "timeout"):
            print(f"{verdict}: {mutant}", flush=True)
    print(f"{room}: {len(some)} of {len(every)} mutants:", ", ".join(f"{n} {k}" for k, n in counts.items()))
    return len(some) - counts["equivalent"], counts["survived"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--sample", type=int, default=30, help="so many mutants of each room")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument("--all", action="store_true", help="all mutants")
    parser.add_argument("--only", default="", help="mutants with this text: a file, a function, a statement")
    options = parser.parse_args()
    for library in ("torch", "torch.export", "numpy", "scipy.sparse", "networkx", "pydantic", "safetensors"):
        importlib.import_module(library)  # once, and not in each child
    results = [check_room(room, options) for room in options.rooms or ROOMS]
    tried, survived = (sum(numbers) for numbers in zip(*results, strict=True))
    print(f"score: {tried - survived} of {tried} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
