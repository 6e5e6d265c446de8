"""Writes a checkpoint in another layout or dtype, in bounded memory, always as safetensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from penstock.runtime.checkpoint.foreign_files import SUFFIXES
from penstock.runtime.checkpoint.opening import Checkpoint, open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import Reading, StoredTensor
from penstock.runtime.files.artifact_files import BytesDone, Progress, count_bytes
from penstock.runtime.files.pack import BLOCK, Chunk, PackEntry, check_space, write_packed
from penstock.runtime.files.safetensors_file import TORCH_NAMES, index_files, reading
from penstock.runtime.system.announcing import announced
from penstock.runtime.system.atomic import check_output, write_artifact
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.sizes import format_size, parse_size

_log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
_FILE = "model.safetensors"


@dataclass(frozen=True)
class Converted:
    """The files that were written, the number of tensors in them, and their bytes."""

    files: tuple[Path, ...]
    tensors: int
    nbytes: int


def convert(
    source: str | PathLike[str] | Sequence[str | PathLike[str]],
    target: str | PathLike[str],
    *,
    shard_size: int | str | None = None,
    dtype: str | None = None,
    only: str | Sequence[str] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the tensors of a checkpoint (safetensors, an index, a folder, or a file of torch) again.

    `target` is a `.safetensors` file, or a folder of shards of at most `shard_size` bytes with their index;
    one tensor larger than that has a shard of its own. `dtype` (`bfloat16`, ...) converts floating-point
    tensors, as torch does; `only` has patterns of the names to take. Tensors of whole blocks come first, so
    that they begin at blocks. Memory is bounded by a few pieces of 16 MiB, whatever the size. Writing is
    atomic; an existing target is refused without `force`.

    Raises SourceError if a tensor or a file cannot be read, converted or written.
    """
    path = Path(target)

    def write(checkpoint: Checkpoint) -> Converted:
        entries = sorted(
            (_entry(name, tensor, checkpoint, dtype) for name, tensor in checkpoint.tensors.items()),
            key=lambda packed: (packed.nbytes % BLOCK > 0, packed.nbytes % 64 > 0),
        )
        if not entries:
            raise SourceError(f"{source} holds no tensors")
        total = sum(packed.nbytes for packed in entries)
        most = parse_size(shard_size, name="shard_size") if shard_size is not None else total
        _check_output(path, total, sharded=shard_size is not None, force=force)
        _log.info("writing %s bytes of tensors to %s", f"{total:,}", path)
        report = count_bytes(progress, "converting", total)
        if path.suffix == ".safetensors":
            write_packed(path, entries, dense=True, force=force, progress=report)
            return Converted((path,), len(entries), total)
        files: list[str] = []

        def build(folder: Path) -> None:
            files.extend(write_shards(folder, entries, most, report, always_index=True))

        write_artifact(path, force=force, build=build, marker=INDEX)
        return Converted(tuple(path / name for name in files), len(entries), total)

    with announced(f"writing {path}"):
        return open_checkpoint(source, only).read(write)


def place_beside(source: Path) -> Path:
    """The safetensors file of a model's folder, or beside a file. Raises SourceError for safetensors."""
    if source.suffix in (".safetensors", ".json") or any(source.glob("*.safetensors")):
        raise SourceError(f"{source} is safetensors already: say with --output where to write it anew")
    if not source.is_dir():
        return source.with_suffix(".safetensors")
    return source / ("diffusion_pytorch_" * any(source.glob("diffusion_pytorch_model*")) + _FILE)


def write_shards(
    folder: Path,
    entries: Sequence[PackEntry],
    most: int,
    report: BytesDone | None = None,
    *,
    always_index: bool = False,
) -> list[str]:
    """Write tensors to a folder, in their order, in shards of at most `most` bytes; return the files' names.

    One tensor larger than that has a shard of its own. Several shards get an index, and with `always_index`
    one shard does too.
    """
    shards = _shards(entries, most)
    names = [f"model-{k + 1:05}-of-{len(shards):05}.safetensors" for k in range(len(shards))]
    names = names if len(shards) > 1 else [_FILE]
    for name, shard in zip(names, shards, strict=True):
        write_packed(folder / name, shard, dense=True, progress=report)
    if always_index or len(names) > 1:
        nbytes = sum(tensor.nbytes for tensor in entries)
        (folder / INDEX).write_text(_index(names, shards, nbytes), encoding="utf-8")
    return names


def _check_output(path: Path, nbytes: int, *, sharded: bool, force: bool) -> None:
    if path.suffix in SUFFIXES:
        raise SourceError(
            f"{path} would be a file of torch.save, and safetensors are written: give a .safetensors file "
            "or a folder"
        )
    file = path.suffix == ".safetensors"
    if file and sharded:
        raise SourceError(f"shards go to a folder, and {path} is a file: give a folder, or no shard size")
    check_output(path, force=force, marker=None if file else INDEX)
    if not file:
        _refuse_strangers(path)
    check_space(path.parent, nbytes, dense=True)


def _refuse_strangers(folder: Path) -> None:
    """Refuse a folder that holds more than a checkpoint's weights: replacing it would remove all of it."""
    with reading(folder):
        if not folder.is_dir() or not (folder / INDEX).is_file():
            return
        written = {INDEX, *(path.name for path in index_files(folder / INDEX))}
        if foreign := sorted({path.name for path in folder.iterdir()} - written):
            raise SourceError(
                f"{folder} holds {', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''} beside "
                "weights: replacing it would remove them, so choose another output"
            )


def _shards(entries: Sequence[PackEntry], most: int) -> list[list[PackEntry]]:
    shards: list[list[PackEntry]] = [[]]
    nbytes = 0
    for packed in entries:
        if shards[-1] and nbytes + packed.nbytes > most:
            shards.append([])
            nbytes = 0
        shards[-1].append(packed)
        nbytes += packed.nbytes
    return shards


def _index(names: Sequence[str], shards: Sequence[Sequence[PackEntry]], total: int) -> str:
    places = {packed.name: name for name, shard in zip(names, shards, strict=True) for packed in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n"


def _entry(name: str, tensor: StoredTensor, checkpoint: Checkpoint, dtype: str | None) -> PackEntry:
    before = TORCH_NAMES.get(tensor.dtype)
    after = _dtype_after(before, dtype)
    if before is None or after is None:
        raise SourceError(
            f"tensor {name!r} of {tensor.origin} is {tensor.dtype}, less than a byte an element, which is "
            "not written here: leave it out (only=)"
        )
    stored = Reading(tensor, tensor.whole, cast=after if after != before else None)

    def chunks() -> Iterator[Chunk]:
        yield from stored.chunks(checkpoint.files)
        checkpoint.check_unchanged(tensor)

    return PackEntry(name, after, tensor.shape, stored.nbytes, chunks)


def _dtype_after(before: str | None, dtype: str | None) -> str | None:
    """The dtype that a tensor is written in. Raises SourceError if tensors cannot be converted to it."""
    if dtype is None:
        return before
    wanted = getattr(torch, dtype, None) if dtype in TORCH_NAMES.values() else None
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise SourceError(f"tensors cannot be converted to {dtype!r}: give float32, float16 or bfloat16")
    floating = before is not None and getattr(torch, before).is_floating_point
    return dtype if floating else before


def describe(converted: Converted) -> Mapping[str, object]:
    """Returns the facts of a conversion, for JSON."""
    files = [str(path) for path in converted.files]
    return {"files": files, "tensors": converted.tensors, "bytes": converted.nbytes}


def summary(converted: Converted) -> list[tuple[str, str]]:
    """Returns the facts of a conversion, for people to read: a label and a text each."""
    files = ", ".join(path.name for path in converted.files[:3]) + "..." * (len(converted.files) > 3)
    return [
        ("tensors", str(converted.tensors)),
        ("bytes", format_size(converted.nbytes)),
        ("files", files),
    ]
