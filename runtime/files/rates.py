"""Measures the rate at which weights arrive: read into memory, or mapped from their files."""

from __future__ import annotations

import mmap
import os
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
from penstock.runtime.system.threads import READERS
from penstock.runtime.system.trials import MOST, Trials
from penstock.schedule.facts.errors import SourceError

_BLOCK = 2 << 20
"""The bytes that are read at a time."""

_ROOM = 32 << 20
"""The memory that blocks are read to.

Into 24 MiB, which the processor's cache holds, a disk read 1.09 times as fast.
"""

_ANSWERS, _ANSWERING = 512, 0.15
"""The most reads of which the time of an answer is taken, and the seconds after which none begins."""

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

        def read(place: Place) -> int:
            address = free.popleft()
            source.read_into(*place[:2], address, place[2])
            free.append(address)
            return place[2]

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

        def populate(place: Place) -> int:
            number, offset, size = place
            address = memory.address + starts[number] + offset
            advise(address, round_up(size, PAGE), MADV_POPULATE_READ)
            advise(address, round_up(size, PAGE), mmap.MADV_DONTNEED)
            return size

        return _trials(places, populate, seconds, threads)


def measure_answer(source: Source, beside: Callable[[], object], *, cold: bool = False) -> Trials:
    """Nanoseconds of one read of one block of the disk, while `beside` runs again and again in this thread.

    Reads follow one another, spread over all files. The bytes of a block take about a hundredth of that time.
    For `cold` see `measure_read`.

    Raises SourceError if there is nothing to read.
    """
    block = max(source.block, PAGE)
    runs = _spread(source, _ANSWERS * _BLOCK, cold=cold)
    each = -(-_ANSWERS // max(1, len(runs)))
    starts = (
        (number, offset + size * part // each // block * block, offset + size)
        for part in range(each)
        for number, offset, size in runs
    )
    places = [(number, start, min(block, stop - start)) for number, start, stop in starts]
    for number, start, nbytes in places if cold else ():  # or the page cache would answer
        os.posix_fadvise(source.fd(number), start, nbytes, os.POSIX_FADV_DONTNEED)
    with Reservation(round_up(block, PAGE)) as memory:
        memory.map_anonymous(0, memory.nbytes)

        def read(place: Place) -> int:
            source.read_into(*place[:2], memory.address, place[2])
            return 1

        answers_timed = _trials(places, read, _ANSWERING, 1, beside)
    return Trials(tuple(1e9 / answers for answers in answers_timed.figures), answers_timed.waited)


def _trials(
    places: list[Place],
    work: Callable[[Place], int],
    seconds: float,
    threads: int,
    beside: Callable[[], object] | None = None,
) -> Trials:
    """The rates at which `threads` threads together do `work`: one for each of several equal runs of blocks.

    `work` returns how much it did. No thread waits for another at the end of a run, so that the rates are
    those of steady work. The calling thread does `beside` meanwhile, if that is given.
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
            done = work(place)
            ended.append((time.perf_counter(), done))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(worker) for _ in range(threads)]:
            while beside and not future.done():
                beside()
            future.result()
    return Trials(tuple(_stretches(began, sorted(ended), threads)))


def _stretches(began: float, ended: Sequence[tuple[float, int]], threads: int) -> Iterator[float]:
    """Yield the work per second of each run of blocks; `ended` has the time and the work of each block."""
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
