"""Small models, exported to `.pte` files with penstock's delegates and without any.

Weights have unit gain, so that a weight that is read at the wrong time shows in the outputs.
"""

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch import nn

from penstock.backends.executorch import PenstockPartitioner
from tests.quantised_models import Shown

WIDTH, LAYERS, WORDS, ROOM = 64, 6, 48, 16
WIDE, DEEP = 512, 16
"""Width and layers of the MLP whose weights show in the memory of a process."""

LEAST = 1 << 10
"""From this many bytes on a weight streams in these models."""

_LINEAR_STAYS = EdgeCompileConfig(_check_ir_validity=False, preserve_ops=[torch.ops.aten.linear.default])


def _linear(width, out, seed, *, bias=True):
    layer = nn.Linear(width, out, bias=bias)
    random = torch.Generator().manual_seed(seed)
    nn.init.orthogonal_(layer.weight, generator=random)
    if bias:
        nn.init.normal_(layer.bias, generator=random)
    return layer


class Mlp(nn.Module):
    """Linear layers whose outputs keep the size of their inputs."""

    def __init__(self, seed=0, width=WIDTH, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(_linear(width, width, seed + k) for k in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Attention(nn.Module):
    """One head over a cache of keys and values, which it writes at the given positions.

    The last weight has the values of the first, which the `.ptd` has once.
    """

    def __init__(self, seed):
        super().__init__()
        self.q, self.k, self.v, self.o = (_linear(WIDTH, WIDTH, seed + k % 3) for k in range(4))
        self.register_buffer("keys", torch.zeros(ROOM, WIDTH))
        self.register_buffer("values", torch.zeros(ROOM, WIDTH))

    def forward(self, x, at):
        self.keys.index_copy_(0, at, self.k(x))
        self.values.index_copy_(0, at, self.v(x))
        seen = torch.arange(ROOM) <= at.unsqueeze(1)
        scores = torch.where(seen, self.q(x) @ self.keys.T / WIDTH**0.5, torch.tensor(-1e9))
        return x + self.o(torch.softmax(scores, -1) @ self.values)


class Decoder(nn.Module):
    """Two layers of attention; the head is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Attention(10 * k) for k in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(5))
        self.head.weight = self.embedding.weight

    def forward(self, words, at):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, at)
        return self.head(x)


def quantised_mlp():
    """The MLP with weights of int8 and a scale for each row."""
    model = Mlp(seed=20)
    for layer in model.layers:
        weight = layer.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        data = (weight / scale).round().to(torch.int8)
        layer.weight = nn.Parameter(Shown(data, scale, weight.dtype), requires_grad=False)
    return model


PROMPT = (torch.arange(5), torch.arange(5))
NEXT = [(torch.tensor([7 * k % WORDS]), torch.tensor([k])) for k in range(5, 9)]


def decoder_methods():
    """A prompt of five words, and one word."""
    model = Decoder().eval()
    return {"prefill": torch.export.export(model, PROMPT), "decode": torch.export.export(model, NEXT[0])}


def for_rows(model):
    """An MLP for one to eight rows."""
    batch = torch.export.Dim("batch", min=1, max=8)
    return {"forward": torch.export.export(model.eval(), (rows(),), dynamic_shapes=({0: batch},))}


def rows(count=3, width=WIDTH):
    """Input of the MLPs."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Files:
    """What was exported: the `.pte`, and the `.ptd` files beside it."""

    pte: Path
    data: tuple[Path, ...] = ()

    @property
    def weights(self):
        """The only `.ptd`."""
        (path,) = self.data
        return path


def write_files(folder, methods, *, delegated=True, budget=None, alignment=4096, kernels="executorch"):
    """Writes the files of a program to a new folder, without the checks of `save`."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # ExecuTorch's own
        partitioners = (
            [PenstockPartitioner(budget=budget, kernels=kernels, least=LEAST)] if delegated else None
        )
        edge = to_edge_transform_and_lower(
            dict(methods), partitioner=partitioners, compile_config=_LINEAR_STAYS
        )
        planning = MemoryPlanningPass(share_mutable_buffers=not delegated)
        program = edge.to_executorch(
            ExecutorchBackendConfig(segment_alignment=alignment, memory_planning_pass=planning)
        )
    folder.mkdir(parents=True)
    path = folder / "model.pte"
    with path.open("wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(folder))
    return Files(path, tuple(sorted(folder.glob("*.ptd"))))


def copied(files, folder):
    """A copy, to be changed."""
    shutil.copytree(files.pte.parent, folder / "copy")
    return Files(folder / "copy/model.pte", (folder / "copy/weights.ptd",))
