"""The raw read limit: how fast this disk delivers a file, whatever is done with the bytes."""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

THREADS = (1, 2, 4)
BLOCKS = (4 << 20, 8 << 20, 16 << 20)
_SAMPLE = 1 << 30
_TOUCHED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE


@dataclass(frozen=True)
class Reader:
    """A way to read: `threads` each take the next block of `block` bytes, past the page cache if `direct`."""

    threads: int
    block: int
    direct: bool

    def read(self, path: Path, nbytes: int) -> float:
        """Seconds to read the first `nbytes` of the file; raises OSError."""
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        offsets = iter(range(0, nbytes, self.block))
        lock = threading.Lock()
        failures: list[OSError] = []

        def work(buffer: mmap.mmap) -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                try:
                    os.preadv(descriptor, [buffer], offset)
                except OSError as error:
                    failures.append(error)
                    return

        # Anonymous memory begins on a page, which is all that O_DIRECT asks for. It is touched now:
        # the first touch of a page costs more than reading it.
        buffers = [mmap.mmap(-1, self.block, flags=_TOUCHED) for _ in range(self.threads)]
        workers = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
        try:
            start = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            seconds = time.perf_counter() - start
        finally:
            os.close(descriptor)
            for buffer in buffers:
                buffer.close()
        if failures:
            raise failures[0]
        return seconds


def supports_direct(path: Path) -> bool:
    """Whether the file system under `path` takes O_DIRECT."""
    try:
        Reader(1, 1 << 20, direct=True).read(path, 1 << 20)
    except OSError:
        return False
    return True


def measure_readers(path: Path) -> list[dict[str, float]]:
    """Bytes a second of every way to read the first GiB, each the better of two interleaved tries."""
    from benchmarks.machine import drop_cache

    direct = supports_direct(path)
    nbytes = min(path.stat().st_size, _SAMPLE)
    best: dict[tuple[int, int], float] = {}
    for _ in range(2):
        for threads in THREADS:
            for block in BLOCKS:
                if not direct:
                    drop_cache([path], unmap=False)
                rate = nbytes / Reader(threads, block, direct).read(path, nbytes)
                best[threads, block] = max(rate, best.get((threads, block), 0.0))
    return [
        {"threads": threads, "block": block, "direct": direct, "bytes_per_s": rate}
        for (threads, block), rate in best.items()
    ]
