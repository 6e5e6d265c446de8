"""The models that are measured, in bfloat16, their weights on disk, and their inputs."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.demo.llama import choose_shape, make_meta_decoder

MODELS = ("linears", "llama", "small")
_DATA_ALIGNMENT = 4096
"""The weights begin on a page of the file, so that no competitor suffers from bad alignment."""


class Linears(nn.Module):
    """A stack of square linear layers; maps [tokens, width] to [tokens, width]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_meta_module(model: str, nbytes: int) -> nn.Module:
    """A model of `MODELS` whose weights take about `nbytes`, without memory behind them.

    The stack has at least 32 layers of at most 4096 x 4096, or of 1024 x 1024 (`small`).
    """
    if model == "llama":
        return make_meta_decoder(choose_shape(nbytes))
    width = 1024 if model == "small" else 4096
    while width > 64 and 32 * 2 * width * width > nbytes:
        width //= 2
    with torch.device("meta"):
        return Linears(width, max(2, round(nbytes / (2 * width * width)))).to(torch.bfloat16).eval()


def load_weights(module: nn.Module, path: Path, *, in_memory: bool) -> None:
    """Give a meta `module` the weights of `path`, mapped from the file or cloned into aligned memory."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        weights = {}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_tensor(name)
            weights[name] = tensor.clone() if in_memory else tensor
    module.load_state_dict(weights, assign=True)
    module.requires_grad_(False)


def make_inputs(module: nn.Module, tokens: int) -> tuple[Tensor, ...]:
    """The inputs for a module and a number of tokens, which are equal in every process."""
    generator = torch.Generator().manual_seed(tokens)
    if isinstance(module, Linears):
        first = module.layers[0]
        assert isinstance(first, nn.Linear)
        return (torch.randn(tokens, first.in_features, generator=generator).to(torch.bfloat16),)
    vocabulary = next(iter(module.parameters())).shape[0]
    return (torch.randint(vocabulary, (1, tokens), generator=generator),)


def name_weights(model: str, nbytes: int) -> str:
    """A name for the weights that another model, size or way of drawing them cannot have.

    Both peers use any files in an offload folder, so only its name tells the folders of models apart.
    """
    shapes = {name: list(value.shape) for name, value in make_meta_module(model, nbytes).state_dict().items()}
    digest = hashlib.sha256(json.dumps(["normal, seed by position", shapes]).encode()).hexdigest()
    return f"{model}-{digest[:12]}"


def write_weights(module: nn.Module, path: Path) -> None:
    """Write weights for a meta `module` as a safetensors file, one tensor in memory at a time.

    Matrices are normal with standard deviation fan_in^-0.5, vectors are ones. The same module gives
    the same bytes.
    """
    header: dict[str, object] = {}
    end = 0
    weights = module.state_dict()
    for name, value in weights.items():
        start, end = end, end + value.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for seed, value in enumerate(weights.values()):
            drawn = _draw(tuple(value.shape), seed)
            file.write(drawn.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(shape, dtype=torch.bfloat16)
    return drawn.normal_(0, 1 / math.sqrt(shape[-1]), generator=generator)
