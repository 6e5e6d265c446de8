"""Small weight files for tests."""

import ctypes
import json

from penstock.runtime.files.artifact_files import stamp_file

NBYTES = 40_000


def header_bytes(fields):
    """Length prefix and JSON; a string is taken as it is."""
    text = (fields if isinstance(fields, str) else json.dumps(fields)).encode()
    return len(text).to_bytes(8, "little") + text


def write_tensor(path, data, *, name="w"):
    """A file of one U8 tensor, and its stamp, recorded relative to its folder."""
    fields = {name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    path.write_bytes(header_bytes(fields) + data)
    return stamp_file(path, recorded_path=path.name)


def pattern(nbytes, *, seed=1):
    """Bytes in which every aligned window of eight differs."""
    words = (seed * 0x9E3779B97F4A7C15 * (i + 1) % (1 << 64) for i in range(-(-nbytes // 8)))
    return b"".join(word.to_bytes(8, "little") for word in words)[:nbytes]


GUARD = 0xA5
"""What `Memory` holds before anything is read into it."""


class Memory:
    """Guarded memory whose base lies at a multiple of 4096."""

    def __init__(self, nbytes):
        self._buffer = ctypes.create_string_buffer(nbytes + 4096)
        self.base = ctypes.addressof(self._buffer) + -ctypes.addressof(self._buffer) % 4096
        ctypes.memset(self._buffer, GUARD, nbytes + 4096)

    def read(self, start, stop):
        return ctypes.string_at(self.base + start, stop - start)
