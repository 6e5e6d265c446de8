"""The weight files of a model while it streams: gone, written to, or merely touched."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.integrations.called.facts import NO_FOLDER, ModuleFacts
from penstock.integrations.kept import KeptWeights
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.files.stamp import hash_storage, stamp_file
from penstock.schedule.facts.catalog import part_nbytes
from penstock.schedule.facts.errors import SourceError


class KeptFiles:
    """The files that hold the weights of the model `name`, as they are when this is made."""

    def __init__(self, name: str, kept: Sequence[KeptWeights]) -> None:
        self._name = name
        self._digests = {fqn: digest for one in kept for fqn, digest in one.digests.items()}
        self._states = {file: _state(file) for one in kept for file in one.files}

    def check(self, facts: ModuleFacts) -> ModuleFacts:
        """Return the facts with the stamps of the files as they are now.

        What was in memory is compared with its hashes where the system says that a file may be another one.
        Raises SourceError for a file that is gone, or holds other bytes.
        """
        files = list(facts.files)
        for file, before in self._states.items():
            with reading(file):
                there = file.is_file()
            if not there:
                raise SourceError(
                    f"{file} is gone, and it held the weights of {self._name}, which are not in memory: "
                    "put the file back; where that cannot be, restore() is impossible too, so load the model "
                    "again, from files that are there"
                )
            now = _state(file)
            if now == before or (not self._digests and now[:3] == before[:3]):
                continue
            number = next((n for n, one in enumerate(files) if one.path == str(file.absolute())), None)
            if number is not None:
                files[number] = stamp_file(file, recorded_path=str(file.absolute()))
                self._compare(file, number, replace(facts, files=tuple(files)))
            self._states[file] = now
        return facts if tuple(files) == facts.files else replace(facts, files=tuple(files))

    def _compare(self, file: Path, number: int, facts: ModuleFacts) -> None:
        """Raise SourceError unless a file holds the bytes that were in memory."""
        names = {
            part.storage: fqn
            for fqn, part in facts.parts.items()
            if part_nbytes(part) == facts.storages[part.storage].nbytes
        }
        for s, storage in enumerate(facts.storages):
            if any(extent.file == number for extent in storage.extents):
                digest = self._digests.get(names.get(s, ""))
                if digest is None or hash_storage(storage, facts.files, NO_FOLDER) != digest:
                    raise SourceError(
                        f"{file} has been changed since {self._name} was loaded from it: load the model again"
                    )


def _state(file: Path) -> tuple[int, int, int, int]:
    """Return size, times and inode of a file. Raises SourceError where the system does not tell."""
    with reading(file):
        state = os.stat(file)
    return state.st_size, state.st_mtime_ns, state.st_ino, state.st_ctime_ns
