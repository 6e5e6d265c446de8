"""What is code is loaded for who is trusted only, and who that is."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.passes.lowering import compiled
from penstock.runtime.artifact import relink
from tests.trust.hostile import X, change_code, change_payload, make_artifact, use

ROOT = Path(__file__).parents[2]
ASKS = r"open it with trust=True \(--trust\) if you trust whoever made it"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("trust") / "model.penstock")


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "model.penstock"))


class Turned(nn.Module):
    """Multiplies by a complex number, which has no form as data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(torch.complex(self.linear(x), x), 1 + 2j)


def test_a_stored_export_is_not_even_read(tmp_path, monkeypatch):
    model, path = Turned(), tmp_path / "turned.penstock"
    made = penstock.compile(torch.export.export(model, (X,)), path)
    with zipfile.ZipFile(path / "program.zip") as archive:
        assert archive.namelist() == ["forward.pt2"]
    with made.load("100%") as module:  # this process has made it
        expected = module(X)
    with penstock.open(path, trust=True).load("100%") as module:
        assert torch.equal(torch.view_as_real(module(X)), torch.view_as_real(expected))
    monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("it was read"))
    stranger = penstock.open(path)
    assert stranger.plan("100%").budget == stranger.weight_bytes  # which is of facts alone
    for run in (lambda: stranger.load("100%"), lambda: stranger.split_memory("1GiB")):
        with pytest.raises(penstock.PayloadError, match=f"may run code: {ASKS}"):
            run()


def test_machine_code_is_not_even_read(copy, monkeypatch):
    change_payload(copy, lambda payload: payload.update(lowering="inductor"))
    monkeypatch.setattr(compiled, "open_programs", lambda *_: pytest.fail("it was read"))
    program = penstock.open(copy)
    assert program.floor_bytes > 0
    with pytest.raises(penstock.PayloadError, match=f"holds machine code .*: {ASKS}"):
        program.load("100%")


@pytest.fixture
def twice():
    library = torch.library.Library("penstock_of_a_user", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("penstock_of_a_user::twice", torch.empty_like, lib=library)
    yield torch.ops.penstock_of_a_user.twice
    library._destroy()


def test_an_operator_of_the_user_runs_where_the_user_says_so(twice, tmp_path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(self.linear(x))

    path = tmp_path / "own.penstock"
    made = penstock.compile(torch.export.export(Model(), (X,)), path)
    with made.load("100%") as module, penstock.open(path, trust=True).load("100%") as other:
        assert torch.equal(module(X), other(X))
    words = r"calls penstock_of_a_user\.twice\.default, which is none of the operators that run for anybody"
    with pytest.raises(penstock.PayloadError, match=f"{words}: {ASKS}"):
        penstock.open(path).load("100%")


def test_trust_goes_where_a_program_goes(copy):
    assert penstock.open(copy).trust is False
    assert penstock.open(copy, trust=True).write_ladder().trust is True
    assert penstock.open(copy).write_ladder().trust is False
    with pytest.raises(penstock.SourceError, match="nothing to relink"):
        relink(copy, trust=True)
    with pytest.raises(TypeError):
        penstock.open(copy, True)  # it is asked for by name


@pytest.mark.parametrize("version", [4, 6, "5", None, 5.0, True])
def test_other_versions_say_what_to_do(copy, version):
    change_code(copy, lambda stored: stored.update(version=version))
    with pytest.raises(penstock.PayloadError, match=r"expected JSON of version 5, got .*: compile again"):
        use(copy)


def test_no_library_is_ever_told_to_run_the_code_of_a_model():
    files = [
        path for name in ("src", "passes", "runtime", "schedule") for path in (ROOT / name).rglob("*.py")
    ]
    said = [line for path in files for line in path.read_text().splitlines() if "trust_remote_code" in line]
    assert said
    assert all("False" in line or "=True" not in re.sub(r'"[^"]*"', "", line) for line in said), said
    loads = [line for path in files for line in path.read_text().splitlines() if "torch.load(" in line]
    assert loads
    assert all("weights_only=True" in line for line in loads), loads
