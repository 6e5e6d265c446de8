"""An artifact with collectives is opened by the rank that compiled it, and by no other."""

import json
import shutil
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.export import export
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock
from penstock.cli import main as cli
from penstock.passes.calls.ranks import Ranks
from penstock.runtime.artifact import relink
from penstock.schedule.facts.errors import PassError, PayloadError

X = torch.linspace(-1, 1, 256).view(4, 64)


@contextmanager
def process_group(rank, world, *, groups=(), backend="fake", store=None):
    """Within, this process is that rank, with further groups of these ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own
        dist.init_process_group(backend, rank=rank, world_size=world, store=store or FakeStore())
        try:
            yield [dist.new_group(one) for one in groups]
        finally:
            dist.destroy_process_group()


def in_place(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x):
    whole = torch.empty(2 * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(whole, x)
    return whole


def scattered(x):
    part = torch.empty(x.shape[0] // 2, x.shape[1])
    dist.reduce_scatter_tensor(part, x)
    return part


COLLECTIVES = {
    "all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "all_gather": lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD),
    "reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
    "broadcast": lambda x: functional.broadcast(x, 0, dist.group.WORLD),
    "all_to_all": lambda x: functional.all_to_all_single(x, None, None, dist.group.WORLD),
    "all_reduce in place": in_place,
    "all_gather_into_tensor": gathered,
    "reduce_scatter_tensor": scattered,
    "in a branch": lambda x: torch.cond(x.sum() > 0, in_branch, torch.sin, (x,)),
}


def in_branch(x):
    return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))


class Parallel(nn.Module):
    """Two products with a collective between them, and a number of the rank's own."""

    def __init__(self, collective):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.collective = nn.Linear(64, 64), nn.Linear(64, 64), collective

    def forward(self, x):
        return self.down(self.collective(self.up(x))) * (dist.get_rank() + 1)


def write(collective, folder, **options):
    model = Parallel(collective).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = export(model, (X,))
    return penstock.compile(exported, folder / "rank.penstock", **options).path


@pytest.mark.parametrize("name", COLLECTIVES)
def test_another_rank_and_another_world_are_refused(tmp_path, name):
    with process_group(0, 2):
        path = write(COLLECTIVES[name], tmp_path)
        penstock.open(path, trust=True).lowered  # noqa: B018
    for rank, world in ((1, 2), (0, 4), (0, 1)):
        with process_group(rank, world):
            for trust in (True, False):
                with pytest.raises(PayloadError) as refused:
                    penstock.open(path, trust=trust)
            said = str(refused.value)
            assert "rank 0 of 2" in said
            assert f"rank {rank} of {world}" in said
            assert "compile the program on each rank" in said
            assert str(path) in said
    with pytest.raises(PayloadError, match=r"rank 0 of 2.*in no process group.*init_process_group"):
        penstock.open(path, trust=True)
    with process_group(0, 2):
        penstock.open(path, trust=True).lowered  # noqa: B018


def test_the_rank_that_compiled_it_runs_it(tmp_path):
    """A world of one rank, whose collectives are real."""
    with process_group(0, 1, backend="gloo", store=dist.HashStore()):
        path, model = write(COLLECTIVES["all_reduce"], tmp_path), Parallel(COLLECTIVES["all_reduce"])
        with penstock.open(path, trust=True).load("100%") as module, torch.no_grad():
            assert torch.equal(module(X), model(X))


def test_without_collectives_any_rank_opens_it(tmp_path):
    with process_group(1, 2):
        path = write(torch.sin, tmp_path)
        with torch.no_grad():
            expected = Parallel(torch.sin)(X)
    for rank, world in ((0, 2), (3, 4)):
        with process_group(rank, world), penstock.open(path).load("100%") as module, torch.no_grad():
            assert torch.equal(module(X), expected)
    with penstock.open(path).load("100%") as module, torch.no_grad():
        assert torch.equal(module(X), expected)


def test_groups_of_other_ranks_are_refused(tmp_path):
    with process_group(0, 4, groups=([0, 1],)) as (pair,):
        path = write(lambda x: functional.all_reduce(x, "sum", pair), tmp_path)
    with process_group(0, 4, groups=([0, 1],)):
        penstock.open(path, trust=True)
    with process_group(0, 4, groups=([0, 2],)), pytest.raises(PayloadError, match=r"\[0, 1\].*\[0, 2\]"):
        penstock.open(path, trust=True)
    with process_group(0, 4), pytest.raises(PayloadError, match=r"\[0, 1\].*none"):
        penstock.open(path, trust=True)


def test_a_program_is_compiled_by_a_rank(tmp_path):
    with process_group(0, 2, groups=([0, 1],)) as (pair,), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world, other = (
            export(Parallel(one), (X,))
            for one in (COLLECTIVES["all_reduce"], lambda x: functional.all_reduce(x, "sum", pair))
        )
    with pytest.raises(PassError, match=r"all_reduce.*init_process_group"):
        penstock.compile(world, tmp_path / "world.penstock")
    with process_group(0, 2):
        penstock.compile(world, tmp_path / "world.penstock")
        with pytest.raises(PassError, match="does not have"):
            penstock.compile(other, tmp_path / "other.penstock")
    assert [path.name for path in tmp_path.iterdir()] == ["world.penstock"]


def test_facts_are_read_on_any_rank(tmp_path, monkeypatch, capsys):
    """Commands that show an artifact, and files that are put elsewhere, need no process group."""
    with process_group(0, 2):
        path = write(COLLECTIVES["all_reduce"], tmp_path)
        shutil.copy(path / "weights.safetensors", tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = export(Parallel(COLLECTIVES["all_reduce"]), (X,))
        files = tmp_path / "weights.safetensors"
        placed = penstock.compile(exported, tmp_path / "placed.penstock", weights=files, pack=False).path
    for command in ("inspect", "verify"):
        monkeypatch.setattr(sys, "argv", ["penstock", command, str(path), "--json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert json.loads(capsys.readouterr().out)
    program = relink(placed, trust=True)
    with pytest.raises(PayloadError, match="rank 0 of 2"):
        program.load("100%")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"rank": 0, "world": 2}',
        b'{"rank": "0", "world": 2, "groups": {}}',
        b'{"rank": 0, "world": 2, "groups": {"0": "01"}}',
        b'{"rank": 0, "world": 2, "groups": {"0": [0.5]}}',
    ],
)
def test_a_record_that_is_none_is_refused(data):
    with pytest.raises(PassError):
        Ranks.from_bytes(data)
