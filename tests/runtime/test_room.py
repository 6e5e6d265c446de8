"""Loads in control groups a little larger than what they take: they run, or refuse before a byte is read."""

import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

import penstock
from examples.demo.cgroup import make_group
from penstock import LoadOptions
from penstock.runtime import memory_split
from penstock.runtime.machine import figures
from penstock.runtime.machine.figures import MEASURING
from penstock.runtime.memory_split import LOADING
from penstock.runtime.system.limits import Limit
from tests.forked import run_forked
from tests.hunt import nightly_but, sampled

MIB = 1 << 20
SLACK = 32 * MIB
LAYERS, WIDTH = 24, 1024

CHILD = """
import hashlib, json, os, re, sys
from pathlib import Path
from examples.demo.cgroup import join_group
group, folder, budget, options = Path(sys.argv[1]), *sys.argv[2:5]
join_group(group)
import torch, scipy.optimize, scipy.sparse, scipy.sparse.csgraph, penstock
from penstock.schedule.planner import make_plan
if '"sim"' not in options:  # how fast a plan is, is not what is asked; what a host holds is
    make_plan.__kwdefaults__["effort"] = 0.02
from penstock.passes.lowering import compiled, eager
import penstock.runtime.loading
def leave(said):
    print(said, flush=True)
    os._exit(0)  # an interpreter that ends touches, and so copies, all that a fork has from its parent

torch.set_num_threads(1)
program = penstock.open(folder, trust=True)
program.payload
torch.ones(8, 1024) @ torch.ones(1024, 1024)
if not budget:
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    leave(stat.get("rss") or stat["anon"])

def run(budget):
    given = json.loads(options)
    device, chosen = given.pop("device", "cpu"), penstock.LoadOptions(**given)
    with program.load(budget, device=device, options=chosen) as module, torch.no_grad():
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
        try:
            said["digest"] = run(int(advised[1]))
        except penstock.PenstockError as again:
            said["digest"] = str(again)
leave(json.dumps(said))
"""
"""Says what a group holds of a process that opened a program; or loads, and then what a refusal advises."""


@dataclass(frozen=True)
class Big:
    """An artifact whose weights are much more than a process takes, and the digest of what it computes."""

    folder: Path
    weights: int
    activations: int
    digest: str
    bare: int


def in_group(limit, folder, budget, **options):
    """What a process in a group of `limit` bytes prints; `killed` where the kernel ended it."""
    with make_group(limit) as group:
        if group is None:
            pytest.skip("no control group of memory can be made here")
        done = run_forked(CHILD, group.folder, folder, budget, json.dumps(options))
        if group.kills:
            return "killed"
        assert not done.status, done.err
        return done.out


def make_big(folder, lowering):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model, x = torch.nn.Sequential(*layers), torch.ones(8, WIDTH)
    program = penstock.compile(torch.export.export(model, (x,)), folder / "big.penstock", lowering=lowering)
    bare = int(in_group(4096 * MIB, program.path, ""))
    said = json.loads(in_group(4096 * MIB, program.path, program.weight_bytes))
    assert not said["refused"]
    return Big(program.path, program.weight_bytes, program.activation_bytes, said["digest"], bare)


@pytest.fixture(scope="module", params=sampled(("eager", "inductor"), 2))
def big(request, tmp_path_factory):
    return make_big(tmp_path_factory.mktemp("big"), request.param)


WAYS = [
    *product(("cpu",), (None, "mapped", "paged", "contiguous"), ("auto", "python")),
    ("sim", None, "auto"),
]


@pytest.mark.random
@pytest.mark.parametrize(
    ("way", "share"), nightly_but({(WAYS[0], 25)}, sampled([*product(WAYS, (25, 75, 100))], 11))
)
def test_beside_a_bare_process_a_load_takes_no_more_than_32_mib(big, way, share):
    device, arena, engine = way
    budget = big.weights * share // 100
    limit = big.bare + budget + big.activations + SLACK
    said = json.loads(in_group(limit, big.folder, budget, device=device, arena=arena, engine=engine))
    assert said["digest"] == big.digest
    if device == "cpu":
        assert not said["refused"]


@pytest.mark.random
@pytest.mark.parametrize(
    ("way", "slack"), nightly_but({(WAYS[0], 8), (WAYS[3], -16)}, sampled([*product(WAYS, (8, -16))], 7))
)
def test_in_less_a_load_is_refused_or_its_files_are_only_mapped(big, way, slack):
    device, arena, engine = way
    budget = big.weights * 3 // 4
    options = {"device": device, "arena": arena, "engine": engine}
    in_group(4096 * MIB, big.folder, budget, **options)  # plans, of which the memory is not what is tested
    limit = big.bare + budget + big.activations + slack * MIB
    said = json.loads(in_group(limit, big.folder, budget, **options))
    if device == "cpu" and arena in (None, "mapped"):
        assert not said["refused"]
    else:
        assert said["refused"].startswith("a budget of 72.00 MiB takes ")
        assert re.search(
            r"and control group /\S+ leaves \d+\.\d+ MiB: give a budget of at most", said["refused"]
        )
    assert said["digest"] == big.digest


@pytest.fixture
def small(monkeypatch, stack):
    """The stack's program, and a function that sets what is left of memory and of address space."""

    def leave(memory, address=None):
        limits = {"memory_limit": Limit(memory, "the box"), "address_limit": None}
        if address is not None:
            limits["address_limit"] = Limit(address, "the fence", "address space")
        for name, limit in limits.items():
            monkeypatch.setattr(memory_split, name, lambda limit=limit: limit)

    return stack.open(), leave


def refused(program, plan, device="cpu", engine="auto"):
    with pytest.raises(penstock.BudgetError) as caught:
        program.load(plan=plan, device=device, options=LoadOptions(engine=engine))
    assert caught.value.floor_bytes == program.floor(device)
    return str(caught.value)


@pytest.mark.parametrize("engine", ["auto", "python"])
@pytest.mark.parametrize("arena", ["paged", "contiguous"])
def test_private_memory_beyond_the_limit_is_refused_to_the_byte(small, arena, engine):
    program, leave = small
    plan = program.plan("75%", arena=arena)
    weights = plan.arena_bytes + sum(plan.sizes[s] for s in plan.outside)
    taken = weights + program.activation_bytes + LOADING + weights // 512
    leave(taken - 1)
    assert "MiB for weights, 283.50 KiB for activations and what is trained, 8.04 MiB for loading" in refused(
        program, plan, engine=engine
    )
    leave(taken)
    with program.load(plan=plan, options=LoadOptions(engine=engine)) as module:
        assert module.stats.peak_bytes <= plan.budget


def test_a_mapped_arena_without_room_has_no_private_granules(small, caplog):
    program, leave = small
    plan = program.plan("75%", arena="mapped")
    leave(1 << 30)
    assert program.lacking_room(plan) == ""
    leave(LOADING + program.activation_bytes + sum(plan.sizes[s] for s in plan.outside) + 13 * MIB)
    with caplog.at_level("WARNING", "penstock"), program.load(plan=plan) as module:
        assert module.stats.mapped_bytes > 0
    leave(LOADING)
    assert "no budget fits" in refused(program, plan)


def test_plans_for_another_process_are_made_with_a_warning_and_for_another_machine_without(small, caplog):
    program, leave = small
    leave(LOADING)
    with caplog.at_level("WARNING", "penstock"):
        plan = program.plan("75%")
        assert caplog.messages == [program.lacking_room(plan)]
        assert f"the least is {program.floor_bytes} bytes" in caplog.messages[0]
        caplog.clear()
        program.plan("75%", hardware="h200")
        assert not caplog.messages


def test_a_simulated_device_and_its_host_are_in_one_memory(small):
    program, leave = small
    plan = program.plan("50%", device="sim")
    largest = program.weight_bytes // 2 + program.activation_bytes + LOADING
    leave(largest)
    assert "copies of weights in the host" in refused(program, plan, "sim")
    leave(largest + MIB)
    with pytest.raises(penstock.BudgetError, match="plan with host_memory="):
        program.load(plan=plan, device="sim")


def test_rates_are_not_measured_without_room(small, monkeypatch):
    program, _ = small
    monkeypatch.setattr(figures, "memory_limit", lambda: Limit(MEASURING - 1, "the box"))
    monkeypatch.setattr(figures, "recall", lambda _: None)
    with pytest.raises(penstock.BudgetError, match=r"not known yet; measuring it takes .* the box leaves"):
        program.plan("75%")


FENCED = """
import os, resource, sys
import penstock, penstock.runtime.loading
program = penstock.open(sys.argv[1])
plan = program.plan("75%", arena="paged")
for spare in (30 << 20, 400 << 20):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    try:
        program.load(plan=plan).close()
        print("ran")
    except penstock.BudgetError as error:
        print(error)
"""


def test_a_limit_on_address_space_is_read(stack):
    done = run_forked(FENCED, stack.path)
    said, ran = done.out.splitlines()
    assert "of address space here" in said, done.err
    assert "the limit RLIMIT_AS (`ulimit -v`) leaves " in said
    assert ran == "ran"
