"""The values from which the parameters of a training program start, in a safetensors file of the artifact."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.files.stamp import file_chunks
from penstock.runtime.files.tensor_file import open_tensors
from penstock.schedule.facts.errors import PassError, SourceError

PARAMETERS = "trainable.safetensors"


def write_parameters(values: Mapping[str, torch.Tensor], folder: Path) -> str:
    """Writes the values by FQN into a file of an artifact that is being built, and returns its sha256.

    Raises PassError for values whose rows do not lie one behind another, which the file would not keep.
    """
    from safetensors.torch import save_file

    for fqn, value in values.items():
        if not value.is_contiguous():
            raise PassError(f"{fqn} is to be trained and is not contiguous: export it as contiguous()")
    save_file({fqn: value.detach().contiguous() for fqn, value in values.items()}, folder / PARAMETERS)
    return _hash(folder / PARAMETERS)


def read_parameters(folder: Path, names: Sequence[str], sha256: str) -> dict[str, torch.Tensor]:
    """Reads the values of these FQNs that `write_parameters` wrote.

    Raises SourceError for a file that is damaged, is another one, or lacks one of them.
    """
    path = folder / PARAMETERS
    if _hash(path) != sha256:
        raise SourceError(f"{path} has changed since it was compiled: restore it, or compile again")
    with open_tensors(path) as opened:
        for name in names:
            if name not in opened.entries:
                raise SourceError(f"{path} lacks the parameter {name}: compile again")
        return {name: opened.get_tensor(name) for name in names}


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with reading(path):
        for chunk in file_chunks(path, 0, path.stat().st_size):
            digest.update(chunk)
    return digest.hexdigest()
