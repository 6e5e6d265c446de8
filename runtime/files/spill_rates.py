"""Measures how fast a folder takes what leaves memory, and whether writes and reads slow each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

from penstock.runtime.files.direct_file import memory_view
from penstock.runtime.files.spill_file import open_scratch
from penstock.runtime.system.memory import Reservation
from penstock.runtime.system.threads import READERS
from penstock.runtime.system.trials import Trials

_BLOCK, _BLOCKS = 2 << 20, 32

_ROUNDS, _SECONDS = 3, 0.03
"""In each round blocks are written, then read, and then both at once, each for so many seconds."""

Move = Callable[[int], None]
"""Moves the block of a number."""


def measure_writes(folder: Path) -> tuple[Trials, Trials, bool]:
    """The rate of writes, how much goes on both ways at once, and whether it goes past the page cache.

    A file of 64 MiB without a name is written past the page cache where that is possible, by as many threads
    as read weights. What goes on both ways is the sum of two shares: of the rate of writes that is left
    beside reads, and of the rate of reads that is left beside writes. It is 1 where they share one link, and
    2 where neither slows the other.

    Raises SourceError where the folder has no room for such a file, or none can be made there.
    """
    with closing(open_scratch(folder, _BLOCKS * _BLOCK)) as file, Reservation(_BLOCKS * _BLOCK) as memory:
        memory.map_anonymous(0, memory.nbytes)
        content = os.urandom(_BLOCK)  # zeros might be compressed
        for at in range(0, memory.nbytes, _BLOCK):
            memory_view(memory.address + at, _BLOCK)[:] = content

        def write(number: int) -> None:
            file.write_from(number * _BLOCK, memory.address + number * _BLOCK, _BLOCK)

        def read(number: int) -> None:
            file.read_into(number * _BLOCK, memory.address + number * _BLOCK, _BLOCK)

        for number in range(_BLOCKS):  # which gives the file its places on the disk
            write(number)
        rates, shares = [], []
        for _ in range(_ROUNDS):
            alone = _rates({"out": write}) | _rates({"in": read})
            both = _rates({"out": write, "in": read})
            rates.append(alone["out"])
            shares.append(min(2.0, sum(both[way] / alone[way] for way in both)))
        return Trials(tuple(rates)), Trials(tuple(shares)), bool(file.block)


def _rates(ways: Mapping[str, Move]) -> dict[str, float]:
    """Bytes per second that several threads move each way, all at once."""
    begin = threading.Barrier(READERS * len(ways))

    def work(move: Move, numbers: count[int]) -> float:
        begin.wait()
        began = time.perf_counter()
        done = 0
        while not done or time.perf_counter() < began + _SECONDS:
            move(next(numbers) % _BLOCKS)
            done += 1
        return done * _BLOCK / (time.perf_counter() - began)

    with ThreadPoolExecutor(READERS * len(ways)) as pool:
        # Each way begins at another block.
        turns = {way: count(_BLOCKS // 2 * at) for at, way in enumerate(ways)}
        moved = [
            (way, pool.submit(work, move, turns[way])) for way, move in ways.items() for _ in range(READERS)
        ]
        rates = dict.fromkeys(ways, 0.0)
        for way, future in moved:
            rates[way] += future.result()
        return rates
