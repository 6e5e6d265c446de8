"""Tells which file system a path is on, and which device that is mounted from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """A file system's type (`ext4`) and device (`/dev/vda1`), which are empty where nobody knows them."""

    kind: str
    device: str


def find_mount(path: Path, table: Path = Path("/proc/mounts")) -> Mount:
    """Returns the file system that holds `path`, which need not exist."""
    try:
        mounts = [line.split() for line in table.read_text().splitlines()]
    except OSError:
        return Mount("", "")
    real = path.resolve()
    around = [fields for fields in mounts if real.is_relative_to(unescape(fields[1]))]
    if not around:
        return Mount("", "")
    # Of several mounts on one folder the last one covers the others.
    device, _, kind, *_ = max(reversed(around), key=lambda fields: len(fields[1]))
    return Mount(kind, device)


def unescape(field: str) -> str:
    """Return the text of a field of a table of mounts, which has blanks and the like as octal numbers."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda code: chr(int(code[1], 8)), field)
