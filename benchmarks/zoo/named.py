"""Models in which values or a memory of earlier calls decide what runs, which the zoo visits by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.configs import architectures, tiny_model

TRANSFORMERS = (
    "EncodecModel",
    "FunnelForMaskedLM",
    "FastSpeech2ConformerModel",
    "OpenAIPrivacyFilterModel",
    "LongformerForMaskedLM",
    "DeepseekV4ForCausalLM",
    "UdopModel",
    "MiniMaxForCausalLM",
    "ViltModel",
)

WIDTH, EXPERTS, WORDS, LARGE = 32, 8, 50, 1e9


def mixtures() -> list[str]:
    """Return the architectures of transformers whose experts have several implementations."""
    import transformers

    def is_mixture(name: str) -> bool:
        try:
            path = inspect.getsourcefile(getattr(transformers, name))
        except (AttributeError, ImportError, TypeError):
            return False
        return path is not None and "use_experts_implementation" in Path(path).read_text(encoding="utf-8")

    return [name for name in dict.fromkeys(architectures().values()) if is_mixture(name)]


def looping_mixture(name: str) -> nn.Module:
    """Make a mixture that calls its experts one after another. Raises LookupError where it has none."""
    model: Any = tiny_model(name)
    if not any(hasattr(module, "is_concatenated") for module in model.modules()):
        raise LookupError(f"{name} has no experts of several implementations")
    model.set_experts_implementation("eager")
    made: nn.Module = model
    return made


class FastPath(nn.Module):
    """Layers that torch computes by one kernel each, unless somebody watches."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x))


class Block(nn.Module):
    """A norm and two linear layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Break(nn.Module):
    """Values decide how many layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            if x.norm() > x[:, :1].norm() * 3:
                break
        return self.head(x)


class Counter(nn.Module):
    """An autoencoder that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.is_first = self.calls == 1
        return self.decoder(self.encoder(x))


class ListOfExperts(nn.Module):
    """Each token chooses two modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(EXPERTS))

    def run(self, expert: int, rows: Tensor) -> Tensor:
        output: Tensor = self.experts[expert](rows)
        return output

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        output = torch.zeros_like(tokens)
        for expert in functional.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero()[:, 0].tolist():
            rows, column = torch.where(chosen == expert)
            output.index_add_(0, rows, self.run(expert, tokens[rows]) * weights[rows, column, None])
        return output.reshape(x.shape)


class StackOfExperts(ListOfExperts):
    """Each token chooses two slices of stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)

    def run(self, expert: int, rows: Tensor) -> Tensor:
        inner = functional.relu(functional.linear(rows, self.up[expert]))
        return functional.linear(inner, self.down[expert])


class TiedMixture(nn.Module):
    """Experts as modules, and a head that is the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(ListOfExperts() for _ in range(3))
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class StackedMixture(nn.Module):
    """Stacked experts between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.experts = nn.ModuleList(StackOfExperts() for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Any:
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            x = x + experts(x)
        return self.head(x)


class ReadByParent(nn.Module):
    """The parent reads weights of its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.projection = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.second(self.first(x))
        if x.sum() > LARGE:
            return x
        return functional.linear(x, self.projection.weight * 2.0) + self.first.up.weight.mean()


class Part(nn.Module):
    """Writes to its input, and returns a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, setting: object = None) -> tuple[Tensor, Tensor]:
        x.add_(1.0)
        output = self.linear(x)
        x.mul_(0.5)
        return output, x.view(-1)


class InPlace(nn.Module):
    """Parts that write to their inputs, one of which takes an object that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = nn.ModuleList(Part() for _ in range(3)), Part()

    def forward(self, x: Tensor) -> Any:
        x, total = x.clone(), torch.zeros_like(x)
        for part in self.parts:
            output, view = part(x)
            view.add_(0.25)
            total = total + output + x
            if total.sum() > LARGE:
                break
        output, _ = self.last(x, object())
        return output + total


OWN = {
    kind.__name__: kind
    for kind in (FastPath, Break, Counter, TiedMixture, StackedMixture, ReadByParent, InPlace)
}


def own_model(name: str) -> nn.Module:
    """Make one of the models of this file."""
    torch.manual_seed(0)
    return OWN[name]().eval().requires_grad_(False)


def own_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model of this file is called with."""
    torch.manual_seed(1)
    if isinstance(model, Counter):
        return {"x": torch.randn(1, 3, 16, 16)}
    if isinstance(model, TiedMixture):
        return {"ids": torch.randint(WORDS, (1, 7))}
    return {"x": torch.randn(1, 7, WIDTH)}
