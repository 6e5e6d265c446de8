"""Scenarios of programs without Python, which are started anew for each call."""

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.export import export

import penstock
from penstock.passes.trace import PRESET_CPU
from penstock.runtime.files.artifact_files import replace_payload
from penstock.schedule.facts.errors import SourceError
from tests.engines import ROOT
from tests.faults.scenario import Plain, Scenario, bits, of_files

BUILD = ROOT / "build"


class WithoutPython(Scenario):
    """`penstock-run` runs compiled code twice, and writes what it computes: `over` a file, or to a new one.

    The weights stream by a plan of the ladder, or into an `arena` with granules of 2 MiB. torch unpacks the
    code in a folder that meets faults as well, and does not always remove it.
    """

    target = "out.safetensors"
    adds = ("temporary/aotinductor_*",)
    always = r"EINTR (open .*/weights|fsync)|EIO fsync $"

    def __init__(self, *, over=True, arena=None):
        self._over, self._arena = over, arena
        self._budget = "60%" if arena is None else "80%"

    def once(self):
        self._made = self.kept / f"planned {self._arena}"
        if self._made.exists():
            return
        self._made.mkdir(parents=True)
        path, width = self._made / "model.penstock", 32 if self._arena is None else 1024
        x = torch.linspace(-1, 1, 2 * width).reshape(2, width)
        given = export(Plain(width).eval(), (x,))
        program = penstock.compile(given, path, lowering="inductor", resident_below="1KiB")
        if self._arena is None:
            program.write_ladder()
        else:
            plan = program.plan(self._budget, arena=self._arena, hardware=PRESET_CPU)
            replace_payload(path, replace(program.payload, plans=(plan,)))
        save_file({"x": x}, self._made / "in.safetensors")

    def prepare(self, root, beside):
        shutil.copytree(self._made, root, dirs_exist_ok=True)
        (root / "temporary").mkdir()
        if self._over:
            (root / self.target).write_bytes(b"old")

    def act(self, root, started):
        return self._run(root, *(["--force"] if self._over else []))

    def again(self, root, started):
        return self._run(root, "--force")

    def found(self, root):
        return of_files(root / self.target)

    def names(self, why, path):
        # What torch has in the folder for temporary files has names of its own.
        named = re.sub(r"\.(.+)\.tmp-[0-9a-f]+", r"\1", Path(path).name)
        return ("temporary" if path.startswith("temporary/") else named) in why

    def _run(self, root, *more):
        given = f"--trust --budget {self._budget} --passes 2 --readers 2 --json".split()
        files = ("--input", root / "in.safetensors", "--output", root / self.target)
        done = subprocess.run(
            [BUILD / "run/penstock-run", root / "model.penstock", *given, *files, *more],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"TMPDIR": str(root / "temporary")},
        )
        if done.returncode == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)  # who is killed here is who acts
        if done.returncode:
            assert done.returncode in (3, 4), (done.returncode, done.stderr)
            assert re.fullmatch(r"penstock-run: .+\n", done.stderr), done.stderr
            assert not done.stdout
            raise SourceError(done.stderr)
        assert not done.stderr, done.stderr
        facts = json.loads(done.stdout)
        assert facts["bytes_moved"] > 0
        return f"{facts['plan_budget']} {facts['misses']} {facts['outputs']}"


class Delegating(Scenario):
    """ExecuTorch runs a program whose weights the delegate streams, three times.

    Its files are mapped, or read, and then the delegate is given the one with the weights. What ExecuTorch
    itself cannot open or map it answers with `AccessFailed`, and takes the next call.
    """

    always = r"(EIO|truncation) mmap model\.pte"

    def __init__(self, mode, kernels="executorch"):
        self._mode, self._kernels = mode, kernels

    def once(self):
        from tests.backends.executorch.delegate.pte_models import Mlp, rows, write_files

        self._made = self.kept / f"exported {self._kernels}"
        if not self._made.exists():
            methods = {"forward": export(Mlp(layers=3).eval(), (rows(),))}
            write_files(self._made, methods, kernels=self._kernels)

    def prepare(self, root, beside):
        shutil.copytree(self._made, root, dirs_exist_ok=True)

    def start(self, root, beside):
        from tests.backends.executorch.delegate.pte_runs import Runner

        folder = BUILD / "executorch"
        return Runner(folder / "run_pte", folder / "libpenstock_executorch.so", beside)

    def act(self, root, started):
        from tests.backends.executorch.delegate.pte_models import Files, rows
        from tests.backends.executorch.delegate.pte_runs import Call, Program

        weights, options = root / "weights.ptd", {"budget": "50%", "readers": 2}
        if self._mode == "mmap":
            program = Program(Files(root / "model.pte", (weights,)), options)
        else:
            program = Program(Files(root / "model.pte"), options | {"weights": str(weights)}, self._mode)
        answers = started([program], [Call([rows()])] * 3)
        errors = {one.error for one in answers} - {"Error::Ok"}
        if errors - {"Error::AccessFailed"} or answers[-1].error != "Error::Ok":
            raise SourceError(" ".join(errors) + ": " + " ".join(started.sentences()))
        return " ".join({bits(*one.outputs) for one in answers if one.outputs})

    def names(self, why, path):
        said = why.partition(": ")[2]  # by the delegate, which does not know the path of its own program
        return not said or Path(path).suffix in said
