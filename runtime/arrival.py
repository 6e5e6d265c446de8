"""Measures the rate at which weights of an artifact arrive: read from its files, or mapped from them.

And that at which what a forward keeps leaves, for a folder.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from pathlib import Path

import torch

from penstock.runtime.files.rates import measure_answer, measure_populate, measure_read
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.files.source import Mode, Source
from penstock.runtime.files.spill_rates import measure_writes
from penstock.runtime.measurements import (
    Cache,
    Measurement,
    Quantity,
    Subject,
    measured,
    recall,
    record,
    this_machine,
)
from penstock.runtime.system.memory import supports_move
from penstock.runtime.system.mounts import find_mount
from penstock.runtime.system.threads import READERS
from penstock.runtime.system.trials import Trials
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import WeightFile

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
    return Leaving(
        record(subject("writes", cache), writes),
        record(subject("both ways", cache), shares),
    )


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of an artifact, whose relative paths are inside `folder`, and the rates of reads.

    The stamps of the files are not compared.
    """

    files: tuple[WeightFile, ...]
    folder: Path

    def arrival(self, *, mapped: bool, fits: Callable[[int], bool]) -> Arrival:
        """How weights arrive in an arena now.

        A `mapped` arena is populated from the page cache if that holds the files; otherwise the files are
        read past the page cache if that is possible (runtime/arena/adaptive.py). `fits(block)` tells whether
        most weights have the same offset within a block of that many bytes in the arena as in their files.
        """
        with self._open() as source:
            warm = source.is_warm()
            past = source.mode == "direct" and not warm
            block, note = source.block, source.note
        cache: Cache = "past" if past else "warm" if warm else "cold"
        if not mapped:
            rate = self._reads(cache, whole_blocks=fits(block))
            return Arrival(rate, self._answer(cache), "" if warm else note)
        if past and supports_move():
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
            # The thread that computes maps what the page cache holds (runtime/arena/adaptive.py).
            threads = READERS if cold else 1
            return measure_populate(source, nbytes=_SAMPLE, seconds=_SECONDS, threads=threads, cold=cold)
