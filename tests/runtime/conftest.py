import os
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

import penstock
from tests.cheap_plans import cheap_plans  # noqa: F401
from tests.engines import built
from tests.runtime.compiled_models import compile_models
from tests.runtime.models import Stack


@dataclass(frozen=True)
class Compiled:
    """An artifact, the exported program, and what the eager module answers to `tokens`."""

    path: Path
    exported: ExportedProgram
    tokens: torch.Tensor
    expected: torch.Tensor

    def open(self):
        return penstock.open(self.path)


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    """A packed artifact of a tied stack with a dynamic batch, about 28 MiB of weights."""
    torch.manual_seed(0)
    module = Stack().eval()
    tokens = torch.randint(0, 300, (3, 7))
    exported = export(module, (tokens,), dynamic_shapes=({0: Dim("batch", min=2, max=64)},))
    path = tmp_path_factory.mktemp("stack") / "stack.penstock"
    penstock.compile(exported, path)
    with torch.no_grad():
        return Compiled(path, exported, tokens, module(tokens))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, compiler):
    """Two models that Inductor compiled, with all weights of more than a kilobyte streamed."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of all workers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_models(base / "compiled")


@pytest.fixture(scope="session")
def runner():
    """penstock-run."""
    return built("run/penstock-run", "build-run")


@pytest.fixture
def run(runner, tmp_path):
    """Runs it in an empty folder, without any variable of Python's."""

    def run(*arguments, trust=True):
        command = [str(runner), *(["--trust"] if trust else []), *map(str, arguments)]
        environment = {"PATH": os.defpath, "TMPDIR": str(tmp_path)}
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=200
        )

    return run
