"""A compiled program with other values: a weight file in the place of one that looks the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.runtime.files.safetensors_file import read_header
from penstock.runtime.files.stamp import hash_storage, stamp_file
from penstock.runtime.program import Program


def same_layout(first: Path, second: Path) -> bool:
    """Whether two files hold tensors of the same names, dtypes and shapes in the same places."""
    return read_header(first).raw == read_header(second).raw


def with_other_file(program: Program, old: Path, new: Path) -> Program | None:
    """The program that reads `new` where it read `old`, of the same layout: its plans stay what they are.

    None where the compiler has copied a weight of that file into its code.
    """
    payload = program.payload
    number = [file.path for file in payload.files].index(str(old.absolute()))
    files = list(payload.files)
    files[number] = stamp_file(new, recorded_path=str(new.absolute()))
    storages = list(payload.storages)
    for s, storage in enumerate(payload.storages):
        if any(extent.file == number for extent in storage.extents):
            if storage.kind == "inlined":
                return None
            storages[s] = replace(storage, sha256=hash_storage(storage, files, program.path))
    changed = Program(program.path, replace(payload, files=tuple(files), storages=tuple(storages)))
    if payload.lowering == "eager":
        changed.lowered = replace(program.lowered, payload=changed.payload)
    return changed
