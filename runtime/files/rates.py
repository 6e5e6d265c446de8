"""Measures the rate at which weights arrive: read into memory, or mapped from their files."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from penstock.runtime.files.source import Source
from penstock.runtime.system.memory import (
    MADV_HUGEPAGE,
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    PAGE,
    Reservation,
    advise,
    hint,
    round_up,
)
from penstock.runtime.system.page_cache import is_cached
from penstock.runtime.system.trials import MOST, Trials
from penstock.schedule.facts.errors import SourceError

READERS = 3
"""The number of reading threads: two did not keep the disk busy during compute, four were no faster."""

_BLOCK = 2 << 20
"""The bytes that are read at a time."""

_ROOM = 32 << 20
"""The memory that blocks are read to.

Into 24 MiB, which the processor's cache holds, a disk read 1.09 times as fast.
"""

_SHORTEST = 1e-9  # seconds: two clocks of a machine may differ by more than a block takes

Place = tuple[int, int, int]
"""The file number, the offset and the size of a block."""


def measure_read(
    source: Source,
    *,
    nbytes: int = 128 << 20,
    seconds: float = 0.5,
    threads: int = READERS,
    shift: int = 0,
    cold: bool = False,
) -> Trials:
    """Bytes per second at which `threads` threads together fill memory from `source`, in its mode of reading.

    They read distinct blocks spread over all files, at most `nbytes` in all, and begin none after `seconds`.
    Blocks are read to places in memory in turn, as in an arena. With a `shift`, addresses differ by that many
    bytes from the alignment of the files' blocks. With `cold`, blocks that the page cache holds are left out,
    unless it holds all of them.

    Raises SourceError if there is nothing to read.
    """
    slot = round_up(_BLOCK + shift, PAGE)
    # Huge pages, touched before: direct reads into small ones ran at half the speed (arena/anonymous.py).
    with Reservation(slot * max(threads, _ROOM // slot)) as memory:
        memory.map_anonymous(0, memory.nbytes)
        hint(memory.address, memory.nbytes, MADV_HUGEPAGE)
        hint(memory.address, memory.nbytes, MADV_POPULATE_WRITE)
        free = deque(range(memory.address + shift, memory.address + memory.nbytes, slot))

        def read(place: Place) -> None:
            address = free.popleft()
            source.read_into(*place[:2], address, place[2])
            free.append(address)

        return _trials(_spread(source, nbytes, cold=cold), read, seconds, threads)


def measure_populate(
    source: Source,
    *,
    nbytes: int = 128 << 20,
    seconds: float = 0.5,
    threads: int = READERS,
    cold: bool = False,
) -> Trials:
    """Bytes per second at which blocks of the files become readable in a mapping.

    The parameters are those of `measure_read`. Raises SourceError if there is nothing to map.
    """
    places = _spread(source, nbytes, cold=cold)
    starts: dict[int, int] = {}
    total = 0
    for number, file in enumerate(source.files):
        starts[number], total = total, total + round_up(file.nbytes, _BLOCK)
    with Reservation(total) as memory:
        for number, file in enumerate(source.files):
            memory.map_file(starts[number], round_up(file.nbytes, PAGE), source.fd(number), 0)
        hint(memory.address, memory.nbytes, MADV_HUGEPAGE)

        def populate(place: Place) -> None:
            number, offset, size = place
            address = memory.address + starts[number] + offset
            advise(address, round_up(size, PAGE), MADV_POPULATE_READ)
            advise(address, round_up(size, PAGE), mmap.MADV_DONTNEED)

        return _trials(places, populate, seconds, threads)


def _trials(places: list[Place], work: Callable[[Place], None], seconds: float, threads: int) -> Trials:
    """The rates at which `threads` threads together do `work`: one for each of several equal runs of blocks.

    No thread waits for another at the end of a run, so that the rates are those of steady work.
    """
    if not places:
        raise SourceError("there is no weight file whose reading could be measured")
    take = threading.Lock()
    began = time.perf_counter()
    ended: list[tuple[float, int]] = []

    def worker() -> None:
        first = True
        while first or time.perf_counter() < began + seconds:
            first = False
            with take:
                if not places:
                    break
                place = places.pop()
            work(place)
            ended.append((time.perf_counter(), place[2]))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(worker) for _ in range(threads)]:
            future.result()
    return Trials(tuple(_stretches(began, sorted(ended), threads)))


def _stretches(began: float, ended: Sequence[tuple[float, int]], threads: int) -> Iterator[float]:
    """Yield the bytes per second of each run of blocks; `ended` has the time and the size of each block."""
    count = min(MOST, max(1, len(ended) // threads))
    cuts = [len(ended) * number // count for number in range(count + 1)]
    for start, stop in pairwise(cuts):
        yield sum(nbytes for _, nbytes in ended[start:stop]) / max(ended[stop - 1][0] - began, _SHORTEST)
        began = ended[stop - 1][0]


def _spread(source: Source, nbytes: int, *, cold: bool) -> list[Place]:
    """Blocks of at most `nbytes` in all, evenly spaced, ordered so that no block follows its neighbour."""
    blocks = [
        (number, offset, min(_BLOCK, file.nbytes - offset))
        for number, file in enumerate(source.files)
        for offset in range(0, file.nbytes, _BLOCK)
    ]
    count = min(len(blocks), max(1, nbytes // _BLOCK))
    chosen = [blocks[len(blocks) * i // count] for i in range(count)]
    if cold:
        chosen = [place for place in chosen if not is_cached(source.fd(place[0]), *place[1:])] or chosen
    return chosen[::2] + chosen[1::2]
