"""A compile that is killed at any time leaves the old artifact, or the new one whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.export import export

import penstock

# Once torch is imported, every line of input begins a new compiling process, which costs no import.
COMPILER = """
import os, sys
import torch
import penstock
from tests.runtime.test_killed_compile import exported
torch.set_num_threads(1)
programs = [exported(1.0), exported(2.0)]
for program in programs:
    penstock.compile(program, sys.argv[1], force=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        while True:
            for program in programs:
                penstock.compile(program, sys.argv[1], force=True)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
WIDTH = 256


def exported(value):
    """A linear whose weights are all `value`: every output is `WIDTH * value` for an input of ones."""
    linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    torch.nn.init.constant_(linear.weight, value)
    return export(linear.eval(), (torch.ones(1, WIDTH),))


def test_a_compile_killed_at_any_time_leaves_a_whole_artifact(tmp_path):
    output, times = tmp_path / "model.penstock", random.Random(3)
    known = {output.name}
    left_behind = 0
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", COMPILER, str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as compiler:
        assert compiler.stdin is not None
        assert compiler.stdout is not None
        for most_s in (0, 0, 0.02, 0.05, 0.3):
            compiler.stdin.write("go\n")
            compiler.stdin.flush()
            child = int(compiler.stdout.readline())
            # Most of a compile is no writing: wait for it to begin.
            latest = time.monotonic() + 60
            while set(os.listdir(tmp_path)) <= known:
                assert time.monotonic() < latest, "the compiler writes nothing"
                time.sleep(0.0002)
            time.sleep(times.uniform(0, most_s))
            os.kill(child, signal.SIGKILL)
            assert int(compiler.stdout.readline()) == -signal.SIGKILL
            before, known = known, set(os.listdir(tmp_path))
            left_behind += len(known - before)
            program = penstock.open(output)
            assert program.verify() == program.weight_bytes
            with program.load("100%") as module:
                found = module(torch.ones(1, WIDTH))
            assert found.unique().tolist() in ([1.0 * WIDTH], [2.0 * WIDTH])
        compiler.stdin.close()
    assert compiler.returncode == 0
    assert left_behind, "no kill came while an artifact was being written"
    penstock.compile(exported(3.0), output, force=True)
    assert os.listdir(tmp_path) == [output.name]
