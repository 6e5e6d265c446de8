"""The values from which the parameters of a training program start, in a safetensors file of the artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.runtime.files.safetensors_file import read_header

PARAMETERS = "trainable.safetensors"


def write_parameters(values: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes the values by FQN into a file of an artifact that is being built."""
    from safetensors.torch import save_file

    save_file({fqn: value.detach().contiguous() for fqn, value in values.items()}, folder / PARAMETERS)


def read_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the values that `write_parameters` wrote. Raises SourceError for a file that is damaged."""
    from safetensors.torch import load_file

    read_header(folder / PARAMETERS)
    values: dict[str, torch.Tensor] = load_file(folder / PARAMETERS)
    return values
