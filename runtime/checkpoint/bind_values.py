"""Gives an exported program the values of a checkpoint, mapped from its files without a copy."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.passes.annotate import Annotated, annotate_with_values
from penstock.passes.building.fake_export import with_computed_buffers
from penstock.passes.lowering.hollow import COPIED
from penstock.passes.weights.subclasses import with_plain_parts
from penstock.passes.weights.values import has_values, tensor_in, with_values
from penstock.runtime.checkpoint.binding import Found, Rename, Rules, find_values, listed, without
from penstock.runtime.checkpoint.opening import Checkpoint, open_checkpoint
from penstock.runtime.checkpoint.slices import Slices
from penstock.schedule.bounded_file import open_regular
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Extent, Storage
from penstock.schedule.payload.codec import Payload

_NORESERVE = 0x4000 if sys.platform == "linux" else 0


def bind(
    exported: ExportedProgram,
    checkpoint: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    rename: Rename = None,
    cast: bool = False,
    slices: Slices | None = None,
    only: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
) -> ExportedProgram:
    """Returns a copy of the program whose weights are those of a checkpoint, mapped from its files.

    `checkpoint` is a safetensors file, an index, a folder, several files, a file that torch.save wrote, or a
    folder of torch.distributed (whose chunks are copied into memory where a tensor has several).
    `rename` maps an FQN to a tensor's name there, or to those of several tensors whose rows, one after
    another, are the weight's; tied weights need one of their names. Non-persistent buffers of a program from
    fake_export get the values that their module computes. Writing to a bound value changes memory, not the
    file. Mapped values are read when they are used; only values that have to be copied are read at once.

    With `cast`, floating-point tensors of another dtype than their weight's are converted to it, as torch
    does; the converted copy is in memory. `slices` gives weights one rank's equal part of a tensor, by
    patterns of FQNs: `{"*.q_proj.weight": (0, rank, ranks)}` takes rows, which are mapped as well; parts of
    other dimensions are copied, and only their bytes are read. `only` has patterns of tensor names: all other
    tensors are ignored, and shards of an index that hold only ignored tensors may be missing.

    Raises SourceError for weights that are missing or of another dtype or shape, and for tensors that the
    program has no use for, unless a pattern of `ignore` matches them; and for patterns that match nothing.
    """
    opened = open_checkpoint(checkpoint, only)
    ignore = _ignored(ignore, opened)
    annotated = annotate_with_values(exported)
    files = without(opened, annotated.computed, rename)
    stored = find_values(annotated.payload.weights, files, Rules(rename, cast, slices))
    _refuse_unexpected(stored, files, ignore)
    values = _values(annotated.payload, stored)

    def value(name: str, old: Any) -> Any:
        value = values.get(name, old)
        if isinstance(value, torch.Tensor) and not has_values(value):
            raise SourceError(
                f"buffer {name} has no value: it is neither in the checkpoint nor computed by its module"
            )
        return value

    return with_values(with_plain_parts(with_computed_buffers(exported)), value)


def with_small_values(annotated: Annotated, stored: Found) -> dict[str, ExportedProgram]:
    """Returns the programs with the small values that were found, which a compiler may copy into its code."""
    values = _values(annotated.payload, stored, most=COPIED)
    return {name: with_values(exported, values.get) for name, exported in annotated.programs.items()}


def _ignored(ignore: str | Sequence[str], checkpoint: Checkpoint) -> Sequence[str]:
    patterns = (ignore,) if isinstance(ignore, str) else ignore
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in checkpoint.tensors):
            raise SourceError(
                f"ignore= has {pattern!r}, which matches no tensor of the checkpoint: correct it"
            )
    return patterns


def _refuse_unexpected(stored: Found, checkpoint: Checkpoint, ignore: Sequence[str]) -> None:
    known = {name for names in stored.names.values() for name in names}
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if unexpected:
        origin = checkpoint.tensors[unexpected[0]].origin
        raise SourceError(
            f"{len(unexpected)} tensors of {origin} are no weights of the program: {listed(unexpected)}; "
            "give the checkpoint that belongs to it, or patterns of what to leave out (ignore=)"
        )


def _values(payload: Payload, stored: Found, *, most: int | None = None) -> dict[str, torch.Tensor]:
    """Returns a tensor for each weight that the files hold, in a storage of at most `most` bytes.

    Tensors of one storage share its memory.
    """
    maps: dict[int, mmap.mmap] = {}
    storages = stored.placed(payload.storages)
    memory = {
        s: _memory(storages[s], s, stored, maps)
        for s in stored.spans
        if most is None or storages[s].nbytes <= most
    }
    parts = {weight.fqn: weight.parts[0] for weight in payload.tensors}
    return {
        fqn: tensor_in(memory[part.storage], part) for fqn, part in parts.items() if part.storage in memory
    }


def _memory(storage: Storage, number: int, stored: Found, maps: dict[int, mmap.mmap]) -> torch.Tensor:
    """Returns the bytes of a storage, mapped if they are one run of a file, and copied otherwise."""
    if len(storage.extents) == 1 and storage.extents[0].nbytes == storage.nbytes:
        mapped = _mapped(storage.extents[0], stored.files, maps)
        if mapped.data_ptr() % 8 == 0:
            return mapped
    whole = torch.zeros(storage.nbytes, dtype=torch.uint8)
    for start, chunk in stored.chunks(number):
        if len(chunk):
            whole[start : start + len(chunk)] = torch.frombuffer(chunk, dtype=torch.uint8)
    return whole


def _mapped(extent: Extent, files: Sequence[Path], maps: dict[int, mmap.mmap]) -> torch.Tensor:
    if extent.file not in maps:
        with open(open_regular(files[extent.file]), "rb") as file:
            # Linux would count private memory in full, although next to nothing of it is written.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
            maps[extent.file] = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    if not extent.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(
        maps[extent.file], dtype=torch.uint8, count=extent.nbytes, offset=extent.file_offset
    )
