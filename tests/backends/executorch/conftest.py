"""Exports that several tests look at, each made once."""

import shutil
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("executorch", reason="executorch is not installed: pip install '.[executorch]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ExecuTorch's own, as it is imported
    for name in ("exir", "extension.pybindings.portable_lib"):
        import_module(f"executorch.{name}")

from penstock.backends.executorch import Exported, PenstockPartitioner, read, save
from tests.backends.executorch.et_models import Decoder, Mlp, methods_of

LEAST = 4096
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"


@dataclass(frozen=True)
class Lowered:
    """An export: what ExecuTorch's lowering and its last step returned, the files, and what they say."""

    edge: Any
    program: Any
    path: Path
    exported: Exported


def lower_to(folder, programs, partitioner=None, **options):
    """Lowers programs for penstock with what users call, and writes the files."""
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExecuTorch's own
        given = partitioner or PenstockPartitioner(**{"least": LEAST, **options})
        edge = to_edge_transform_and_lower(programs, partitioner=[given])
        program = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
        path = save(program, folder / "model.pte", force=True)
    return Lowered(edge, program, path, read(path))


@pytest.fixture
def lower(tmp_path):
    """Lowers programs to files of the test's own."""
    return lambda *given, **options: lower_to(tmp_path, *given, **options)


@pytest.fixture
def files(lowered_mlp, tmp_path):
    """A copy of an export that a test may spoil."""
    shutil.copytree(lowered_mlp.path.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model.pte"


@pytest.fixture(scope="session")
def executorch_python():
    """For what runs in ExecuTorch's Python, whose module is compiled for one version of torch.

    Beside another one it may refuse the tensors of any program, without penstock in it.
    """
    from executorch.exir import to_edge
    from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer

    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ExecuTorch's own
        plain = to_edge(torch.export.export(torch.nn.ReLU(), (x,))).to_executorch()
    try:
        (found,) = _load_for_executorch_from_buffer(plain.buffer).run_method("forward", (x,))
    except RuntimeError as error:
        release, (reason, *_) = torch.__version__.partition("+")[0], str(error).splitlines()
        if f"torch=={release}\n" in CONSTRAINTS.read_text():
            raise
        pytest.skip(f"ExecuTorch's Python runs none of its own programs beside torch {release}: {reason}")
    assert torch.equal(found, x)


@pytest.fixture(scope="session")
def mlp():
    torch.manual_seed(0)
    return Mlp().eval()


@pytest.fixture(scope="session")
def lowered_mlp(mlp, tmp_path_factory):
    program = torch.export.export(mlp, (torch.randn(2, 128),))
    return lower_to(tmp_path_factory.mktemp("mlp"), program, budget="70%")


@pytest.fixture(scope="session")
def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture(scope="session")
def lowered_decoder(decoder, tmp_path_factory):
    return lower_to(tmp_path_factory.mktemp("decoder"), methods_of(decoder), keep=("up.*",))
