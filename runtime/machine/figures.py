"""Remembered figures of this machine's speed, each with its subject, spread and time of measuring."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal

from penstock.runtime.cache import remember, user_cache
from penstock.runtime.system.limits import memory_limit
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import BudgetError, PayloadError, SourceError
from penstock.schedule.facts.model import STRICT, UNEVEN
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.text import decode, encode, parse

LEAST, MOST = 3, 9
"""The trials of one measurement: fewer than `MOST` if all together take longer than `SECONDS`."""

SECONDS = 0.3

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Trials:
    """The figures of several trials of one piece of work, all in one unit.

    `waited` is the share of the time, from 0 to 1, for which the working threads were ready to run while the
    system ran others. On a busy machine all trials may be equally slow, and the spread does not show it.
    """

    figures: tuple[float, ...]
    waited: float = 0.0

    @property
    def median(self) -> float:
        """Returns the median of the figures."""
        return statistics.median(self.figures)

    @property
    def spread(self) -> float:
        """Returns the interquartile range of the figures over their median, which is 0 for a single trial."""
        if len(self.figures) == 1:
            return 0.0
        first, _, third = statistics.quantiles(self.figures, n=4, method="inclusive")
        return (third - first) / self.median


def repeat(work: Callable[[], object], amount: float, *, threads: int = 1) -> Trials:
    """Rates of `work`, `amount` units a run on `threads` threads, per second; the first run is no trial."""
    work()
    seconds: list[float] = []
    waited = -waiting_ns()
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < SECONDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    waited += waiting_ns()
    share = waited / 1e9 / (threads * sum(seconds))
    return Trials(tuple(amount / second for second in seconds), min(1.0, max(0.0, share)))


def waiting_ns() -> int:
    """Returns for how many nanoseconds the threads of this process, all together, were ready and did not run.

    That is 0 where the system does not say. Only Linux does, in the second figure of schedstat.
    """
    total = 0
    with suppress(OSError, ValueError, IndexError):
        for task in _TASKS.iterdir():
            total += int((task / "schedstat").read_text().split()[1])
    return total


Quantity = Literal[
    "products",
    "memory",
    "copies",
    "reads",
    "bounced reads",
    "mapping",
    "answer",
    "pass",
    "writes",
    "both ways",
]
MEASURING = 36 << 20
"""Bytes of memory that measuring takes: the buffers of `calibrate.py` and `files/rates.py` have 32 MiB."""

Cache = Literal["", "past", "warm", "cold"]

WEEK, HOUR = 7 * 24 * 3600, 3600
"""The seconds for which a figure is used: a reliable one, and a doubtful one."""

MOST_FILES = 500
"""How many figures of files are remembered: reading 5,300 left 9 MiB in use in each process."""

WIDE = 0.25
"""The spread of trials above which their median is doubtful."""

WIDE_ANSWERS = 3.0
"""The same for answers, of which some are late beside computing.

Plans take care of answers four times as late as their median (schedule/planner.py). Above this spread a
quarter of the trials or more may be later still.
"""

BUSY = 0.1
"""The share of the time spent waiting for a processor above which a figure is doubtful."""

DISK_MOST = 5e10
"""Bytes per second that no disk reads: four striped PCIe 5.0 x4 disks read 56 GB/s at best."""


_TITLES: dict[Quantity, str] = {
    "products": "products of {what}",
    "memory": "reading memory",
    "copies": "copies from {what} memory",
    "answer": "one read at a time beside products",
    "pass": "compute of a pass of {what}",
    "bounced reads": "direct reads off the disk's blocks",
    "mapping": "mapping",
    "reads": "reads",
    "writes": "writes",
    "both ways": "writes and reads at once",
}


@dataclass(frozen=True)
class Machine:
    """The machine of a figure: the processor (or the GPU's product), its cores, torch and its threads."""

    __pydantic_config__: ClassVar = STRICT
    processor: str
    cores: int
    threads: int
    torch: str


@dataclass(frozen=True)
class Subject:
    """The subject of a measurement; one figure is remembered for each subject.

    `what` is a dtype, a kind of memory, a file or a method. `identity` is the hash of the files or of the
    artifact that the subject belongs to, and `where` the file system. `cache` says how reads use the page
    cache: they go `past` it, it holds the files (`warm`), or they go through it and it does not hold them
    (`cold`).
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
        """The subject in words."""
        name = _TITLES[self.quantity].format(what=self.what)
        if self.quantity in ("reads", "writes"):
            name = f"{'direct' if self.cache == 'past' else 'buffered'} {name}"
        return name + {"warm": " from the page cache", "cold": " with a cold page cache"}.get(self.cache, "")


@dataclass(frozen=True)
class Measurement:
    """A figure: units per second, or the nanoseconds of an `answer` or of a `pass`.

    Of `both ways` it is the sum of the shares of their rates that writes and reads keep beside each other.

    `median`, `spread` and `waited` are as in `Trials`. `taken_at` is in seconds since 1970.
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
        """The unit of the median."""
        units = {"products": "FLOP/s", "answer": "ns", "pass": "ns", "both ways": "rates"}
        return units.get(self.subject.quantity, "B/s")

    @property
    def amount(self) -> str:
        """The figure with its unit, for people."""
        if self.unit == "ns":
            return f"{self.median / 1e6:,.3f} ms"
        if self.unit == "rates":
            return f"{self.median:.2f} of 2 rates"
        return f"{self.median / 1e9:,.2f} G{self.unit}"

    def doubts(self) -> Iterator[str]:
        """Yields the reasons to doubt the figure, in words."""
        if self.spread > (WIDE_ANSWERS if self.subject.quantity == "answer" else WIDE):
            yield f"varied by {self.spread:.0%} between {self.trials} trials"
        if self.waited > BUSY:
            yield f"waited for a processor {self.waited:.0%} of the time"
        if self.unit == "B/s" and self.subject.cache in ("past", "cold") and self.median > DISK_MOST:
            yield "faster than any disk, so a cache answered"

    def is_fresh(self, now: float) -> bool:
        """Tells whether the figure may still be used, `now` seconds after 1970."""
        return 0 <= now - self.taken_at < (HOUR if any(self.doubts()) else WEEK)

    def makes_sense(self) -> bool:
        """Tells whether a measurement can have given these values."""
        shares = all(0 <= share < math.inf for share in (self.spread, self.waited))
        return 0 < self.median < math.inf and shares and self.trials > 0


@dataclass(frozen=True)
class _File:
    __pydantic_config__: ClassVar = STRICT
    measurements: tuple[Measurement, ...]
    format: Literal["penstock-measurements"] = "penstock-measurements"
    version: Literal[1] = 1


def noted(note: str, sentences: Iterable[str], figures: Iterable[Measurement | None]) -> str:
    """A note of hardware with more `sentences`; UNEVEN ends it if it did, or if a figure is doubtful."""
    uneven = note.endswith(UNEVEN) or any(True for figure in figures if figure for _ in figure.doubts())
    before = note.removesuffix(UNEVEN).removesuffix("; ")
    return "; ".join(filter(None, (before, *sentences, UNEVEN if uneven else "")))


def this_machine() -> Machine:
    """The CPU that this process runs on."""
    import torch  # figures that are known are listed without it, at once

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(_processor(), cores, torch.get_num_threads(), torch.__version__)


def measured(subject: Subject, measure: Callable[[], Trials]) -> Measurement:
    """The remembered figure of a subject. If there is none, it is measured and remembered.

    Raises BudgetError where the limits of this process leave no memory to measure in.
    """
    if (remembered := recall(subject)) is not None:
        return remembered
    limit = memory_limit()
    if limit is not None and limit.left < MEASURING:
        raise BudgetError(
            f"the rate of {subject.title} is not known yet; measuring it takes {format_size(MEASURING)} of "
            f"memory, of which {limit.name} leaves {format_size(limit.left)}: raise that limit, or run "
            "`penstock plan` once without it, which remembers what it measures"
        )
    return record(subject, measure())


def recall(subject: Subject) -> Measurement | None:
    """The remembered figure of a subject; None if there is none or it has to be measured again."""
    now = time.time()
    of_subject = (measurement for measurement in measurements() if measurement.subject == subject)
    return next((measurement for measurement in of_subject if measurement.is_fresh(now)), None)


def record(subject: Subject, trials: Trials) -> Measurement:
    """Remember a figure in place of an earlier one of the same subject, and return it."""
    figures = (trials.median, trials.spread, trials.waited, len(trials.figures))
    measured = Measurement(subject, *figures, int(time.time()))
    _write((*(measurement for measurement in measurements() if measurement.subject != subject), measured))
    return measured


def forget(wrong: Callable[[Measurement], bool]) -> None:
    """Forget the figures for which `wrong` is true; they are measured again when they are needed."""
    before = measurements()
    right = tuple(measurement for measurement in before if not wrong(measurement))
    if len(right) < len(before):
        _write(right)


def measurements() -> tuple[Measurement, ...]:
    """All remembered figures, of this machine and of others, the oldest first."""
    path = _path()
    try:
        state = path.stat()
        return _read(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    except (OSError, PayloadError, SourceError):
        return ()


@lru_cache(maxsize=1)
def _read(path: Path, state: tuple[int, ...]) -> tuple[Measurement, ...]:
    """The figures of a file in a state, which a plan asks for some twenty times."""
    text, tree = parse(read_bounded(path, "a list of measurements"), str(path))
    sensible = filter(Measurement.makes_sense, decode(_File, text, tree, str(path)).measurements)
    return tuple(sorted(sensible, key=lambda measurement: measurement.taken_at))


def _write(figures: tuple[Measurement, ...]) -> None:
    """Remember figures that are not too old: all of the machine, and the newest ones of files."""
    now = time.time()
    recent = [measurement for measurement in figures if now - measurement.taken_at < WEEK]
    of_files = [measurement for measurement in recent if measurement.subject.identity]
    dropped = {measurement.subject for measurement in of_files[:-MOST_FILES]}
    remember(_path(), encode(_File(tuple(figure for figure in recent if figure.subject not in dropped))))


def _path() -> Path:
    return user_cache() / "hardware.json"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
