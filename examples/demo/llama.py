"""A plain decoder with the architecture of Llama, and a safetensors file of pseudo-random weights for it.

The shape follows Llama 3: RMSNorm before each half, rotary positions, grouped queries, SwiGLU,
bfloat16, no bias, untied head. There is no KV cache: every call reads a window of fixed length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

WINDOW = 16
"""The number of tokens that one call reads. Those after the last known token are padding, which is masked."""

ALIGNMENT = 64
"""The alignment in bytes of every tensor in the file, so that tensors can be used in place."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. Attention heads are 64 wide, four queries to a key."""

    hidden: int
    layers: int
    vocabulary: int
    head: int = 64

    @property
    def feed_forward(self) -> int:
        return self.hidden * 11 // 4

    @property
    def keys(self) -> int:
        return max(self.head, self.hidden // 4)


def choose_shape(weight_bytes: int) -> Shape:
    """The shape with about 16 to 64 layers whose weights take just more than `weight_bytes`."""
    # A layer of width d takes about 2 * 10.75 * d^2 bytes, embedding and head 2 * 2 * 8 * d^2.
    hidden = 128
    while hidden * hidden * 4 * 21.5 * 16 <= weight_bytes and hidden < 8192:
        hidden *= 2
    shape = Shape(hidden, 1, 8 * hidden)
    one_layer = sum(math.prod(size) * 2 for size in list_weights(shape).values())
    two = sum(math.prod(size) * 2 for size in list_weights(Shape(hidden, 2, 8 * hidden)).values())
    return Shape(hidden, 1 + max(0, math.ceil((weight_bytes - one_layer) / (two - one_layer))), 8 * hidden)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; maps [1, T, hidden] to [1, T, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, shape.keys, bias=False)
        self.v = nn.Linear(shape.hidden, shape.keys, bias=False)
        self.o = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _rotate(self._split(self.q(x)), cos, sin)
        k = _rotate(self._split(self.k(x)), cos, sin)
        v = self._split(self.v(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU; maps [1, T, hidden] to [1, T, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each with a norm before and a residual sum after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """Maps token ids of shape [1, T] to logits of shape [1, T, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self._turn(tokens.shape[1], tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.head(self.norm(x))
        return out

    def _turn(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The cosines and sines of each position's angles, each of shape [T, head_width / 2]."""
        exponent = torch.arange(0, self.head_width, 2, dtype=torch.float32, device=device) / self.head_width
        angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * 10000.0**-exponent
        return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, in the half-split form of Llama): [1, heads, T, head]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def make_meta_decoder(shape: Shape) -> Decoder:
    """The decoder in bfloat16, with weights that have no memory yet."""
    with torch.device("meta"):
        return Decoder(shape).to(torch.bfloat16).eval()


def list_weights(shape: Shape) -> dict[str, tuple[int, ...]]:
    """FQN and shape of every weight, in the order in which a pass reads them."""
    return {name: tuple(value.shape) for name, value in make_meta_decoder(shape).state_dict().items()}


def write_weights(
    shape: Shape, path: Path, seed: int, report: Callable[[int], object] = lambda _: None
) -> int:
    """Write the decoder's weights as a safetensors file, one chunk of memory at a time.

    Equal shapes and seeds give equal bytes on every machine. `report` is called with the bytes that were
    written since its last call. Returns the bytes of all weights.
    """
    sizes = list_weights(shape)
    header: dict[str, object] = {}
    end = 0
    for name, size in sizes.items():
        start, end = end, end + math.prod(size) * 2
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # The format allows blanks after the JSON, which align the beginning of the data. The size of every
    # tensor here is a multiple of the alignment.
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    generator = np.random.Generator(np.random.PCG64(seed))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in sizes.values():
            for chunk in _draw_weights(size, generator):
                file.write(chunk.data)
                report(chunk.nbytes)
    return end


def _draw_weights(size: tuple[int, ...], generator: np.random.Generator) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield the bits of a weight in chunks: ones for a norm, else bfloat16 of deviation fan_in^-0.5."""
    count = math.prod(size)
    if len(size) == 1:
        yield np.full(count, 0x3F80, np.uint16)
        return
    # sign * (1 + m) * 2^e with m uniform in [0, 1) has a mean square of 7/3 * 4^e.
    exponent = round(math.log2((7 / 3 * size[1]) ** -0.5)) + 127
    for start in range(0, count, 1 << 22):
        drawn = np.frombuffer(generator.bytes(min(1 << 22, count - start)), np.uint8).astype(np.uint16)
        yield ((drawn & 0x80) << 8 | exponent << 7 | drawn & 0x7F).astype(np.uint16, copy=False)


def load_decoder(shape: Shape, path: Path) -> Decoder:
    """The decoder with the weights of `path` read into ordinary memory."""
    weights: dict[str, Tensor] = {}
    with path.open("rb", buffering=0) as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        for name, size in list_weights(shape).items():
            weights[name] = torch.empty(size, dtype=torch.bfloat16)
            file.readinto(weights[name].view(torch.uint8).numpy().data)
    decoder = make_meta_decoder(shape)
    decoder.load_state_dict(weights, assign=True)
    return decoder


def export_decoder(shape: Shape, path: Path) -> torch.export.ExportedProgram:
    """The exported decoder, whose weights are mapped from `path`, so that they take no memory."""
    from safetensors.torch import load_file

    decoder = make_meta_decoder(shape)
    decoder.load_state_dict(load_file(path), assign=True)
    with torch.no_grad():
        return torch.export.export(decoder, (torch.zeros(1, WINDOW, dtype=torch.int64),))


def make_prompt(vocabulary: int) -> tuple[int, ...]:
    """A few token ids to begin from."""
    return tuple(position * 7919 % vocabulary for position in range(1, 5))


def generate(
    call: Callable[[Tensor], Tensor], prompt: tuple[int, ...], count: int, report: Callable[[Tensor], object]
) -> list[int]:
    """Append `count` tokens to `prompt` greedily; `report` is called with the logits of every pass."""
    tokens = torch.zeros(1, WINDOW, dtype=torch.int64)
    tokens[0, : len(prompt)] = torch.tensor(prompt)
    for position in range(len(prompt), len(prompt) + count):
        logits = call(tokens)
        report(logits)
        tokens[0, position] = logits[0, position - 1].argmax()
    return [int(token) for token in tokens[0, : len(prompt) + count]]
