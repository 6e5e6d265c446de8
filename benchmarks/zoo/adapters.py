"""Models with adapters of peft: base and adapter in one checkpoint, under the names of the adapted module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.transformers_models import decoders


def adapted_llama() -> nn.Module:
    """A Llama with LoRA in its attention; the adapter's values are random and not nothing."""
    from peft import LoraConfig, get_peft_model

    (llama,) = (entry for entry in decoders() if entry.name == "Llama")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = llama.build()
    built: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False).get_base_model()
    return built


def write(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")


def load(model: nn.Module, folder: Path) -> nn.Module:
    from safetensors.torch import load_file

    loaded = adapted_llama()
    loaded.load_state_dict(load_file(folder / "model.safetensors"))
    return loaded


def entries() -> tuple[Entry, ...]:
    """All of them, in the order of the table."""
    inputs = {"input_ids": torch.arange(1, 9)[None], "use_cache": False}
    return (Entry("Llama with LoRA", adapted_llama, inputs, write=write, load=load),)
