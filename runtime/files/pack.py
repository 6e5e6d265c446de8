"""Packs storages, in the order given, into one safetensors file that can be read by whole blocks.

The format forbids holes, so U8 tensors named `__penstock_pad__.N` fill the gaps that alignment leaves. No
tensor is held in memory as a whole: bytes are read and written in chunks of at most 16 MiB.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.files.artifact_files import CHUNK_BYTES, BytesDone
from penstock.runtime.files.safetensors_file import ITEM_BITS, PREFIX_BYTES, SAFETENSORS_NAMES
from penstock.schedule.atomic_file import replace_file
from penstock.schedule.facts.errors import SourceError

if TYPE_CHECKING:
    import torch

PAD_PREFIX = "__penstock_pad__."
ALIGNMENT = 64
BLOCK = 4096
BLOCK_ALIGNED_FROM = 64 << 10
_FLUSH_EVERY = 128 << 20

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True)
class PackEntry:
    """A tensor to pack: torch's name of its dtype, its shape, and a function that yields its bytes in order.

    A dtype that safetensors does not know is stored as U8 of shape (nbytes,). `chunks` may be
    called once; what it yields is written before the next chunk is asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterable[Chunk]]


@dataclass(frozen=True)
class PackedTensor:
    """The place of a tensor's bytes in the packed file, and their sha256."""

    name: str
    file_offset: int
    nbytes: int
    sha256: str


def write_packed(
    path: Path,
    entries: Sequence[PackEntry],
    *,
    dense: bool = False,
    force: bool = False,
    progress: BytesDone | None = None,
) -> tuple[PackedTensor, ...]:
    """Write `entries` in their order as the safetensors file `path`, atomically, in bounded memory.

    Every tensor begins at a multiple of 64 bytes; those of 64 KiB or more begin and, with the pad
    behind them, end at multiples of 4096, as do the data and the file; `dense` leaves nothing between
    tensors. SourceError if `path` exists without `force`, the disk is full, or an entry contradicts itself.
    """
    offsets, pads, data_nbytes = _place(entries, dense=dense)
    header = _header(entries, offsets, pads)
    total = len(header) + data_nbytes
    check_space(path.parent, total, dense=dense)
    placed = []
    with (
        replace_file(path, force=force) as fd,
        ThreadPoolExecutor(1) as pool,
        _filling_up(path.parent, total, dense=dense),
    ):
        writer = _Writer(fd, pool, progress)
        writer.write(header)
        for packed, offset in zip(entries, offsets, strict=True):
            start = len(header) + offset
            writer.write(bytes(start - writer.position))
            placed.append(PackedTensor(packed.name, start, packed.nbytes, writer.write_entry(packed)))
        writer.write(bytes(total - writer.position))
    _forget_pages(path)
    return tuple(placed)


def _forget_pages(path: Path) -> None:
    """Take the new file out of the page cache.

    What was written lies there in small folios; read again, through a mapping above all, it comes in
    folios of 2 MiB, which are mapped and dropped 50 times as fast (1,180 GB/s for 19; 1 GiB, ext4).
    """
    with suppress(OSError, AttributeError):  # the advice is optional; some systems lack it
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _place(entries: Sequence[PackEntry], *, dense: bool) -> tuple[list[int], list[tuple[int, int]], int]:
    """Returns the offset of each entry in the data, the ranges of the pads, and the bytes of the data."""
    offsets: list[int] = []
    pads: list[tuple[int, int]] = []
    position = 0
    block_end = False
    for packed in entries:
        _check_entry(packed)
        large = packed.nbytes >= BLOCK_ALIGNED_FROM
        alignment = BLOCK if large or block_end else ALIGNMENT
        position = _pad_to(position, 1 if dense else alignment, pads)
        offsets.append(position)
        position += packed.nbytes
        block_end = large
    return offsets, pads, _pad_to(position, 1 if dense else BLOCK, pads)


def check_space(folder: Path, nbytes: int, *, dense: bool) -> None:
    """Raise SourceError unless the disk of `folder` has `nbytes` available; `dense` as in `write_packed`."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise SourceError(
            f"{folder} cannot be written to ({error.strerror}); choose another output"
        ) from error
    available = status.f_bavail * status.f_frsize
    if nbytes > available:
        raise _disk_full(folder, nbytes, f"{available} are available", dense)


def tensor_chunks(flat: torch.Tensor) -> Iterator[Chunk]:
    """Yields the bytes of a contiguous one-dimensional uint8 tensor, on any device, 16 MiB at a time."""
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].cpu().numpy().data


class _Writer:
    """Writes in order, hashes on the pool's thread, and flushes often: the kernel holds up late writers."""

    def __init__(self, fd: int, pool: ThreadPoolExecutor, progress: BytesDone | None) -> None:
        self.position = 0
        self._fd = fd
        self._pool = pool
        self._progress = progress
        self._unflushed = 0

    def write(self, chunk: Chunk) -> None:
        remaining = memoryview(chunk).cast("B")
        while remaining:
            done = os.write(self._fd, remaining[:CHUNK_BYTES])
            remaining = remaining[done:]
            self.position += done
            self._unflushed += done
            if self._progress:
                self._progress(done)
            if self._unflushed >= _FLUSH_EVERY:
                os.fsync(self._fd)
                self._unflushed = 0

    def write_entry(self, packed: PackEntry) -> str:
        digest = hashlib.sha256()
        begin = self.position
        for chunk in packed.chunks():
            hashing = self._pool.submit(digest.update, chunk)
            try:
                self.write(chunk)
            finally:
                hashing.result()
        written = self.position - begin
        if written != packed.nbytes:
            raise SourceError(
                f"tensor {packed.name!r} should have {packed.nbytes} bytes and its source gave {written}"
            )
        return digest.hexdigest()


@contextmanager
def _filling_up(folder: Path, nbytes: int, *, dense: bool) -> Iterator[None]:
    """Reports a disk, or a quota, that others filled while `nbytes` were being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        status = os.statvfs(folder)
        left = status.f_bavail * status.f_frsize
        raise _disk_full(folder, nbytes, f"{left} were available when writing stopped", dense) from error


def _disk_full(folder: Path, nbytes: int, available: str, dense: bool) -> SourceError:
    # Weights can be used in place instead, but a dense file is a checkpoint that was asked for.
    advice = " or choose another output"
    if not dense:
        advice = ", choose another output, or refer to the checkpoint in place (pack=False)"
    return SourceError(
        f"the disk of {folder} is full: packing needs {nbytes} bytes and {available}; free some{advice}"
    )


def _header(entries: Sequence[PackEntry], offsets: Sequence[int], pads: Sequence[tuple[int, int]]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for packed, offset in zip(entries, offsets, strict=True):
        if packed.name in fields or packed.name.startswith(PAD_PREFIX):
            raise SourceError(f"tensor {packed.name!r} cannot be packed: its name is taken; rename it")
        dtype = SAFETENSORS_NAMES.get(packed.dtype)
        fields[packed.name] = {
            "dtype": dtype or "U8",
            "shape": packed.shape if dtype else (packed.nbytes,),
            "data_offsets": (offset, offset + packed.nbytes),
        }
    for number, (start, stop) in enumerate(pads):
        fields[f"{PAD_PREFIX}{number}"] = {
            "dtype": "U8",
            "shape": (stop - start,),
            "data_offsets": (start, stop),
        }
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX_BYTES + len(text)) % BLOCK)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def _check_entry(packed: PackEntry) -> None:
    dtype = SAFETENSORS_NAMES.get(packed.dtype)
    if dtype and math.prod(packed.shape) * ITEM_BITS[dtype] != packed.nbytes * 8:
        raise SourceError(
            f"tensor {packed.name!r} of {packed.dtype} {list(packed.shape)} cannot have {packed.nbytes} bytes"
        )


def _pad_to(position: int, alignment: int, pads: list[tuple[int, int]]) -> int:
    aligned = -(-position // alignment) * alignment
    if aligned > position:
        pads.append((position, aligned))
    return aligned
