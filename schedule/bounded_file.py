"""Reads files that a stranger may have made: regular files only, and no more bytes than their kind has.

A path can name a pipe, which blocks whoever opens it, a device without end, or a sparse file, which claims
any size and takes no space on the disk. So every file that is read into memory as a whole is read here, with
the ceiling of its kind. What is only hashed is read in pieces. Members of zips have ceilings too.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from penstock.schedule.facts.errors import PayloadError, SourceError

Kind = Literal[
    "a payload",
    "a digest",
    "a lowered program",
    "a method's code",
    "a plan",
    "a file of routes",
    "a header of weights",
    "an index",
    "a configuration",
    "a file of a tokenizer",
    "an exported call",
    "a record of the cache",
    "times of weight files",
    "a list of measurements",
    "a pickle of a checkpoint",
    "a directory of a zip",
    "a .pte without weights",
    "an ONNX model without weights",
]

MIB = 1 << 20

CEILINGS: Mapping[Kind, int] = {
    "a payload": 256 * MIB,  # about 500 bytes for each weight: 500,000 weights
    "a digest": 4096,  # one line of 79 bytes
    "a lowered program": 1024 * MIB,  # the compiled code of all methods; it is hashed in pieces
    "a method's code": 256 * MIB,  # about 1 KB for each node of the graph
    "a plan": 256 * MIB,  # a payload holds plans, too
    "a file of routes": 64 * MIB,  # no larger one is written
    "a header of weights": 100_000_000,  # the limit of the safetensors format
    "an index": 100_000_000,  # it names the tensors of the headers
    "a configuration": 16 * MIB,  # the names of 20,000 classes take 1 MB
    "a file of a tokenizer": 256 * MIB,  # 35 MB for 260,000 tokens
    "an exported call": 256 * MIB,  # a method's code, and values that no checkpoint has
    "a record of the cache": 64 << 10,  # one name
    "times of weight files": 16 * MIB,  # about 200 bytes for each file
    "a list of measurements": 4 * MIB,  # about 400 bytes for each figure of the last week
    "a pickle of a checkpoint": 256 * MIB,  # about 300 bytes for each tensor
    "a directory of a zip": 32 * MIB,  # about 100 bytes for each member, of which Python makes about 700
    "a .pte without weights": 512 * MIB,  # the program and what penstock has in it
    "an ONNX model without weights": 256 * MIB,  # the graph and small weights
}
"""The most bytes of each kind of file that are read into memory."""

_WRITTEN = ("a payload", "a digest", "a lowered program", "a method's code", "a plan", "a file of routes")
"""The kinds that penstock writes for others, of which a larger one is a PayloadError."""

_PIECE = 1 << 20


def open_regular(path: Path) -> int:
    """Return a descriptor of a regular file, which the caller closes, or raise SourceError or OSError."""
    _refuse_irregular(path, os.stat(path).st_mode)  # opening some devices has effects
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _refuse_irregular(path, os.fstat(fd).st_mode)  # another file may have come to the path
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def open_bounded(path: Path, kind: Kind) -> Iterator[IO[bytes]]:
    """Yield a regular file that has no more bytes than files of its kind.

    Raises SourceError or PayloadError for another one, and OSError where the system does not open it.
    """
    with open(open_regular(path), "rb") as file:
        refuse_larger(path, os.fstat(file.fileno()).st_size, kind)
        yield file


def read_bounded(path: Path, kind: Kind) -> bytes:
    """Return the bytes of a file. Raises errors as `open_bounded` does."""
    with open_bounded(path, kind) as file:
        # The file may grow meanwhile, and files of /proc say that they have 0 bytes.
        data = read_most(file, CEILINGS[kind] + 1)
    refuse_larger(path, len(data), kind)
    return data


def hash_bounded(path: Path, kind: Kind) -> str:
    """Return the sha256 of a file, read in pieces. Raises errors as `open_bounded` does."""
    digest, nbytes = hashlib.sha256(), 0
    with open_bounded(path, kind) as file:
        while piece := file.read(_PIECE):
            nbytes += len(piece)
            refuse_larger(path, nbytes, kind)
            digest.update(piece)
    return digest.hexdigest()


def read_most(file: IO[bytes], most: int) -> bytes:
    """Return the bytes of a file from where it stands to its end, but no more than `most`."""
    pieces: list[bytes] = []
    while most and (piece := file.read(min(most, _PIECE))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


@contextmanager
def open_zip(file: IO[bytes], path: Path) -> Iterator[zipfile.ZipFile]:
    """Yield the zip in an open file; `path` is for messages.

    Raises SourceError for a directory that is larger than any of penstock's or torch's, and whatever
    `zipfile` raises for a file that is no zip.
    """
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end:
        refuse_larger(path, end[zipfile._ECD_SIZE], "a directory of a zip")  # type: ignore[attr-defined]
    with zipfile.ZipFile(file) as archive:
        yield archive


def read_member(archive: zipfile.ZipFile, name: str, kind: Kind) -> bytes:
    """Return the bytes of the member of a zip that is called `name`.

    Raises KeyError if no member has the name, SourceError if two have it or the member is compressed, and
    what `refuse_larger` raises if the member is larger than its kind.
    """
    member = archive.getinfo(name)
    if member.compress_type != zipfile.ZIP_STORED or archive.namelist().count(name) != 1:
        raise SourceError(f"{name} is compressed, or there twice: compile again")
    refuse_larger(name, member.file_size, kind)
    with archive.open(member) as file:
        return file.read(CEILINGS[kind] + 1)  # zipfile compares the checksum where the member ends


def refuse_larger(name: object, nbytes: int, kind: Kind) -> None:
    """Raise PayloadError or SourceError if a file, or a part of it, has more than the bytes of its kind."""
    if (most := CEILINGS[kind]) < nbytes:
        limit = f"{most >> 20} MiB" if most >= MIB else f"{most:,} bytes"
        raise (PayloadError if kind in _WRITTEN else SourceError)(
            f"{name} has {nbytes:,} bytes, more than {limit}, which {kind} never has: get an intact copy"
        )


def _refuse_irregular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise SourceError(f"{path} is a folder, expected a file: put the file itself there")
    if not stat.S_ISREG(mode):
        raise SourceError(f"{path} is a pipe or a device, expected a file: put the file itself there")
