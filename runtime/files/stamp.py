"""Recognises weight files: a stamp that is quick at any size, and full hashes for verification.

A stamp holds size, modification time, inode, the sha256 of length prefix and header, and the
sha256 of sampled blocks. It catches another model of the same shapes. What it cannot catch is an
edit that misses every sampled block (and, in a file used in place, also forges the modification
time). Only hashes of all bytes catch that: `Source` compares them where the ctime of a file in place
has changed, and `Program.verify` always.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from penstock.runtime.files.safetensors_file import (
    RECOMPILE,
    Header,
    close_read,
    open_for_reading,
    parse_header,
    read_exactly,
    read_open_header,
    read_raw_header,
)
from penstock.runtime.system.page_cache import open_uncached
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Storage, WeightFile

BytesDone = Callable[[int], None]
"""Called with the number of bytes done since the last call."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done so far and the bytes in all."""

SAMPLE_BYTES = 4096
_SPREAD_SAMPLES = 64
_TENSOR_SAMPLES = 256
_LARGE_TENSOR = 1 << 20
CHUNK_BYTES = 16 << 20


def stamp_file(path: Path, *, recorded_path: str) -> WeightFile:
    """Returns the stamp of a safetensors file, to be recorded under `recorded_path`.

    Raises SourceError if it is not one.
    """
    with open_for_reading(path) as fd:
        status = os.fstat(fd)
        header = read_open_header(fd, path)
        return WeightFile(
            path=recorded_path,
            nbytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            header_sha256=hashlib.sha256(header.raw).hexdigest(),
            sampled_sha256=_hash_samples(fd, header, path),
        )


def check_open_file(fd: int, path: Path, file: WeightFile, *, in_place: bool) -> None:
    """Raise SourceError unless an open file is still the one that was stamped.

    The file is open so that what is checked is what will be read. Modification time and inode count only for
    files used `in_place`: a packed file may be copied together with its artifact.
    """
    status = os.fstat(fd)
    _compare(path, "size in bytes", file.nbytes, status.st_size)
    if in_place:
        _compare(path, "modification time in ns", file.mtime_ns, status.st_mtime_ns)
        _compare(path, "inode", file.inode, status.st_ino)
    raw = read_raw_header(fd, path)
    _compare(path, "sha256 of its header", file.header_sha256, hashlib.sha256(raw).hexdigest())
    sampled_sha256 = _hash_samples(fd, parse_header(raw, status.st_size, path), path)
    _compare(path, "sha256 of its sampled blocks", file.sampled_sha256, sampled_sha256)


def compare_header(path: Path, file: WeightFile, present: WeightFile) -> None:
    """Raise SourceError where size or header of the stamp `found` of `path` are not those of `file`."""
    _compare(path, "size in bytes", file.nbytes, present.nbytes)
    _compare(path, "sha256 of its header", file.header_sha256, present.header_sha256)


def locate(file: WeightFile, folder: Path) -> Path:
    """Tells where a weight file lies.

    Raises SourceError for a relative path that leaves the artifact's folder.
    """
    if ".." in Path(file.path).parts or "\0" in file.path or not file.path:
        raise SourceError(
            f"the payload names the weight file {file.path!r}, which is not inside {folder}: "
            "do not trust this artifact, compile again"
        )
    return folder / file.path


def sample_offsets(header: Header) -> tuple[int, ...]:
    """Tells where the sampled blocks begin, ascending: multiples of SAMPLE_BYTES, the last cut at the end.

    64 blocks spread evenly over the file (first and last among them), and the blocks in which up
    to 256 tensors of 1 MiB or more begin, taken evenly in file order.
    """
    last = max(header.file_nbytes - 1, 0)
    spread = [last * i // (_SPREAD_SAMPLES - 1) for i in range(_SPREAD_SAMPLES)]
    large = [tensor.start for tensor in header.entries.values() if tensor.nbytes >= _LARGE_TENSOR]
    count = min(len(large), _TENSOR_SAMPLES)
    chosen = [large[len(large) * i // count] for i in range(count)]
    return tuple(sorted({offset // SAMPLE_BYTES * SAMPLE_BYTES for offset in spread + chosen}))


def file_chunks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yields the bytes `start` to `stop` of a file, at most 16 MiB at a time.

    Raises SourceError if it cannot be read.
    """
    with open_for_reading(path, RECOMPILE) as fd:
        for offset in range(start, stop, CHUNK_BYTES):
            yield read_exactly(fd, offset, min(CHUNK_BYTES, stop - offset), path)


def hash_storage(
    storage: Storage, files: Sequence[WeightFile], folder: Path, *, progress: BytesDone | None = None
) -> str:
    """Returns the sha256 of a storage's bytes as they lie in its files, extent after extent."""
    digest = hashlib.sha256()
    for extent in storage.extents:
        path = locate(files[extent.file], folder)
        for chunk in file_chunks(path, extent.file_offset, extent.file_offset + extent.nbytes):
            digest.update(chunk)
            if progress:
                progress(len(chunk))
    return digest.hexdigest()


def count_bytes(progress: Progress | None, title: str, total: int) -> BytesDone | None:
    """Returns a function that takes the bytes done since its last call, and reports their sum."""
    if progress is None:
        return None
    report, done = progress, 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(title, done, total)

    return add


def _hash_samples(fd: int, header: Header, path: Path) -> str:
    """Returns the sha256 of the sampled blocks.

    Read past the page cache where that is possible: a small folio that a sample brings in would keep the
    granule around it from ever being mapped as one huge page.
    """
    digest = hashlib.sha256()
    uncached = open_uncached(path, fd)
    with ExitStack() as opened:
        if uncached >= 0:
            opened.callback(close_read, uncached)
        block = opened.enter_context(mmap.mmap(-1, SAMPLE_BYTES))
        for offset in sample_offsets(header):
            nbytes = min(SAMPLE_BYTES, header.file_nbytes - offset)
            try:
                whole = uncached >= 0 and os.preadv(uncached, [block], offset) >= nbytes
            except OSError:
                whole = False
            digest.update(block[:nbytes] if whole else read_exactly(fd, offset, nbytes, path))
    return digest.hexdigest()


def _compare(path: Path, title: str, expected: int | str, present: int | str) -> None:
    if expected != present:
        raise SourceError(
            f"{path} is not the file that was compiled: its {title} was {expected} and is {present}; "
            "put the original back, or compile again"
        )
