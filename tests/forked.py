"""Scripts in processes of their own that need not import torch: each is forked from one that has it."""

from __future__ import annotations

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
import torch, torch._dynamo, torch.export, torch._functorch.aot_autograd
import penstock

def enter(folder, code, arguments, environment, warned, out, err):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    warnings.resetwarnings()
    warnings.simplefilter(warned)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
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


@dataclass(frozen=True)
class Done:
    """What a script came to."""

    status: int
    out: str
    err: str


@cache
def _parent(preloaded: Path | None) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", PARENT]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | _with(preloaded)
    )
    atexit.register(_end, process)
    return process


def _with(preloaded: Path | None) -> dict[str, str]:
    return {} if preloaded is None else {"LD_PRELOAD": str(preloaded)}


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def run_forked(
    code: str,
    *arguments: object,
    folder: Path | None = None,
    warnings: str = "error",
    preloaded: Path | None = None,
    **environment: str,
) -> Done:
    """Runs code as `python -W error -c` does in a folder, but for the time that importing torch takes.

    A library that is `preloaded` was loaded before any other of the process.
    """
    process = _parent(preloaded)
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as place:
        out, err = (Path(place, name) for name in ("out", "err"))
        given: dict[str, object] = {
            "code": code,
            "arguments": [*map(str, arguments)],
            "folder": str(folder or Path.cwd()),
        }
        given |= {"environment": os.environ | _with(preloaded) | environment, "warned": warnings}
        process.stdin.write(json.dumps({**given, "out": str(out), "err": str(err)}) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        return Done(status, out.read_text(), err.read_text())
