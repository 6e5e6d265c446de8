"""Reads extents of weight files into memory, by several readers at once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from penstock.runtime.source import Source
from penstock.schedule.model import Extent

_PIECE = 16 << 20


def read_extents(source: Source, work: Iterable[tuple[Extent, int]], readers: int) -> None:
    """Read each extent to its place in a storage that begins at an address; SourceError where that fails."""
    pieces = [
        (e.file, e.file_offset + at, address + e.storage_offset + at, min(_PIECE, e.nbytes - at))
        for e, address in work
        for at in range(0, e.nbytes, _PIECE)
    ]
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(lambda piece: source.read_into(*piece), pieces))
