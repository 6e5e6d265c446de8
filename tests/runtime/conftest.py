from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

import penstock
from penstock.runtime.program import Program
from tests.runtime.compiled_models import Artifact, compile_models
from tests.runtime.models import Stack


@dataclass(frozen=True)
class Compiled:
    """An artifact, the exported program, and what the eager module answers to `tokens`."""

    path: Path
    exported: ExportedProgram
    tokens: torch.Tensor
    expected: torch.Tensor

    def open(self) -> Program:
        return penstock.open(self.path)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
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
def compiled(tmp_path_factory: pytest.TempPathFactory, compiler: None) -> dict[str, Artifact]:
    """Two models that Inductor compiled, with all weights of more than a kilobyte streamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_models(tmp_path_factory.mktemp("compiled"))
