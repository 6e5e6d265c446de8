"""Measures how fast weights arrive: read into memory, or populated in a mapping of their files."""

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
"""Threads that read weights: two did not keep this disk busy while computing, four were no faster."""

_SHORTEST = 1e-9  # seconds: two clocks of a machine may differ by more than a block takes

Place = tuple[int, int, int]
"""File number, offset and size of a block."""


def measure_read(
    source: Source,
    *,
    nbytes: int = 128 << 20,
    seconds: float = 0.5,
    threads: int = READERS,
    room: int = 64 << 20,
    block: int = 2 << 20,
    shift: int = 0,
    cold: bool = False,
) -> Trials:
    """Bytes per second at which `source` fills memory in its mode, as `threads` readers see it.

    Reads distinct blocks spread over all files, at most `nbytes` in all, and begins none after
    `seconds`. They go to about `room` bytes of memory in turn, as in an arena: into 24 MiB,
    which the processor's cache holds, a disk read 1.09 times as fast. With a `shift` addresses are that
    many bytes off the blocks of the files. With `cold`, blocks that the page cache holds are left out, unless
    it holds them all.

    Raises SourceError if there is nothing to read.
    """
    slot = round_up(block + shift, PAGE)
    # Huge pages, touched before: direct reads into small ones ran at half the speed (arena/anonymous.py).
    with Reservation(slot * max(threads, room // slot)) as memory:
        memory.map_anonymous(0, memory.nbytes)
        hint(memory.address, memory.nbytes, MADV_HUGEPAGE)
        hint(memory.address, memory.nbytes, MADV_POPULATE_WRITE)
        free = deque(range(memory.address + shift, memory.address + memory.nbytes, slot))

        def read(place: Place) -> None:
            address = free.popleft()
            source.read_into(*place[:2], address, place[2])
            free.append(address)

        return _trials(_spread(source, nbytes, block, cold=cold), read, seconds, threads)


def measure_populate(
    source: Source,
    *,
    nbytes: int = 128 << 20,
    seconds: float = 0.5,
    threads: int = READERS,
    block: int = 2 << 20,
    cold: bool = False,
) -> Trials:
    """Bytes per second at which blocks of the files become readable in a mapping; as `measure_read`."""
    places = [place for place in _spread(source, nbytes, block, cold=cold) if place[2] >= PAGE]
    starts: dict[int, int] = {}
    total = 0
    for number, file in enumerate(source.files):
        starts[number], total = total, total + round_up(file.nbytes, block)
    with Reservation(total) as memory:
        for number, file in enumerate(source.files):
            memory.map_file(starts[number], round_up(file.nbytes, PAGE), source.fd(number), 0)
        hint(memory.address, memory.nbytes, MADV_HUGEPAGE)

        def populate(place: Place) -> None:
            number, offset, size = place
            address = memory.address + starts[number] + offset
            advise(address, size - size % PAGE, MADV_POPULATE_READ)
            advise(address, size - size % PAGE, mmap.MADV_DONTNEED)

        return _trials(places, populate, seconds, threads)


def _trials(places: list[Place], work: Callable[[Place], None], seconds: float, threads: int) -> Trials:
    """The rates at which `threads` threads together do `work`, one of each stretch of equally many blocks.

    No thread waits for another at the end of a stretch, so that the rates are those of steady work.
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
    """Bytes per second of each stretch of blocks, given when each block ended and its size, in that order."""
    count = min(MOST, max(1, len(ended) // threads))
    cuts = [len(ended) * number // count for number in range(count + 1)]
    for start, stop in pairwise(cuts):
        yield sum(nbytes for _, nbytes in ended[start:stop]) / max(ended[stop - 1][0] - began, _SHORTEST)
        began = ended[stop - 1][0]


def _spread(source: Source, nbytes: int, block: int, *, cold: bool) -> list[Place]:
    """At most `nbytes` of blocks, evenly spaced, in an order in which neighbours do not follow each other."""
    blocks = [
        (number, offset, min(block, file.nbytes - offset))
        for number, file in enumerate(source.files)
        for offset in range(0, file.nbytes, block)
    ]
    count = min(len(blocks), max(1, nbytes // block))
    chosen = [blocks[len(blocks) * i // count] for i in range(count)]
    if cold:
        chosen = [place for place in chosen if not is_cached(source.fd(place[0]), *place[1:])] or chosen
    return chosen[::2] + chosen[1::2]
