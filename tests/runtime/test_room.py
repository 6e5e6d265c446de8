"""Loads in control groups a little larger than what they take: they run, or refuse before a byte is read."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.demo.cgroup import make_group
from penstock.schedule.facts.sizes import parse_size
from tests.forked import run_forked
from tests.hunt import sampled

MIB = 1 << 20
SLACK = 32 * MIB
LAYERS, WIDTH = 12, 1024

CHILD = """
import hashlib, json, os, re, sys
from pathlib import Path
from penstock.demo.cgroup import join_group
group, folder, budget, options = Path(sys.argv[1]), *sys.argv[2:5]
join_group(group)
import torch, scipy.optimize, scipy.sparse, scipy.sparse.csgraph, penstock
from penstock.passes.lowering import compiled, eager
import penstock.runtime.loading, penstock.schedule.planner
def leave(said):
    print(said, flush=True)
    os._exit(0)  # an interpreter that ends touches, and so copies, all that a fork has from its parent

torch.set_num_threads(1)
program = penstock.open(folder)
program.payload
torch.ones(8, 1024) @ torch.ones(1024, 1024)
if not budget:
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    leave(stat.get("rss") or stat["anon"])

def run(budget):
    with program.load(budget, **json.loads(options)) as module, torch.no_grad():
        for _ in range(3):
            found = module(torch.ones(8, 1024))
        return hashlib.sha256(found.numpy().tobytes()).hexdigest()

said = {"refused": ""}
try:
    said["digest"] = run(int(budget))
except penstock.BudgetError as error:
    said["refused"] = str(error)
    advised = re.search(r"at most (\\d+) bytes", str(error))
    if advised:
        said["digest"] = run(int(advised[1]))
leave(json.dumps(said))
"""
"""Says what a group holds of a process that opened a program; or loads, and if refused, loads what was advised."""


@dataclass(frozen=True)
class Big:
    """An artifact whose weights are much more than a process takes, and the digest of what it computes."""

    folder: Path
    weights: int
    activations: int
    digest: str
    bare: int


def in_group(limit: int, folder: Path, budget: int | str, **options: Any) -> str:
    """What a process in a group of `limit` bytes prints; `killed` where the kernel ended it."""
    with make_group(limit) as group:
        if group is None:
            pytest.skip("no control group of memory can be made here")
        done = run_forked(CHILD, group.folder, folder, budget, json.dumps(options))
        if group.kills:
            return "killed"
        assert not done.status, done.err
        return done.out


def make_big(folder: Path, lowering: str) -> Big:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model, x = torch.nn.Sequential(*layers), torch.ones(8, WIDTH)
    program = penstock.compile(torch.export.export(model, (x,)), folder / "big.penstock", lowering=lowering)
    bare = int(in_group(4096 * MIB, program.path, ""))
    said = json.loads(in_group(4096 * MIB, program.path, program.weight_bytes))
    assert not said["refused"]
    return Big(program.path, program.weight_bytes, program.activation_bytes, said["digest"], bare)


@pytest.fixture(scope="module", params=sampled(("eager", "inductor"), 2))
def big(request, tmp_path_factory) -> Big:
    return make_big(tmp_path_factory.mktemp("big"), request.param)


WAYS = [
    *product(("cpu",), (None, "mapped", "pooled", "paged", "contiguous"), ("auto", "python")),
    ("sim", None, "auto"),
]


@pytest.mark.random
@pytest.mark.parametrize(("way", "share"), sampled([*product(WAYS, (25, 75, 100))], 8))
def test_beside_a_bare_process_a_load_takes_no_more_than_32_mib(big, way, share):
    device, arena, engine = way
    budget = big.weights * share // 100
    limit = big.bare + budget + big.activations + SLACK
    said = json.loads(in_group(limit, big.folder, budget, device=device, arena=arena, engine=engine))
    assert said["digest"] == big.digest
    if device == "cpu":
        assert not said["refused"]


@pytest.mark.random
@pytest.mark.parametrize(("way", "slack"), sampled([*product(WAYS, (8, -16))], 5))
def test_in_less_a_load_is_refused_or_its_files_are_only_mapped(big, way, slack):
    device, arena, engine = way
    budget = big.weights * 3 // 4
    limit = big.bare + budget + big.activations + slack * MIB
    said = json.loads(in_group(limit, big.folder, budget, device=device, arena=arena, engine=engine))
    if device == "cpu" and arena in (None, "mapped"):
        assert not said["refused"]
    else:
        assert said["refused"].startswith("a budget of 36.00 MiB takes ")
        assert re.search(r"and control group /\S+ leaves \d+\.\d+ MiB: give a budget of at most", said["refused"])
    assert said["digest"] == big.digest
