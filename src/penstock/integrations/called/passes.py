"""One outermost call of a module whose weights stream: what it has run, read and measured so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from penstock.integrations.called.by_units.reads import PassReads, Seen
from penstock.integrations.called.facts import Order
from penstock.integrations.called.measuring import RUNNING, LiveBytes, Meter
from penstock.integrations.called.places import Step, Values


@dataclass(eq=False)
class Pass:
    """One outermost call. `order` is the number of the order that is expected, None while it is observed."""

    entry: str
    order: int | None
    thread: int = field(default_factory=threading.get_ident)
    mark: int = field(default_factory=time.perf_counter_ns)
    position: int = 0
    open: Step | None = None
    values: Values = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)  # that have run modules
    steps: list[Seen] = field(default_factory=list)
    reads: PassReads = field(default_factory=PassReads)
    inner_ns: int = 0  # of reads by units
    own_bytes: int = 0  # of weights in memory of their own
    own_steps: int = 0  # that have begun with weights in memory of their own
    given_bytes: int = 0  # of caches and inputs that there were before
    copies: list[tuple[str, torch.Tensor, str]] = field(default_factory=list)
    meter: Meter | None = None
    live: LiveBytes | None = None
    learned: bool = False
    astray: bool = False  # steps came in another order than the expected one
    has_compiled: bool = False

    @property
    def path(self) -> str:
        """The path of the module that runs."""
        return self.running[-1] if self.running else self.entry

    def number_among(self, orders: Sequence[Order], least: int) -> int | None:
        """Return the number of the order in which this ran, or None; units of `least` bytes make another."""
        paths = tuple([step.path for step in self.steps])
        for number, order in enumerate(orders):
            if (order.entry, order.paths) == (self.entry, paths) and self.reads.is_like(
                order, self.steps, least
            ):
                return number
        return None

    def as_order(self) -> Order:
        """Return the order in which this ran, with its times."""
        return Order(
            self.entry,
            tuple(step.path for step in self.steps),
            tuple(step.time for step in self.steps),
            time.perf_counter_ns() - self.mark,
            tuple(step.as_read() for step in self.steps),
            tuple(step.owner for step in self.steps),
        )


def positions_of(order: Order) -> dict[str, list[int]]:
    """Return the numbers of the steps of each module."""
    positions: dict[str, list[int]] = {}
    for number, path in enumerate(order.paths):
        positions.setdefault(path, []).append(number)
    return positions


@contextmanager
def one_pass() -> Iterator[None]:
    """Count a pass. Autocast keeps no converted copies of weights meanwhile: it makes the same bits again."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with RUNNING.one_more():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
