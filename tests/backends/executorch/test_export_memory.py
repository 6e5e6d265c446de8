"""Exports copy no weight, and need no memory for weights without values: each in a process of its own."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SCRIPT = """
import sys, warnings
from pathlib import Path
import torch
from torch import nn
import penstock

warnings.simplefilter("ignore")
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from penstock.backends.executorch import PenstockPartitioner, read, save

def peak():
    (line,) = [one for one in open("/proc/self/status") if one.startswith("VmHWM")]
    return int(line.split()[1]) << 10

class Model(nn.Module):
    def __init__(self, layers, width, rows):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)

def lower(program, folder):
    edge = to_edge_transform_and_lower(program, partitioner=[PenstockPartitioner()])
    program = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
    return save(program, folder / "model.pte", force=True)

folder, ids = Path(sys.argv[1]), torch.zeros(1, 4, dtype=torch.long)
lower(torch.export.export(Model(2, 64, 512), (ids,)), folder)  # imports, and what is made once

model = Model(4, 2048, 16384)
nbytes = sum(one.numel() * 4 for one in model.parameters())
before = peak()
lower(torch.export.export(model, (ids,)), folder)
print(nbytes, peak() - before, (folder / "weights.ptd").stat().st_size)

del model
before = peak()
path = lower(penstock.fake_export(lambda: Model(32, 32768, 262144), (ids,)), folder)
print(read(path).weight_bytes, peak() - before)
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What the script prints of two exports: the bytes of weights, and those by which the peak grew."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path_factory.mktemp("memory"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()[-2:]]


def test_no_weight_is_copied_while_a_model_is_exported(lines):
    nbytes, grown, stored = lines[0]
    assert nbytes > 192 << 20
    assert grown < nbytes // 8, f"the peak grew by {grown >> 20} MiB"
    assert stored < nbytes + (64 << 10)


def test_weights_without_values_take_no_memory(lines):
    nbytes, grown = lines[1]
    assert nbytes > 128 << 30
    assert grown < 256 << 20, f"the peak grew by {grown >> 20} MiB"
