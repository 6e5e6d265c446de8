"""The core runs where nothing is installed but what penstock requires."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CODE = """
import sys
shut = set({shut})
class Finder:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in shut else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Finder, sys.meta_path)
import torch, penstock
model = torch.nn.Sequential(torch.nn.Embedding(4096, 128), torch.nn.Linear(128, 128)).eval()
program = penstock.compile(torch.export.export(model, (torch.arange(2),)), "run")
for engine in ("auto", "python"):
    plan, options = program.plan("50%", hardware="laptop"), penstock.LoadOptions(engine=engine)
    with program.load(plan=plan, options=options) as module, torch.no_grad():
        assert torch.equal(module(torch.arange(2)), model(torch.arange(2)))
trained = torch.nn.Linear(8, 8)
program = penstock.compile_training(trained, "train", example=(torch.ones(2, 8),), trainable=["*"])
with program.load("100%") as module:
    module(torch.ones(2, 8)).sum().backward()
assert not shut & set(sys.modules)
"""


def required():
    """The distributions that penstock requires, and those that these require."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    found, left = set(), [Requirement(text).name for text in project["dependencies"]]
    while left:
        if (name := canonicalize_name(left.pop())) not in found:
            found.add(name)
            try:
                needs = map(Requirement, requires(name) or ())
            except PackageNotFoundError:
                continue
            left += [
                need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
            ]
    return found


def test_programs_run_without_any_extra(tmp_path):
    allowed = {*required(), "penstock"}
    shut = [
        name
        for name, owners in packages_distributions().items()
        if not allowed.intersection(map(canonicalize_name, owners))
    ]
    assert {"transformers", "diffusers", "onnx", "executorch"} <= {*shut}
    command = [sys.executable, "-c", CODE.format(shut=shut)]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
