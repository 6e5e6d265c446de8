"""Scripts in processes of their own that need not import torch: each is forked from one that has it."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PARENT = """
import gc, json, os, sys, warnings
gc.set_threshold(700, 10, 100)  # as in the command line
import networkx, scipy.optimize, scipy.sparse  # which a plan needs
import torch, torch._dynamo, torch.export, torch._functorch.aot_autograd
import penstock.runtime.program

def enter(folder, code, arguments, environment, warned, out, err):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    warnings.resetwarnings()
    warnings.simplefilter(warned)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    main, builtins = sys.modules["__main__"].__dict__, __builtins__
    main.clear()
    main.update(__name__="__main__", __builtins__=builtins)
    exec(compile(code, "<script>", "exec"), main)

gc.freeze()  # so that a fork ends without looking through all that is imported
for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
enter(**given)
"""
"""Forks for each line of JSON that it reads, and prints the exit status.

It computes nothing itself: no thread is there that a fork would lack.
"""


PATHS = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
"""Where a parent finds modules, whatever the test sets that starts it. A script has its own before these."""


@dataclass(frozen=True)
class Done:
    """What a script came to."""

    status: int
    out: str
    err: str


class Parent:
    """A Python that has imported torch, and runs scripts in forks of itself.

    It is that of the tests and has their environment, unless others are given: its scripts have no variables
    then but these. `modules` are imported besides. A library that is `preloaded` was loaded before any other.
    """

    def __init__(self, python=sys.executable, environment=None, modules=(), preloaded=None):
        self._environment, self._preloaded = environment, preloaded
        imports = "".join(f"import {module}\n" for module in modules)
        command = [python, "-W", "error", "-c", imports + PARENT]
        own = self._variables() | (PATHS if environment is None else {})
        self._process = subprocess.Popen(
            command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _variables(self):
        inherited = os.environ if self._environment is None else self._environment
        return {**inherited, **({"LD_PRELOAD": str(self._preloaded)} if self._preloaded else {})}

    def close(self):
        self._process.communicate()

    def run(self, code, *arguments, folder=None, warnings="error", together=False, **environment):
        """Runs code as `python -W error -c` does in a folder, but for the time that importing torch takes.

        With `together`, what goes to stderr is in `out`, between what goes to stdout.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as place:
            out, err = (Path(place, name) for name in ("out", "err"))
            err.touch()
            given = {
                "code": code,
                "arguments": [*map(str, arguments)],
                "folder": str(folder or Path.cwd()),
                "environment": self._variables() | environment,
                "warned": warnings,
                "out": str(out),
                "err": str(out if together else err),
            }
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            status = int(process.stdout.readline())
            return Done(status, out.read_text(), err.read_text())


@cache
def _parent(preloaded):
    parent = Parent(preloaded=preloaded)
    atexit.register(parent.close)
    return parent


def run_forked(code, *arguments, folder=None, warnings="error", preloaded=None, **environment):
    """Runs code as `Parent.run` does, in a fork of one process for all that preload the same library."""
    return _parent(preloaded).run(code, *arguments, folder=folder, warnings=warnings, **environment)
