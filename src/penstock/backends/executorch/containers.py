"""Reads the lists in a `.pte` and in a `.ptd`, without ExecuTorch: named data, and the bytes of delegates.

Both are flatbuffers of ExecuTorch's schemas `program.fbs` and `flat_tensor.fbs`, with a header behind their
first eight bytes that says where the segments begin. Only the few fields that are needed here are read.
"""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from penstock.schedule.bounded_file import CEILINGS

Bytes = bytes | memoryview

# The positions of fields in their tables.
_PLANS, _INLINE, _SEGMENTS, _NAMED = 1, 3, 4, 7  # of a program
_PLAN_NAME, _DELEGATES = 0, 7
_BACKEND, _PROCESSED = 0, 1
_LOCATION, _INDEX = 0, 1
_DATA_SEGMENTS, _DATA_NAMED = 1, 2  # of the head of a .ptd
_KEY, _SEGMENT = 0, 1
_OFFSET, _SIZE = 0, 1

_PTE: Final = "a .pte without weights"

_LARGEST_HEAD = 64 << 20
"""The most bytes of the list in a `.ptd` that are read; an entry takes some 150."""


@dataclass(frozen=True)
class Delegate:
    """A delegate of a method: the name of its backend, and the bytes that the backend made."""

    method: str
    backend: str
    processed: bytes


@dataclass(frozen=True)
class Pte:
    """The named data in a `.pte` by key, and its delegates in the order of calls."""

    named: Mapping[str, bytes]
    delegates: tuple[Delegate, ...]


def read_pte(data: Bytes) -> Pte:
    """What a `.pte` holds. Raises ValueError for other bytes."""
    return read_open_pte(io.BytesIO(data), lambda name: True)


def read_open_pte(file: BinaryIO, wanted: Callable[[str], bool]) -> Pte:
    """What an open `.pte` holds: the named data of keys, and the delegates of backends, that are `wanted`.

    Other segments are not read, as they may be weights. Raises ValueError for other bytes, and for more bytes
    than are read of any.
    """
    try:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(32)
        if head[4:6] != b"ET":
            raise ValueError("its first bytes are not those of a .pte")
        size, base = end, 0
        if head[8:12] == b"eh00":
            size, base = struct.unpack_from("<QQ", head, 16)
        pieces = _Pieces(file, end)
        program = _Table.root(memoryview(pieces.read(0, min(size, end))))
        segments = [
            (base + one.number(_OFFSET, "Q"), one.number(_SIZE, "Q")) for one in program.tables(_SEGMENTS)
        ]
        if sum(size for _, size in segments) > end:
            raise ValueError(f"its segments have more bytes than its {end}")

        @functools.cache  # several may have the same bytes
        def segment(index: int) -> bytes:
            return pieces.read(*segments[index])

        keys = [(one.text(_KEY), one.number(_SEGMENT, "I")) for one in program.tables(_NAMED)]
        named = {key: segment(index) for key, index in keys if wanted(key)}
        inline = list(program.tables(_INLINE))
        delegates = []
        for plan in program.tables(_PLANS):
            method = plan.text(_PLAN_NAME)
            for one in plan.tables(_DELEGATES):
                backend, place = one.text(_BACKEND), one.table(_PROCESSED)
                index, in_segment = place.number(_INDEX, "I"), place.number(_LOCATION, "b")
                if not in_segment or wanted(backend):
                    own = segment(index) if in_segment else inline[index].vector(0)
                    delegates.append(Delegate(method, backend, own))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"it is cut off or damaged ({error})") from None
    return Pte(named, tuple(delegates))


def read_ptd(file: BinaryIO) -> dict[str, tuple[int, int]]:
    """The absolute offset and the size of each entry of an open `.ptd`, by its key.

    Raises ValueError for other bytes, and for a size in the file that reaches beyond its end.
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(0)

    def inside(start: int, size: int) -> tuple[int, int]:
        if start + size > end:
            raise ValueError(f"it is cut off: it has {end} bytes, and {start + size} are needed")
        return start, size

    try:
        head = file.read(48)
        if head[4:6] != b"FT" or head[8:12] != b"FH01":
            raise ValueError("its first bytes are not those of a .ptd")
        start, size, base = struct.unpack_from("<QQQ", head, 16)
        most = sum(inside(start, size))
        if most > _LARGEST_HEAD:
            raise ValueError(f"its head has {most} bytes, expected {_LARGEST_HEAD} at most")
        file.seek(0)
        tensors = _Table.root(memoryview(file.read(most)))
        segments = [
            inside(base + one.number(_OFFSET, "Q"), one.number(_SIZE, "Q"))
            for one in tensors.tables(_DATA_SEGMENTS)
        ]
        return {one.text(_KEY): segments[one.number(_SEGMENT, "I")] for one in tensors.tables(_DATA_NAMED)}
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"it is cut off or damaged ({error})") from None


class _Pieces:
    """Reads pieces of a file of `end` bytes, which are no more in all than are read of any `.pte`."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self._end, self._left = file, end, CEILINGS[_PTE]

    def read(self, start: int, size: int) -> bytes:
        if start + size > self._end:
            raise ValueError("it is cut off")
        self._left -= size
        if self._left < 0:
            raise ValueError(f"{_PTE} has {CEILINGS[_PTE]:,} bytes at most, and it has more")
        self._file.seek(start)
        return self._file.read(size)


class _Unread:
    """How many bytes of lists and texts may still be read.

    Those of a file are no more than it has, as each lies at a place of its own. Where many refer to the same
    one, reading them would take a time and a memory that no one sees in the size of the file.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def take(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        if self._nbytes < 0:
            raise IndexError("its lists and texts have more bytes than the file")


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer, at a position of its bytes."""

    data: memoryview
    at: int
    unread: _Unread

    @staticmethod
    def root(data: memoryview) -> _Table:
        return _Table(data, struct.unpack_from("<I", data)[0], _Unread(len(data)))

    def number(self, field: int, form: str) -> int:
        """The number in a field, 0 if it is left out."""
        place = self._place(field)
        return 0 if place is None else int(struct.unpack_from(f"<{form}", self.data, place)[0])

    def text(self, field: int) -> str:
        """The text in a field."""
        return self.vector(field).decode()

    def vector(self, field: int) -> bytes:
        """The bytes in a field, none if it is left out."""
        start, size = self._vector(field) or (0, 0)
        self.unread.take(size)
        return bytes(self.data[start : start + size])

    def table(self, field: int) -> _Table:
        """The table in a field."""
        place = self._place(field)
        if place is None:
            raise IndexError(f"field {field} is missing")
        return _Table(self.data, self._follow(place), self.unread)

    def tables(self, field: int) -> Iterator[_Table]:
        """The tables of the list in a field."""
        first, count = self._vector(field) or (0, 0)
        self.unread.take(4 * count)
        return (_Table(self.data, self._follow(first + 4 * k), self.unread) for k in range(count))

    def _place(self, field: int) -> int | None:
        fields = self.at - int(struct.unpack_from("<i", self.data, self.at)[0])
        size, entry = struct.unpack_from("<H", self.data, fields)[0], 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, fields + entry)[0] if entry < size else 0
        return self.at + offset if offset else None

    def _follow(self, place: int) -> int:
        return place + int(struct.unpack_from("<I", self.data, place)[0])

    def _vector(self, field: int) -> tuple[int, int] | None:
        place = self._place(field)
        if place is None:
            return None
        start = self._follow(place)
        return start + 4, int(struct.unpack_from("<I", self.data, start)[0])
