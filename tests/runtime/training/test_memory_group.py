"""Steps of training in a memory cgroup: what a process holds, the budget, planned activations and 64 MiB."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import penstock
from benchmarks.training.__main__ import TRAINED, Decoder
from examples.demo.cgroup import make_group
from tests.hunt import sampled

ROOT = Path(__file__).parents[3]
SLACK = 64 << 20
pytestmark = pytest.mark.nightly  # test_room.py has a sample of loads in groups
TOKENS = torch.arange(97)[None] * 31 % 8192

CHILD = """
import hashlib, json, sys
import torch
import penstock
from benchmarks.training.__main__ import Decoder
from penstock.runtime.system.memory import anonymous_bytes
from tests.runtime.training.test_memory_group import TOKENS, digest_of

torch.set_num_threads(1)
folder, budget, activations = sys.argv[1:]
if folder == "bare":
    import scipy.optimize  # which plans are made with
    digest_of(torch.nn.Linear(97, 1), TOKENS.float())
    print(json.dumps(anonymous_bytes()))
else:
    options = penstock.LoadOptions(activations=activations or "auto")
    print(json.dumps(digest_of(penstock.open(folder).load(int(budget), options=options))))
"""


def digest_of(module, inputs=TOKENS):
    """The sha256 of all gradients of two steps."""
    torch.manual_seed(0)
    trained = [one for one in module.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    digest = hashlib.sha256()
    for _ in range(2):
        optimizer.zero_grad()
        module(inputs).backward()
        for one in trained:
            digest.update(one.grad.numpy().tobytes())
        optimizer.step()
    return digest.hexdigest()


def apart(*arguments, group=None):
    """What the child prints, in a cgroup from its first instruction on."""
    command = [sys.executable, "-c", CHILD, *arguments]
    if group is not None:
        command = ["/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"), *command]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:] or f"killed by signal {-done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def bare():
    """Bytes that a process holds which has imported the libraries, and trained a single row of numbers."""
    with make_group(1 << 20) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
    return int(apart("bare", "", ""))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A decoder of 136 MiB, and the gradients of its steps in memory, on one thread."""
    torch.manual_seed(0)
    model = Decoder(3, 768)
    program = penstock.compile_training(
        model, tmp_path_factory.mktemp("group") / "a.penstock", example=(TOKENS,), trainable=TRAINED
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return program, digest_of(model)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.random
@pytest.mark.parametrize(
    ("share", "activations"), sampled([(0.0, "keep"), (0.25, "keep"), (0.0, "layers")], 2)
)
def test_a_step_lives_within_what_is_planned(bare, made, share, activations):
    program, expected = made
    rung = program.variants[activations]
    budget = max(rung.floor_bytes, round(share * program.weight_bytes))
    limit = bare + budget + rung.activation_bytes + rung.trained_bytes + SLACK
    assert limit < bare + program.weight_bytes + rung.activation_bytes  # in memory it would be killed
    with make_group(limit) as group:
        assert apart(str(program.path), str(budget), activations, group=group.folder) == expected
        assert group.kills == 0
        assert 0 < group.peak_bytes <= limit
