"""Weights of a module in files, while they are not in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.passes.weights.lifted import storage_bytes
from penstock.runtime.cache import Hold
from penstock.runtime.checkpoint.binding import Names, digest_of_chunks, is_dense
from penstock.runtime.files.artifact_files import hash_storage, stamp_file
from penstock.runtime.files.pack import tensor_chunks
from penstock.runtime.files.safetensors_file import reading
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import ITEM_SIZES, Part, WeightFile, part_nbytes

if TYPE_CHECKING:
    from penstock.integrations.called.facts import ModuleFacts


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


def digest_of(value: torch.Tensor) -> str:
    """Return the sha256 of the bytes of a tensor on any device, in the order of their addresses."""
    return digest_of_chunks(tensor_chunks(bytes_of(value)))


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first to the last item of a tensor, as one dimension that shares them."""
    start = int(value.storage_offset()) * value.itemsize
    steps = ((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    items = 1 + sum(steps) if value.numel() else 0
    return storage_bytes(value.detach())[start : start + items * value.itemsize]


def in_file(part: Part) -> Part:
    """Return a part as files hold it: one dimension if its items are not in the order of its indices."""
    if is_dense(part):
        return part
    return replace(part, shape=(part_nbytes(part) // ITEM_SIZES[part.dtype],), stride=(1,))


def names_of(weight_files: Iterable[KeptWeights]) -> dict[str, Names]:
    """Return what files call weights whose names in the module are other ones."""
    return {fqn: names for weights in weight_files for fqn, names in weights.names.items()}


class KeptFiles:
    """The files that hold the weights of the model `name`, as they are when this is made."""

    def __init__(self, name: str, weight_files: Iterable[KeptWeights]) -> None:
        self._name = name
        self._states = {file: state_of(file) for weights in weight_files for file in weights.files}

    def check(self, weight_files: Sequence[KeptWeights], facts: ModuleFacts) -> tuple[WeightFile, ...]:
        """Return the stamps of the files as they are now; `facts` has the former ones.

        What was in memory is compared with its hashes where the system says that a file may be another one.
        Raises SourceError for a file that is gone, or holds other bytes.
        """
        self.refuse_lost(weight_files)
        digests = {fqn: digest for weights in weight_files for fqn, digest in weights.digests.items()}
        files = list(facts.files)
        for file in (file for weights in weight_files for file in weights.files):
            now = state_of(file)
            before = self._states.setdefault(file, now)
            if now == before or (not digests and now[:3] == before[:3]):
                continue
            path = str(file.absolute())
            number = next((n for n, stamped in enumerate(files) if stamped.path == path), None)
            if number is not None:
                files[number] = stamp_file(file, recorded_path=path)
                self._compare(file, number, replace(facts, files=tuple(files)), digests)
            self._states[file] = now
        return tuple(files)

    def refuse_lost(self, weight_files: Iterable[KeptWeights]) -> None:
        """Raise SourceError for a file that is gone."""
        for file in (file for weights in weight_files for file in weights.files):
            with reading(file):
                there = file.is_file()
            if not there:
                raise SourceError(
                    f"{file} is gone, and it held the weights of {self._name}, which are not in memory: "
                    "put the file back; where that cannot be, restore() is impossible too, so load the model "
                    "again, from files that are there"
                )

    def _compare(self, file: Path, number: int, facts: ModuleFacts, digests: Mapping[str, str]) -> None:
        """Raise SourceError unless a file holds the bytes that were in memory."""
        whole = {
            part.storage: digests[name]
            for name, part in facts.parts.items()
            if name in digests and part_nbytes(part) == facts.storages[part.storage].nbytes
        }
        for s, storage in enumerate(facts.storages):
            has_bytes = any(extent.file == number for extent in storage.extents)
            if has_bytes and hash_storage(storage, facts.files, Path(os.devnull)) != whole.get(s):
                raise SourceError(
                    f"{file} has been changed since {self._name} was loaded from it: put the file back, or "
                    "load the model again"
                )


def state_of(file: Path) -> tuple[int, int, int, int]:
    """Return size, time, inode and ctime of a file. Raises SourceError where the system does not tell."""
    with reading(file):
        state = os.stat(file)
    return state.st_size, state.st_mtime_ns, state.st_ino, state.st_ctime_ns
