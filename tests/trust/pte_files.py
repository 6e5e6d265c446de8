"""Writes and reads the parts of a `.pte` that penstock reads, without ExecuTorch."""

import io
import struct

from penstock.backends.executorch.files import read_open_pte


class _Flatbuffer:
    """A flatbuffer that is written from its root on, behind room for a header of `room` bytes.

    What is the same object is written once, and all that refer to it share it.
    """

    def __init__(self, root, room):
        self.data = bytearray(room)
        self._places = {}
        struct.pack_into("<I", self.data, 0, self._put(root))

    def _put(self, value):
        if id(value) in self._places:
            return self._places[id(value)]
        if isinstance(value, bytes):
            at = len(self.data)
            self.data += struct.pack("<I", len(value)) + value
        elif isinstance(value, dict):
            at = self._put_table(value)
        else:
            at = len(self.data)
            self._places[id(value)] = at
            self.data += struct.pack("<I", len(value)) + bytes(4 * len(value))
            for k, one in enumerate(value):
                self._refer(at + 4 + 4 * k, one)
        self._places[id(value)] = at
        return at

    def _put_table(self, fields):
        """Eight bytes for each field up to the last, those that are left out included, behind their table."""
        count = max(fields, default=-1) + 1
        places = [4 + 8 * field if field in fields else 0 for field in range(count)]
        head = struct.pack(f"<HH{count}H", 4 + 2 * count, 4 + 8 * count, *places)
        at = len(self.data) + len(head)
        self.data += head + struct.pack("<i", len(head)) + bytes(8 * count)
        for field, value in fields.items():
            if isinstance(value, int):
                struct.pack_into("<Q", self.data, at + 4 + 8 * field, value)
            else:
                self._refer(at + 4 + 8 * field, value)
        return at

    def _refer(self, place, value):
        """Offsets lead forwards, so what several refer to is written again where it lies behind."""
        if self._places.get(id(value), place) < place:
            del self._places[id(value)]
        struct.pack_into("<I", self.data, place, self._put(value) - place)


def read_pte(data):
    """What a `.pte` holds."""
    return read_open_pte(io.BytesIO(data), lambda name: True)


def pte_of(program, segments=b""):
    """A `.pte` with this program, whose segments lie behind it."""
    data = _Flatbuffer(program, 32).data
    data[4:12] = b"ET12eh00"
    struct.pack_into("<QQ", data, 16, len(data), len(data))
    return bytes(data) + segments


def delegate_of(backend, index, *, inline=False):
    """A delegate, whose bytes are in a segment of the file, or in the program."""
    return {0: backend.encode(), 1: {0: int(not inline), 1: index}}


def write_pte(named, delegates):
    """A `.pte` with these parts, each in a segment of its own."""
    pieces = [*named.values(), *(one.processed for one in delegates)]
    segments, end = [], 0
    for piece in pieces:
        segments.append({0: end, 1: len(piece)})
        end += len(piece)
    methods = {}
    for k, one in enumerate(delegates):
        methods.setdefault(one.method, []).append(delegate_of(one.backend, len(named) + k))
    plans = [{0: name.encode(), 7: some} for name, some in methods.items()]
    keys = [{0: key.encode(), 1: k} for k, key in enumerate(named)]
    return pte_of({1: plans, 4: segments, 7: keys}, b"".join(pieces))
