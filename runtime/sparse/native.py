"""The pool of the native engine: Python's `units.py` in C++, with readers that need no interpreter."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from penstock.runtime.sparse.base import PooledUnits
from penstock.runtime.stream.interface import Counters
from penstock.runtime.stream.native import NativeStreamer
from penstock.schedule.plan import Plan


class NativeUnits(PooledUnits):
    """The pool of the plan that a native streamer runs, whose passes begin and end those of the pool."""

    in_reader = False  # the readers run no Python, so that nothing is collected on them

    def __init__(self, streamer: NativeStreamer, plan: Plan, names: Sequence[str]) -> None:
        super().__init__(plan, names)
        self._streamer = streamer

    @contextmanager
    def hold(self, graph: int, step: int, units: Sequence[int], *, alone: bool) -> Iterator[None]:
        numbers = array("q", units)
        part = graph, step, numbers.buffer_info()[0], len(numbers)
        self._streamer.call("ps_units_hold", *part, alone)
        try:
            yield
        finally:
            self._streamer.call("ps_units_release", *part)

    @property
    def counters(self) -> Counters:
        now = self._streamer.statistics("ps_units_stats")
        return Counters(now.bytes_moved, now.bytes_read, stall_ns=now.stall_ns)

    @property
    def held_bytes(self) -> int:
        return int(self._streamer.statistics("ps_units_stats").held_bytes)

    @property
    def peak_bytes(self) -> int:
        return int(self._streamer.statistics("ps_units_stats").peak_bytes)

    @property
    def memory(self) -> tuple[int, int]:
        return self._streamer.memory()[-1]

    def close(self) -> None:
        """Do nothing: the streamer's end is that of the pool."""

    def _parts(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        numbers, ends, count = array("q", units), array("q", bytes(8 * len(units))), ctypes.c_int64()
        asked = numbers.buffer_info()[0], len(numbers), ends.buffer_info()[0], ctypes.byref(count)
        self._streamer.call("ps_units_ask", graph, step, *asked)
        return [list(units[start:stop]) for start, stop in pairwise([0, *ends[: count.value]])]

    def _address(self, storage: int) -> int:
        return self._streamer.address_of_units(storage)
