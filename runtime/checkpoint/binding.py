"""Finds the bytes of a program's weights in a checkpoint, by FQN, and gives a program its values."""

from __future__ import annotations

import hashlib
import mmap
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.passes.annotate import Annotated, annotate_with_values
from penstock.passes.building.fake_export import with_computed_buffers
from penstock.passes.lowering.inductor import COPIED
from penstock.passes.weights.lifted import has_values, tensor_in, with_values
from penstock.passes.weights.subclasses import with_plain_parts
from penstock.runtime.checkpoint.opening import Checkpoint, open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import Reading, Slice, Slices, match_slices, region
from penstock.runtime.files.pack import Chunk
from penstock.runtime.files.safetensors_file import FLOATS, TORCH_NAMES
from penstock.schedule.bounded_file import open_regular
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Extent, Part, Storage, Weight, part_nbytes
from penstock.schedule.facts.parts import plain_weights, tensor_of
from penstock.schedule.payload.codec import Payload

Names = str | Sequence[str]
"""A tensor of the files, or several whose bytes, one tensor after another, are one weight's."""

Rename = Callable[[str], Names] | Mapping[str, Names] | None
"""A map from an FQN of the program to names in the files: a function, or a table of names that differ."""

Readings = tuple[Reading, ...]
"""The readings that follow one another in one part of a weight."""


@dataclass(frozen=True)
class Rules:
    """Rules by which tensors of the files become weights: names, casts to the weight's dtype, and slices."""

    rename: Rename = None
    cast: bool = False
    slices: Slices | None = None


@dataclass(frozen=True)
class Span:
    """Bytes from `offset` of a storage on: those of a reading without its first `skip`."""

    offset: int
    skip: int
    reading: Reading

    @property
    def stop(self) -> int:
        return self.offset + self.reading.nbytes - self.skip

    def extents(self) -> Iterator[Extent]:
        """Yields the runs of files in which the bytes lie, as extents of the storage."""
        position = self.offset - self.skip
        for file, start, nbytes in self.reading.runs():
            skipped = min(max(self.offset - position, 0), nbytes)
            if nbytes > skipped:
                yield Extent(file, start + skipped, position + skipped, nbytes - skipped)
            position += nbytes

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        """Yields the bytes of the span, at most 16 MiB at a time."""
        skip = self.skip
        for chunk in self.reading.chunks(files):
            yield memoryview(chunk)[skip:]
            skip = max(skip - len(chunk), 0)


@dataclass(frozen=True)
class Found:
    """The bytes of storages in the `files` of a checkpoint: `spans[s]` are those of storage s, in order.

    `names` has the tensors in the files of every weight, or of each of its parts where it has several.
    """

    files: tuple[Path, ...]
    names: Mapping[str, tuple[str, ...]]
    spans: Mapping[int, tuple[Span, ...]]

    def placed(self, storages: Iterable[Storage]) -> tuple[Storage, ...]:
        """Returns the storages with their extents in files. Gathered or cast storages have no extents."""
        extents = {
            s: tuple(extent for span in spans for extent in span.extents())
            for s, spans in self.spans.items()
            if all(span.reading.as_stored for span in spans)
        }
        return tuple(
            replace(storage, extents=extents[s]) if s in extents else storage
            for s, storage in enumerate(storages)
        )

    def chunks(self, storage: int) -> Iterator[tuple[int, Chunk]]:
        """Yields the bytes of a storage, at most 16 MiB at a time, each with their offset in the storage."""
        for span in self.spans[storage]:
            position = span.offset
            for chunk in span.chunks(self.files):
                yield position, chunk
                position += len(chunk)


def find_values(weights: Sequence[Weight], checkpoint: Checkpoint, rules: Rules) -> Found:
    """Find the bytes that the checkpoint has for weights.

    Tied weights need only one of their names in the files; if the files have several, their bytes must be
    equal. A buffer or constant may be missing if all of its storage is missing, which then has no spans.

    Raises SourceError, which names the weight, for a parameter that no file has, for one of another dtype
    (unless the rules cast it), shape or order of elements, and for a weight of which the files have only some
    parts. It counts all weights that are missing.
    """
    names = _part_names(weights, rules.rename, checkpoint.tensors)
    plain = plain_weights(weights)
    shares = match_slices(plain, rules.slices or {})
    readings_of: dict[int, dict[tuple[int, int], Readings]] = {}
    absent: list[Weight] = []
    for weight in plain:
        part, tensor_names = weight.parts[0], names[weight.fqn]
        if any(name not in checkpoint.tensors for name in tensor_names):
            absent.append(weight)
            continue
        pieces = _pieces(weight, part, tensor_names, checkpoint)
        taken = (_taken(weight, name, checkpoint, shares, len(pieces)) for name in tensor_names)
        named = zip(tensor_names, taken, strict=True)
        readings = tuple(
            _reading(weight, piece, name_taken, rules.cast)
            for piece, name_taken in zip(pieces, named, strict=True)
        )
        place = (part.offset, sum(reading.nbytes for reading in readings))
        first = readings_of.setdefault(part.storage, {}).setdefault(place, readings)
        if first != readings:
            _check_tie(weight, tensor_names[0], (first, readings), checkpoint.files)
    spans = {index: _disjoint(places) for index, places in readings_of.items()}
    missing = [w for w in absent if not _covered(w.parts[0], spans)]
    # A weight that shares a storage with one from the files can only come from the files, too.
    _refuse_missing(
        [w.fqn for w in missing if w.role == "parameter" or w.parts[0].storage in readings_of],
        checkpoint.files,
    )
    _check_parts(weights, spans)
    return Found(checkpoint.files, names, spans)


def without(checkpoint: Checkpoint, fqns: Iterable[str], rename: Rename) -> Checkpoint:
    """Returns the checkpoint without the tensors of some weights."""
    names = {name for fqn in fqns for name in tensor_names(fqn, rename)}
    return replace(checkpoint, tensors={n: t for n, t in checkpoint.tensors.items() if n not in names})


def tensor_names(fqn: str, rename: Rename) -> tuple[str, ...]:
    """Returns the names of a weight in the files: one, or those of the tensors whose rows it consists of."""
    if rename is None:
        return (fqn,)
    if not callable(rename) and not isinstance(rename, Mapping):
        raise SourceError(f"rename= is {rename!r}, expected a table or a function from FQNs to names")
    renamed = rename.get(fqn, fqn) if isinstance(rename, Mapping) else rename(fqn)
    names: Any = (renamed,) if isinstance(renamed, str) else renamed
    if not (isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names)):
        raise SourceError(
            f"rename= makes {renamed!r} of {fqn}, expected the name of a tensor, or several: correct it"
        )
    return tuple(names)


def _pieces(weight: Weight, part: Part, names: Sequence[str], checkpoint: Checkpoint) -> list[Part]:
    """The share of a part that each of several tensors has. Raises SourceError if they do not add up."""
    if len(names) == 1:
        return [part]
    shapes = [checkpoint.tensors[name].shape for name in names]
    rows = [prod(shape[:-1]) for shape in shapes]
    fits = part.shape and all(shape and shape[-1] == part.shape[-1] for shape in shapes)
    if not fits or sum(rows) != prod(part.shape[:-1]):
        raise SourceError(
            f"weight {weight.fqn} is {list(part.shape)} in the program, and the {len(names)} tensors for it, "
            f"{names[0]} to {names[-1]}, have {sum(rows)} rows of {list(shapes[0][-1:])}: give those whose "
            "rows, one after another, are its own"
        )
    _refuse_strides(weight, part)
    return [replace(part, shape=shape, stride=_dense_stride(shape)) for shape in shapes]


def _taken(
    weight: Weight, name: str, checkpoint: Checkpoint, shares: Mapping[str, Slice], count: int
) -> Reading:
    """Returns the part to read of one of a weight's `count` tensors: all of it, or the slice of a rank."""
    if weight.fqn in shares and count > 1:
        raise SourceError(
            f"weight {weight.fqn} consists of several tensors, of which slices= cannot take a part: leave it "
            "out of slices="
        )
    tensor = checkpoint.tensors[name]
    return Reading(tensor, region(weight.fqn, name, tensor, shares.get(weight.fqn)))


def _reading(weight: Weight, part: Part, named: tuple[str, Reading], cast: bool) -> Reading:
    """The reading that is a part's value. Raises SourceError if dtype, shape or strides do not allow it."""
    name, taken = named
    tensor, shape = taken.tensor, taken.shape
    before = TORCH_NAMES.get(tensor.dtype, tensor.dtype)
    floats = before in FLOATS and part.dtype in FLOATS
    if shape != part.shape or (before != part.dtype and not (cast and floats)):
        of = "" if shape == tensor.shape else f" of {list(tensor.shape)}"
        advice = ", or cast it (cast=True)" if floats and shape == part.shape else ""
        raise SourceError(
            f"weight {weight.fqn} is {part.dtype} {list(part.shape)} in the program and tensor {name!r} of "
            f"{tensor.origin} is {before} {list(shape)}{of}: "
            f"give the checkpoint that belongs to the program{advice}"
        )
    _refuse_strides(weight, part)
    return replace(taken, cast=part.dtype if before != part.dtype else None)


def _refuse_strides(weight: Weight, part: Part) -> None:
    if not is_dense(part):
        raise SourceError(
            f"weight {weight.fqn} has strides {list(part.stride)} in the program, but safetensors files hold "
            "dense tensors: make it contiguous before the export, or compile without weights="
        )


def is_dense(part: Part) -> bool:
    """Tells whether the elements of a part lie one behind another, in the order of its indices."""
    pairs = zip(part.shape, part.stride, _dense_stride(part.shape), strict=True)
    return 0 in part.shape or not any(size > 1 and stride != dense for size, stride, dense in pairs)


def _dense_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _check_tie(weight: Weight, name: str, both: tuple[Readings, Readings], files: Sequence[Path]) -> None:
    """Refuse tied weights whose tensors in the files, under two names, have different bytes."""
    first, second = ((chunk for reading in side for chunk in reading.chunks(files)) for side in both)
    if digest_of_chunks(first) != digest_of_chunks(second):
        raise SourceError(
            f"weight {weight.fqn} is tied to another in the program, but tensor {name!r} holds other values "
            "than that one's: export it with the checkpoint loaded, or rename one of them"
        )


def digest_of_chunks(chunks: Iterable[Chunk]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _disjoint(places: Mapping[tuple[int, int], Readings]) -> tuple[Span, ...]:
    """Returns the readings in the order of their places in the storage, without bytes of earlier ones."""
    placed: list[tuple[int, Reading]] = []
    for (offset, _), readings in places.items():
        starts = accumulate((reading.nbytes for reading in readings), initial=offset)
        placed += zip(starts, readings, strict=False)
    result: list[Span] = []
    end = 0
    for offset, reading in sorted(placed, key=lambda placement: (placement[0], -placement[1].nbytes)):
        earlier = max(end - offset, 0)
        if earlier < reading.nbytes:
            result.append(Span(offset + earlier, earlier, reading))
            end = offset + reading.nbytes
    return tuple(result)


def _covered(part: Part, spans: Mapping[int, Sequence[Span]]) -> bool:
    """Tells whether the bytes of a part were found under another weight's name."""
    position = part.offset
    for span in spans.get(part.storage, ()):
        if span.offset <= position < span.stop:
            position = span.stop
    return position >= part.offset + part_nbytes(part)


def listed(names: Sequence[object], most: int = 5) -> str:
    """Returns the first of several names, for a message."""
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


def _refuse_missing(missing: Sequence[str], files: Sequence[Path]) -> None:
    if missing:
        raise SourceError(
            f"{len(missing)} of the program's weights are not in {listed(files, 2)}: {listed(missing)}; "
            "give the missing shards, or say with rename= what they are called there"
        )


def _part_names(
    weights: Sequence[Weight], rename: Rename, stored: Container[str]
) -> dict[str, tuple[str, ...]]:
    """Returns the names in the files of weights, and of parts of quantised ones, by `FQN` or `FQN.PART`.

    A part that `rename` does not name is looked for under the weight's name in the files followed by `.PART`,
    and then under its name in torchao's safetensors files (`layer._weight_PART`). Raises SourceError for a
    table that renames a name which is no weight.
    """
    names: dict[str, tuple[str, ...]] = {}
    fqns = {
        name for weight in weights for part in weight.parts for name in (weight.fqn, tensor_of(weight, part))
    }
    unknown = [name for name in rename if name not in fqns] if isinstance(rename, Mapping) else ()
    if unknown:
        raise SourceError(f"rename= has {unknown[0]!r}, which is no weight of the program: correct it")
    for weight in weights:
        for part in weight.parts:
            candidates = list(_candidates(weight.fqn, part.name, rename))
            there = (c for c in candidates if all(name in stored for name in c))
            names[tensor_of(weight, part)] = next(there, candidates[0])
    return names


def _candidates(fqn: str, part: str, rename: Rename) -> Iterator[tuple[str, ...]]:
    if not part:
        yield tensor_names(fqn, rename)
        return
    yield tensor_names(f"{fqn}.{part}", rename)
    wholes = tensor_names(fqn, rename)
    yield tuple(f"{whole}.{part}" for whole in wholes)
    split = [whole.rpartition(".") for whole in wholes]
    yield tuple(f"{module}{dot}_{attribute}_{part}" for module, dot, attribute in split)


def _check_parts(weights: Sequence[Weight], storages: Mapping[int, object]) -> None:
    """Raise SourceError for a weight of which the files, with `storages`, have only some parts."""
    for weight in weights:
        missing = [part for part in weight.parts if part.storage not in storages]
        if missing and len(missing) < len(weight.parts):
            names = ", ".join(tensor_of(weight, part) for part in missing)
            raise SourceError(
                f"the files have only some parts of weight {weight.fqn}: {names} is missing; values of two "
                "checkpoints do not belong together: give the missing shards, or name them with rename="
            )


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
    """Return a copy of the program whose weights are those of a checkpoint, mapped from its files.

    Mapped values are read when they are used; only values that have to be copied are read at once. Writing to
    a value changes memory, not the file. Non-persistent buffers of a program from `fake_export` get the
    values that their module computes.

    Args:
        exported: A program.
        checkpoint: A safetensors file, an index, a folder, several files, a file that torch.save wrote, or a
            folder of torch.distributed (whose chunks are copied into memory where a tensor has several).
        rename: The name in the checkpoint of each FQN, or the names of tensors whose rows, one after another,
            are the weight's: a function, or a mapping of names that differ. Tied weights need one of their
            names.
        cast: Convert floating-point tensors of another dtype than their weight's, as torch does, in memory.
        slices: One rank's equal part of tensors, by FQN pattern: `{"*.q_proj.weight": (0, rank, ranks)}`
            takes rows, which are mapped. Parts of other dimensions are copied, and only their bytes are read.
        only: Patterns of tensor names. All others are ignored, and shards of an index that hold no other may
            be missing.
        ignore: Patterns of names of tensors that the program may have no use for.

    Raises:
        SourceError: A weight is missing, or of another dtype or shape; the program has no use for a tensor;
            or a pattern matches nothing.

    Example:
        >>> from safetensors.torch import save_file
        >>> save_file(model.state_dict(), "mlp.safetensors")
        >>> bound = penstock.bind(exported, "mlp.safetensors")
        >>> torch.equal(bound.module()(x), model(x))
        True
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
    used = {name for names in stored.names.values() for name in names}
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if unexpected:
        origin = checkpoint.tensors[unexpected[0]].origin
        raise SourceError(
            f"{len(unexpected)} tensors of {origin} are no weights of the program: {listed(unexpected)}; "
            "give the checkpoint that belongs to it, or patterns of what to leave out (ignore=)"
        )


def _values(payload: Payload, stored: Found, *, most: int | None = None) -> dict[str, torch.Tensor]:
    """A tensor for each weight in the files, of storages of at most `most` bytes, whose memory it shares."""
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
