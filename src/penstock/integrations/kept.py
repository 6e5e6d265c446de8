"""Weights of a module in files, while they are not in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.passes.weights.values import storage_bytes
from penstock.runtime.cache import Hold
from penstock.runtime.checkpoint.binding import Names
from penstock.runtime.files.pack import tensor_chunks
from penstock.runtime.files.safetensors_file import reading
from penstock.schedule.facts.errors import SourceError


@dataclass(frozen=True)
class KeptWeights:
    """Files that hold weights of a module, under their FQNs or under the names in `names`.

    `digests` has the sha256 of the bytes of each weight that was in memory, by FQN; the parts of a quantised
    one are called `FQN.PART`. `phases` has the addresses, modulo ALIGNMENT, at which the module had weights
    that its files have at others. `hold` keeps what is in the cache from being removed.
    """

    files: tuple[Path, ...]
    names: Mapping[str, Names] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    phases: Mapping[str, int] = field(default_factory=dict)
    hold: Hold | None = None


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The sha256 of the bytes of contiguous tensors, by name."""
    return {name: digest_of(value) for name, value in tensors.items()}


def digest_of(value: torch.Tensor) -> str:
    """The sha256 of the bytes of a contiguous tensor, on any device."""
    digest = hashlib.sha256()
    for chunk in tensor_chunks(bytes_of(value)):
        digest.update(chunk)
    return digest.hexdigest()


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a one-dimensional tensor that shares them."""
    start = int(value.storage_offset()) * value.itemsize
    return storage_bytes(value.detach())[start : start + value.nbytes]


def names_of(kept: Iterable[KeptWeights]) -> dict[str, Names]:
    """What files call weights otherwise, of several."""
    return {fqn: names for one in kept for fqn, names in one.names.items()}


def refuse_lost(name: str, kept: Iterable[KeptWeights]) -> None:
    """Raise SourceError where a weight file of the model `name` is missing."""
    for file in (file for one in kept for file in one.files):
        with reading(file):
            there = file.is_file()
        if not there:
            raise SourceError(
                f"{file} is gone, and it held the weights of {name}, which are not in memory: "
                "put the file back; where that cannot be, restore() is impossible too, so load the model "
                "again, from files that are there"
            )
