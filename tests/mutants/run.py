"""`make mutants`: changes one thing in the product at a time, and sees whether the closest tests fail.

    python -m tests.mutants.run [ROOM ...] [--sample 30] [--seed 1] [--all] [--only TEXT]

Each mutant is compiled from a changed syntax tree, in a process forked for it, so that no file is changed. It
runs the tests that reached its line when nothing was changed, the quickest first, until one fails.
docs/testing.md says which changes are made, and docs/notes/tests.md lists those that no test can find.
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
from pathlib import Path

import pytest

from tests.mutants.changes import mutants_of
from tests.mutants.orders import ORDER_FAULTS

ROOMS = {
    "runtime/stream": [
        "tests/runtime/stream",
        "tests/runtime/test_misuse.py",
        "tests/runtime/test_module.py",
        "tests/native/test_native_engine.py",
    ],
    "runtime/arena": ["tests/runtime/arena", "tests/runtime/stream"],
    "runtime/sparse": ["tests/runtime/sparse"],
    "schedule/verify": [
        "tests/schedule/verify",
        "tests/schedule/test_host.py",
        "tests/schedule/test_produced.py",
    ],
    "schedule/search": [
        "tests/schedule/search",
        *(f"tests/schedule/test_{name}.py" for name in ("golden_plans", "ladder", "planner", "produced")),
    ],
    "schedule/clock": [
        "tests/schedule/clock",
        "tests/schedule/sparse/test_calls.py",
        *(f"tests/schedule/test_{name}.py" for name in ("host", "produced")),
    ],
    "passes/weights": ["tests/passes/weights", "tests/passes/test_annotate.py"],
    "passes/probes.py": ["tests/passes/test_probes.py", "tests/runtime/stream/test_streamer.py"],
    "orders": ["tests/rig/test_orders_on_the_rig.py"],
}
"""The tests that are closest to each room. The room `orders` is the list of faults in orders.py."""

MEMORY = 6 << 30
"""The most that a mutant may take, which may ask for memory without end."""

RIG_MEMORY = MEMORY + (32 << 30)
"""The rig reserves 16 GiB for each of its two devices (tests/rig/memory.h)."""

EQUIVALENT = re.compile(r"^- `(\S+)`, `(\S+)`: `(.+?)` becomes `(.+?)`", re.M)
"""A mutant that docs/notes/tests.md lists, as its file, the function, and the line before and after."""


class Compiled(importlib.abc.MetaPathFinder):
    """Imports modules of penstock from the given syntax trees, by path."""

    def __init__(self, trees):
        self._trees = trees

    def find_spec(self, name, path=None, target=None):
        file = "/".join(name.split(".")[1:]) + ".py"
        if not name.startswith("penstock.") or file not in self._trees:
            return None
        code = compile(self._trees[file], f"src/penstock/{file}", "exec")
        loader = type("Loader", (importlib.machinery.SourceFileLoader,), {"get_code": lambda *_: code})
        return importlib.util.spec_from_file_location(name, f"src/penstock/{file}", loader=loader(name, file))


class Reached:
    """A plugin of pytest that notes how long each test took, and which lines of instrumented trees it ran."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, set[str]] = {}
        self._now = ""
        builtins.__reached__ = self._reach

    def _reach(self, line):
        self.lines.setdefault(line, set()).add(self._now)

    def pytest_runtest_logstart(self, nodeid):
        self._now = nodeid

    def pytest_runtest_logreport(self, report):
        spent = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.seconds[report.nodeid] = spent if report.outcome == "passed" else 1e9


class Instrumented(ast.NodeTransformer):
    """Has every statement of a function say that it is reached."""

    def __init__(self, path):
        self._path, self._inside = path, False

    def visit(self, node):
        inside, self._inside = self._inside, self._inside or isinstance(node, ast.FunctionDef)
        self.generic_visit(node)
        self._inside = inside
        if not inside or not isinstance(node, ast.stmt):
            return node
        return [*ast.parse(f"__reached__({f'{self._path}:{node.lineno}'!r})").body, node]


def forked(run, limit, memory=MEMORY):
    """What `run` gave in a child, as JSON; empty where the child died, and None where it took longer."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
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
        return result.read_text() if result.exists() else ""


def _run(trees, tests, plugin=None, each=600.0):
    """Run tests with modules of these trees, until one fails; returns the exit status of pytest."""

    class Quick:
        def pytest_configure(self):
            """A failing example need not become smaller."""
            import hypothesis

            phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
            hypothesis.settings.register_profile("mutants", hypothesis.settings.default, phases=phases)
            hypothesis.settings.load_profile("mutants")

    sys.meta_path.insert(0, Compiled(trees))
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--timeout={each:.0f}", "--basetemp"]
    options += [f"{tempfile.tempdir}/pytest", *(["-x"] if plugin is None else [])]
    return int(pytest.main([*options, *tests], [Quick(), *([plugin] if plugin else [])]))


def _memory_of(room):
    return RIG_MEMORY if room == "orders" else MEMORY


def _baseline(room, trees):
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

    def measure():
        _run(changed, ROOMS[room], reached)
        lines = {line: sorted(tests) for line, tests in reached.lines.items()}
        return {"seconds": reached.seconds, "lines": lines}

    result = forked(measure, 1800, _memory_of(room))
    if not result:
        raise SystemExit(f"the tests of {room} could not be run")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(result)
    return json.loads(result)


def _judge(mutant, tree, baseline, memory):
    """Returns "killed", "timeout" or "survived"."""
    seconds: dict[str, float] = {test: spent for test, spent in baseline["seconds"].items() if spent < 1e9}
    # What only a forked child of a test runs is not seen: then it may be any of them.
    reaching = seconds.keys() & baseline["lines"].get(mutant.line, ()) or seconds
    tests = sorted(reaching, key=seconds.__getitem__)
    each = 10 + 5 * max(seconds[test] for test in tests)
    mutant.put(True)
    try:
        limit = 20 + each + 3 * sum(map(seconds.get, tests))
        result = forked(lambda: _run({mutant.path: tree}, tests, each=each), limit, memory)
    finally:
        mutant.put(False)
    return {None: "timeout", "0": "survived"}.get(result, "killed")


def mutants_of_room(room):
    """Return the syntax trees of a room's files, by path, and all mutants of them."""
    files = [room] if room.endswith(".py") else sorted(map(str, Path(room).glob("*.py")))
    if room == "orders":
        files = sorted({fault.path for fault in ORDER_FAULTS.values()})
    trees: dict[str, ast.AST] = {file: ast.parse(Path(file).read_text()) for file in files}
    if room == "orders":
        return trees, [fault.mutant(trees[fault.path]) for fault in ORDER_FAULTS.values()]
    return trees, [mutant for file, tree in trees.items() for mutant in mutants_of(file, tree)]


def check_room(room, options):
    """Try a sample of a room's mutants. Returns how many were not equivalent, and survivors."""
    trees, every = mutants_of_room(room)
    page = Path("docs/notes/tests.md")
    equivalent = {match.groups() for match in EQUIVALENT.finditer(page.read_text() if page.exists() else "")}
    some = [one for one in every if options.only in str(one)]
    if not options.all and len(some) > options.sample:
        some = random.Random(f"{options.seed} {room}").sample(some, options.sample)
    counts = dict.fromkeys(("killed", "timeout", "survived", "equivalent"), 0)
    baseline, memory = _baseline(room, trees), _memory_of(room)
    for mutant in some:
        known = (mutant.path, mutant.scope, mutant.before, mutant.after) in equivalent
        verdict = "equivalent" if known else _judge(mutant, trees[mutant.path], baseline, memory)
        counts[verdict] += 1
        if verdict in ("survived", "timeout"):
            print(f"{verdict}: {mutant}", flush=True)
    print(f"{room}: {len(some)} of {len(every)} mutants:", ", ".join(f"{n} {k}" for k, n in counts.items()))
    return len(some) - counts["equivalent"], counts["survived"]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run")
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
