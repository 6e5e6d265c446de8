"""What is remembered of this machine's speed: figures, each with when, on what and how evenly it was taken.

They are in `hardware.json` in the user's cache folder; docs/hardware.md specifies the file. A figure is taken
again when it is a week old, or an hour where there is reason to doubt it, on another machine, and once a load
has contradicted it (runtime/sightings.py). A file that cannot be read or makes no sense counts as none, and
one that cannot be written is not missed.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from penstock.runtime.cache import user_cache
from penstock.runtime.remembered import remember
from penstock.runtime.system.trials import Trials
from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT
from penstock.schedule.payload.text import decode, encode, parse

Quantity = Literal["products", "memory", "copies", "reads", "bounced reads", "mapping", "pass"]
Cache = Literal["", "past", "warm", "cold"]

WEEK, HOUR = 7 * 24 * 3600, 3600
"""Seconds for which a figure is believed, and for which a doubtful one is."""

WIDE = 0.25
"""The spread of trials from which on their median is doubtful."""

BUSY = 0.1
"""The share of the time, waited for a processor, from which on a figure is doubtful."""

DISK_MOST = 5e10
"""Bytes per second that no disk reaches: four PCIe 5.0 x4 disks striped read 56 GB/s at best."""


@dataclass(frozen=True)
class Machine:
    """What every figure depends on: the processor (or the GPU's product), cores, torch and its threads."""

    __pydantic_config__: ClassVar = STRICT
    processor: str
    cores: int
    threads: int
    torch: str


@dataclass(frozen=True)
class Subject:
    """What was measured; one figure is remembered of each.

    `what` is a dtype, a kind of memory, a file or a method, `identity` the hash of the files or of the
    artifact that it belongs to, and `where` the file system. `cache` is the page cache's part in reads: they
    go `past` it, it holds the files (`warm`), or it does not and they go through it (`cold`).
    """

    __pydantic_config__: ClassVar = STRICT
    quantity: Quantity
    machine: Machine
    what: str = ""
    identity: str = ""
    where: str = ""
    cache: Cache = ""

    @property
    def title(self) -> str:
        """What was measured, in words."""
        match self.quantity:
            case "products":
                return f"products of {self.what}"
            case "memory":
                return "reading memory"
            case "copies":
                return f"copies from {self.what} memory"
            case "pass":
                return f"compute of a pass of {self.what}"
            case "bounced reads":
                return "direct reads off the disk's blocks"
            case "mapping":
                name = "mapping"
            case "reads":
                name = "direct reads" if self.cache == "past" else "buffered reads"
        return name + {"warm": " from the page cache", "cold": " with a cold page cache"}.get(self.cache, "")


@dataclass(frozen=True)
class Measurement:
    """A figure: units per second, or the nanoseconds of a `pass`; `taken_at` counts seconds since 1970.

    `spread` and `waited` are those of `Trials`.
    """

    __pydantic_config__: ClassVar = STRICT
    subject: Subject
    median: float
    spread: float
    waited: float
    trials: int
    taken_at: int

    @property
    def unit(self) -> str:
        """What the median counts."""
        return {"products": "FLOP/s", "pass": "ns"}.get(self.subject.quantity, "B/s")

    @property
    def amount(self) -> str:
        """The figure with its unit, for people."""
        if self.unit == "ns":
            return f"{self.median / 1e6:,.3f} ms"
        return f"{self.median / 1e9:,.2f} G{self.unit}"

    def doubts(self) -> Iterator[str]:
        """Why the figure may be wrong, in words; nothing where there is no reason to doubt it."""
        if self.spread > WIDE:
            yield f"varied by {self.spread:.0%} between {self.trials} trials"
        if self.waited > BUSY:
            yield f"waited for a processor {self.waited:.0%} of the time"
        if self.subject.cache in ("past", "cold") and self.median > DISK_MOST:
            yield "faster than any disk, so a cache answered"

    def is_fresh(self, now: float) -> bool:
        """Whether the figure need not be taken again, `now` seconds since 1970."""
        return 0 <= now - self.taken_at < (HOUR if any(self.doubts()) else WEEK)

    def makes_sense(self) -> bool:
        """Whether a measurement can have given this."""
        shares = (self.spread, self.waited)
        return 0 < self.median < math.inf and all(0 <= one < math.inf for one in shares) and self.trials > 0


@dataclass(frozen=True)
class _File:
    __pydantic_config__: ClassVar = STRICT
    measurements: tuple[Measurement, ...]
    format: Literal["penstock-measurements"] = "penstock-measurements"
    version: Literal[1] = 1


def doubted(figures: Iterable[Measurement | None]) -> str:
    """Which of some figures are doubtful and why, in words; empty where none is."""
    doubts = [(one.subject.title, ", ".join(one.doubts())) for one in figures if one]
    said = ", ".join(f"{title} ({why})" for title, why in doubts if why)
    return f"doubtful: {said}; measure again with penstock hardware --measure" if said else ""


def this_machine() -> Machine:
    """The CPU that this process runs on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(_processor(), cores, torch.get_num_threads(), torch.__version__)


def measured(subject: Subject, measure: Callable[[], Trials]) -> Measurement:
    """The figure that is remembered of a subject, or else the one that `measure` gives now, remembered."""
    return recall(subject) or record(subject, measure())


def recall(subject: Subject) -> Measurement | None:
    """The figure that is remembered of a subject, unless it has to be taken again."""
    now = time.time()
    return next((one for one in measurements() if one.subject == subject and one.is_fresh(now)), None)


def record(subject: Subject, trials: Trials) -> Measurement:
    """Remember a figure instead of the one before it, and return it."""
    found = Measurement(
        subject, trials.median, trials.spread, trials.waited, len(trials.figures), int(time.time())
    )
    _write((*(one for one in measurements() if one.subject != subject), found))
    return found


def forget(wrong: Callable[[Measurement], bool]) -> None:
    """Forget the figures that are `wrong`: they are taken again when they are needed."""
    known = measurements()
    kept = tuple(one for one in known if not wrong(one))
    if len(kept) < len(known):
        _write(kept)


def measurements() -> tuple[Measurement, ...]:
    """All figures that are remembered, of this machine and of others, the oldest first."""
    path = _path()
    try:
        found = decode(_File, *parse(path.read_bytes(), str(path)), str(path)).measurements
    except (OSError, PayloadError):
        return ()
    return tuple(sorted(filter(Measurement.makes_sense, found), key=lambda one: one.taken_at))


def _write(known: tuple[Measurement, ...]) -> None:
    now = time.time()
    remember(_path(), encode(_File(tuple(one for one in known if now - one.taken_at < WEEK))))


def _path() -> Path:
    return user_cache() / "hardware.json"


def _processor() -> str:
    """The name of the processor, as the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
