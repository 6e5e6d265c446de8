"""Gives an exported program the values of a checkpoint, mapped from its files without a copy."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.passes.annotate import Annotated, annotate_with_values
from penstock.passes.building.fake_export import computed_buffers, with_computed_buffers
from penstock.passes.lowering.hollow import COPIED
from penstock.passes.weights.subclasses import with_plain_parts
from penstock.passes.weights.values import has_values, tensor_in, with_values
from penstock.runtime.checkpoint.binding import (
    Found,
    Rename,
    Rules,
    Span,
    check_parts,
    find_values,
    part_names,
    tensor_names,
    without,
)
from penstock.runtime.checkpoint.opening import Checkpoint, open_checkpoint
from penstock.runtime.checkpoint.slices import Slices
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Extent, Storage, Weight

_NAMED = 5
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
    """A copy of the program whose weights are those of a checkpoint, mapped from its files.

    `checkpoint` is a safetensors file, an index, a folder, several files, a file that torch.save wrote, or a
    folder of torch.distributed (whose chunks are copied into memory where a tensor has several).
    `rename` maps an FQN to a tensor's name there, or to those of several tensors whose rows, one after
    another, are the weight's; tied weights need one of their names. Non-persistent buffers of a program of
    fake_export get the values that their module computes. Writing to a bound value changes memory, not the
    file. Nothing is read before it is used, but for what is copied.

    With `cast`, floating-point tensors of another dtype than their weight's are converted to it, as torch
    does; the converted copy is in memory. `slices` gives weights one rank's equal part of a tensor, by
    patterns of FQNs: `{"*.q_proj.weight": (0, rank, ranks)}` takes rows, which are mapped, too; parts of
    other dimensions are copied, reading nothing else. `only` has patterns of tensor names: all others are
    as if they were not there, and neither are shards of an index that hold nothing else.

    Raises SourceError for weights that are missing or of another dtype or shape, and for tensors that the
    program has no use for, unless a pattern of `ignore` matches them; and for patterns that match nothing.
    """
    opened = open_checkpoint(checkpoint, only)
    ignore = _ignored(ignore, opened)
    annotated = annotate_with_values(exported)
    files = without(opened, computed_buffers([exported]), rename)
    names = part_names(annotated.payload.weights, rename, files.tensors)
    weights = annotated.payload.tensors
    found = find_values(weights, annotated.payload.storages, files, Rules(names, cast, slices))
    check_parts(annotated.payload.weights, found.spans)
    _refuse_unexpected(weights, files, names, ignore)
    values = _values(weights, found, files)

    def value(name: str, old: Any) -> Any:
        found = values.get(name, old)
        if isinstance(found, torch.Tensor) and not has_values(found):
            raise SourceError(
                f"buffer {name} has no value: it is neither in the checkpoint nor computed by its module"
            )
        return found

    return with_values(with_plain_parts(with_computed_buffers(exported)), value)


def with_small_values(
    annotated: Annotated, checkpoint: Checkpoint, rules: Rules
) -> dict[str, ExportedProgram]:
    """The programs with the checkpoint's small values, which a compiler may copy into its code."""
    payload = annotated.payload
    rules = replace(rules, rename=part_names(payload.weights, rules.rename, checkpoint.tensors))
    found = find_values(payload.tensors, payload.storages, checkpoint, rules)
    small = [w for w in payload.tensors if payload.storages[w.parts[0].storage].nbytes <= COPIED]
    values = _values(small, found, checkpoint)
    return {name: with_values(exported, values.get) for name, exported in annotated.programs.items()}


def _ignored(ignore: str | Sequence[str], checkpoint: Checkpoint) -> Sequence[str]:
    patterns = (ignore,) if isinstance(ignore, str) else ignore
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in checkpoint.tensors):
            raise SourceError(
                f"ignore= has {pattern!r}, which matches no tensor of the checkpoint: correct it"
            )
    return patterns


def _refuse_unexpected(
    weights: Sequence[Weight], checkpoint: Checkpoint, rename: Rename, ignore: Sequence[str]
) -> None:
    known = {name for weight in weights for name in tensor_names(weight.fqn, rename)}
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in known and not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if unexpected:
        named = ", ".join(unexpected[:_NAMED]) + (", ..." if len(unexpected) > _NAMED else "")
        origin = checkpoint.tensors[unexpected[0]].origin
        raise SourceError(
            f"{len(unexpected)} tensors of {origin} are no weights of the program: {named}; "
            "give the checkpoint that belongs to it, or patterns of what to leave out (ignore=)"
        )


def _values(weights: Sequence[Weight], bound: Found, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """A tensor for each weight that the files hold; those of one storage share its memory."""
    maps: dict[int, mmap.mmap] = {}
    memory: dict[int, torch.Tensor] = {}
    values = {}
    for weight in weights:
        part = weight.parts[0]
        storage = bound.storages[part.storage]
        if part.storage not in memory and part.storage in bound.spans:
            memory[part.storage] = _memory(storage, bound.spans[part.storage], checkpoint, maps)
        if part.storage in memory:
            values[weight.fqn] = tensor_in(memory[part.storage], part)
    return values


def _memory(
    storage: Storage, spans: Sequence[Span], checkpoint: Checkpoint, maps: dict[int, mmap.mmap]
) -> torch.Tensor:
    """The bytes of a storage, mapped where they lie together in a file, and copied otherwise."""
    if len(storage.extents) == 1 and storage.extents[0].nbytes == storage.nbytes:
        mapped = _mapped(storage.extents[0], checkpoint, maps)
        if mapped.data_ptr() % 8 == 0:
            return mapped
    whole = torch.zeros(storage.nbytes, dtype=torch.uint8)
    for span in spans:
        position = span.offset
        for chunk in span.chunks(checkpoint.files):
            if len(chunk):
                whole[position : position + len(chunk)] = torch.frombuffer(chunk, dtype=torch.uint8)
            position += len(chunk)
    return whole


def _mapped(extent: Extent, checkpoint: Checkpoint, maps: dict[int, mmap.mmap]) -> torch.Tensor:
    if extent.file not in maps:
        with Path(checkpoint.files[extent.file]).open("rb") as file:
            # Private memory, which Linux would count in full, though next to nothing is written.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
            maps[extent.file] = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    if not extent.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(
        maps[extent.file], dtype=torch.uint8, count=extent.nbytes, offset=extent.file_offset
    )
