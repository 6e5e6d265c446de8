"""The raw read limit: the rate at which this disk delivers a file, without any use of the bytes.

No single way of reading is the fastest everywhere: O_DIRECT needs no processor, but some virtual
disks serve the kernel's own read-ahead two or three times as fast. So both are measured.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np

from benchmarks.machine import advise, drop_cache

Way = Literal["direct", "mapped", "buffered"]
THREADS = (1, 2, 4)
BLOCKS: dict[Way, tuple[int, ...]] = {
    "direct": (4 << 20, 8 << 20, 16 << 20),
    "mapped": (2 << 20, 8 << 20),
    "buffered": (1 << 20, 8 << 20),
}
_SAMPLE = 1 << 30
_TRIES = 3
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the mmap module does not name
_TOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE

_Item = TypeVar("_Item")
Fetch = Callable[[int, int], object]
"""A function that brings the block at an offset; it also gets the number of its thread."""


@dataclass(frozen=True)
class Reader:
    """A way to read: `threads` each take the next block of `block` bytes.

    `direct` reads past the page cache, `buffered` through it; `mapped` populates a mapping of the file
    and drops what it populated, which copies nothing. The last two need a cold page cache.
    """

    way: Way
    threads: int
    block: int

    def read(self, path: Path, nbytes: int) -> float:
        """Seconds to read the first `nbytes` of the file; raises OSError."""
        with self._open(path) as fetch:
            return _share(self.threads, range(0, nbytes, self.block), fetch)

    @contextmanager
    def _open(self, path: Path) -> Iterator[Fetch]:
        with ExitStack() as stack:
            descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.way == "direct" else 0))
            stack.callback(os.close, descriptor)
            if self.way == "mapped":
                mapping = stack.enter_context(closing(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)))
                address, size = np.frombuffer(mapping, np.uint8).ctypes.data, len(mapping)

                def populate(_: int, offset: int) -> None:
                    nbytes = min(self.block, size - offset)
                    advise(address + offset, nbytes, _POPULATE_READ)
                    advise(address + offset, nbytes, mmap.MADV_DONTNEED)

                yield populate
                return
            # Anonymous memory begins on a page, which is all that O_DIRECT asks for. It is touched
            # now: the first touch of a page costs more than reading it.
            buffers = [
                stack.enter_context(closing(mmap.mmap(-1, self.block, flags=_TOUCHED)))
                for _ in range(self.threads)
            ]
            yield lambda number, offset: os.preadv(descriptor, [buffers[number]], offset)


def _share(threads: int, items: Iterable[_Item], fetch: Callable[[int, _Item], object]) -> float:
    """Seconds in which threads, each with its number, fetch one item after another; raises OSError."""
    left = iter(items)
    lock = threading.Lock()
    failures: list[OSError] = []

    def work(number: int) -> None:
        while True:
            with lock:
                item = next(left, None)
            if item is None:
                return
            try:
                fetch(number, item)
            except OSError as error:
                failures.append(error)
                return

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    if failures:
        raise failures[0]
    return seconds


def list_ways(path: Path) -> list[Way]:
    """The ways that this kernel and the file system under `path` support; at least one."""
    ways: tuple[Way, ...] = ("direct", "mapped")
    known = []
    for way in ways:
        try:
            Reader(way, 1, 1 << 20).read(path, 1 << 20)
            known.append(way)
        except OSError:
            continue
    return known or ["buffered"]


def measure_readers(path: Path) -> list[dict[str, Any]]:
    """Every reader with its `bytes_per_s` over the first GiB, the median of interleaved tries."""
    nbytes = min(path.stat().st_size, _SAMPLE)
    readers = [
        Reader(way, threads, block) for way in list_ways(path) for threads in THREADS for block in BLOCKS[way]
    ]
    rates: dict[Reader, list[float]] = {reader: [] for reader in readers}
    for _ in range(_TRIES):
        for reader in readers:
            drop_cache([path])
            rates[reader].append(nbytes / reader.read(path, nbytes))
    return [asdict(reader) | {"bytes_per_s": median(rates[reader])} for reader in readers]


def choose_fastest(measured: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest reader of each way."""
    fastest: dict[str, dict[str, Any]] = {}
    for reader in sorted(measured, key=lambda reader: float(reader["bytes_per_s"])):
        fastest[reader["way"]] = reader
    return fastest
