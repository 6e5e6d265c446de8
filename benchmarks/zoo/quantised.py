"""Models that transformers quantised with torchao: only the checkpoint tells the classes of the weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.transformers_models import decoders


def quantised(name: str, config: str) -> Entry:
    """A Llama whose linears are quantised as one of torchao's configurations says."""
    (llama,) = (entry for entry in decoders() if entry.name == "Llama")

    def build() -> nn.Module:
        import torchao.quantization
        import transformers

        plain: Any = llama.build()
        options = transformers.TorchAoConfig(getattr(torchao.quantization, config)(set_inductor_config=False))
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder)
            built: nn.Module = type(plain).from_pretrained(folder, quantization_config=options)
        return built

    return Entry(name, build, llama.inputs, hollow=hollow)


def hollow(checkpoint: Path) -> Callable[[], nn.Module]:
    """What builds the module without memory, its weights of the classes that the checkpoint says."""
    from penstock.integrations.folders import open_model

    stored = open_model(checkpoint)

    def build() -> nn.Module:
        module = stored.build()
        stored.quantise(module)
        return module

    return build


def entries() -> tuple[Entry, ...]:
    """All of them, in the order of the table."""
    return (
        quantised("Llama in int8", "Int8WeightOnlyConfig"),
        quantised("Llama in float8", "Float8WeightOnlyConfig"),
    )
