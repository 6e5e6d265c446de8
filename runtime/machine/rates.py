"""Measures the rates at which weights arrive from files, and values leave memory for files."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, pairwise
from os import PathLike
from pathlib import Path

import torch

from penstock.native.library import library
from penstock.runtime.files.direct_file import memory_view, open_scratch
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.files.source import Mode, Source
from penstock.runtime.machine.figures import (
    MOST,
    Cache,
    Measurement,
    Quantity,
    Subject,
    Trials,
    measured,
    recall,
    record,
    this_machine,
)
from penstock.runtime.system.limits import find_mount
from penstock.runtime.system.memory import (
    MADV_HUGEPAGE,
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    PAGE,
    Reservation,
    advise,
    hint,
    is_cached,
    round_up,
    supports_move,
)
from penstock.runtime.system.threads import READERS
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import WeightFile

_SPILLED_BLOCK, _BLOCKS = 2 << 20, 32

_ROUNDS, _SPILLED_SECONDS = 3, 0.03
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
    with (
        closing(open_scratch(folder, _BLOCKS * _SPILLED_BLOCK)) as file,
        Reservation(_BLOCKS * _SPILLED_BLOCK) as memory,
    ):
        memory.map_anonymous(0, memory.nbytes)
        content = os.urandom(_SPILLED_BLOCK)  # zeros might be compressed
        for at in range(0, memory.nbytes, _SPILLED_BLOCK):
            memory_view(memory.address + at, _SPILLED_BLOCK)[:] = content

        def write(number: int) -> None:
            file.write_from(number * _SPILLED_BLOCK, memory.address + number * _SPILLED_BLOCK, _SPILLED_BLOCK)

        def read(number: int) -> None:
            file.read_into(number * _SPILLED_BLOCK, memory.address + number * _SPILLED_BLOCK, _SPILLED_BLOCK)

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
        while not done or time.perf_counter() < began + _SPILLED_SECONDS:
            move(next(numbers) % _BLOCKS)
            done += 1
        return done * _SPILLED_BLOCK / (time.perf_counter() - began)

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


_SAMPLE = 256 << 20
_SECONDS = 0.3
_BESIDE = 512  # rows and columns: a product of about a millisecond
_BOTH = 1.8  # of 2: reads and writes that keep so much of their rates beside each other do not share a link
_OFF_BLOCKS = 64  # bytes: an offset at which no block begins


@dataclass(frozen=True)
class Arrival:
    """How weights arrive in an arena: their rate, and the time of one short read beside computing.

    `answer` is None where the thread that computes brings them itself. `why` is the reason if reads cannot be
    direct, or empty.
    """

    rate: Measurement
    answer: Measurement | None
    why: str = ""

    @property
    def in_flight_bytes(self) -> int:
        """The bytes that would have arrived in the time of an answer."""
        return int(self.rate.median * self.answer.median / 1e9) if self.answer else 0


@dataclass(frozen=True)
class Leaving:
    """How what a forward keeps leaves for a folder: its rate, and how much goes on both ways at once."""

    rate: Measurement
    both: Measurement

    @property
    def duplex(self) -> bool:
        """Tells whether reads and writes at once keep their rates, to a tenth."""
        return self.both.median >= _BOTH


def leaving(folder: str | PathLike[str] | None = None) -> Leaving | None:
    """How values leave for a folder, by default the system's for temporary files; None if they cannot."""
    where = Path(tempfile.gettempdir() if folder is None else folder).resolve()
    machine, mount = this_machine(), " on ".join(find_mount(where))
    ways: tuple[Cache, ...] = ("past", "")

    def subject(quantity: Quantity, cache: Cache) -> Subject:
        return Subject(quantity, machine, str(where), "", mount, cache)

    for cache in ways:
        rate = recall(subject("writes", cache))
        both = recall(subject("both ways", cache))
        if rate is not None and both is not None:
            return Leaving(rate, both)
    try:
        writes, shares, past = measure_writes(where)
    except SourceError:
        return None
    cache = ways[0] if past else ways[1]
    return Leaving(record(subject("writes", cache), writes), record(subject("both ways", cache), shares))


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of an artifact, whose relative paths are inside `folder`, and the rates of reads.

    The stamps of the files are not compared.
    """

    files: tuple[WeightFile, ...]
    folder: Path

    def arrival(self, *, mapped: bool, fits: Callable[[int], bool]) -> Arrival:
        """How weights arrive in an arena now.

        A `mapped` arena is populated from the page cache if that holds the files; otherwise the native engine
        reads past it where that is possible (native/mapped.h). `fits(block)` tells whether most weights have
        the same offset within a block of that many bytes in the arena as in their files.
        """
        with self._open() as source:
            warm = source.is_warm()
            past = source.mode == "direct" and not warm
            block, note = source.block, source.note
        cache: Cache = "past" if past else "warm" if warm else "cold"
        if not mapped:
            rate = self._reads(cache, whole_blocks=fits(block))
            return Arrival(rate, self._answer(cache), "" if warm else note)
        if past and supports_move() and library() is not None:
            return Arrival(self._reads(cache, whole_blocks=fits(block)), self._answer(cache))
        cache = "warm" if warm else "cold"
        rate = measured(self._subject("mapping", cache), partial(self._populate, cold=not warm))
        return Arrival(rate, None if warm else self._answer(cache))

    def disk(self) -> Measurement:
        """The rate at which the disk itself gives the weights. Files are opened only if it is not known."""
        measured = recall(self._subject("reads", "past")) or recall(self._subject("reads", "cold"))
        if measured is not None:
            return measured
        with self._open() as source:
            direct = source.mode == "direct"
        return self._reads("past" if direct else "cold")

    @cached_property
    def identity(self) -> str:
        """A hash of the files' stamps, under which the figures of these files are remembered."""
        return hashlib.sha256(repr(self.files).encode()).hexdigest()[:16]

    def _reads(self, cache: Cache, *, whole_blocks: bool = True) -> Measurement:
        bounced = cache == "past" and not whole_blocks
        subject = self._subject("bounced reads" if bounced else "reads", cache)
        return measured(subject, partial(self._read, cache, _OFF_BLOCKS if bounced else 0))

    def _answer(self, cache: Cache) -> Measurement:
        return measured(self._subject("answer", cache), partial(self._wait, cache))

    def _subject(self, quantity: Quantity, cache: Cache) -> Subject:
        first = (self.folder / self.files[0].path).absolute()
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        mounts = sorted({" on ".join(find_mount(self.folder / file.path)) for file in self.files})
        return Subject(
            quantity,
            this_machine(),
            what=f"{first}{more}",
            identity=self.identity,
            where=", ".join(mounts),
            cache=cache,
        )

    @contextmanager
    def _open(self, *, direct: bool = True) -> Iterator[Source]:
        """Yields the files, open; what the system refuses meanwhile is a SourceError."""
        mode: Mode = "direct" if direct else "buffered"
        with reading(self.folder), Source(self.files, self.folder, mode=mode, check=False) as source:
            yield source

    def _read(self, cache: Cache, shift: int) -> Trials:
        with self._open(direct=cache == "past") as source:
            return measure_read(source, nbytes=_SAMPLE, seconds=_SECONDS, shift=shift, cold=cache == "cold")

    def _wait(self, cache: Cache) -> Trials:
        matrix = torch.ones(_BESIDE, _BESIDE)
        with self._open(direct=cache == "past") as source:
            return measure_answer(source, partial(torch.mm, matrix, matrix), cold=cache == "cold")

    def _populate(self, *, cold: bool) -> Trials:
        with self._open(direct=False) as source:
            # The thread that computes maps what the page cache holds (runtime/arena/mapping.py).
            threads = READERS if cold else 1
            return measure_populate(source, nbytes=_SAMPLE, seconds=_SECONDS, threads=threads, cold=cold)
