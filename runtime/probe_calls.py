"""Turns the probe calls of a compiled program into acquires and releases of the steps it was observed in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from penstock.passes.probes import Streamer as Probes
from penstock.schedule.payload import ProbeOrder

_EDGE = -1
_Result = TypeVar("_Result")


class ProbeCalls:
    """Stands between a compiled program and the streamer, which sees only the steps `probed`.

    A call may end one step and begin another. Without a streamer, calls do nothing.
    """

    def __init__(self, order: ProbeOrder, probed: Collection[int], probes: Probes | None) -> None:
        self._graph = order.graph
        self._probes = probes
        wanted = frozenset(probed) if probes is not None else frozenset()
        self._opens = {call: k for k, call in enumerate(order.opens) if k in wanted}
        self._closes = {call: k for k, call in enumerate(order.closes) if k in wanted}

    def acquire(self, graph: int, step: int) -> None:
        self._pass(2 * step)

    def release(self, graph: int, step: int) -> None:
        self._pass(2 * step + 1)

    def enclose(self, run: Callable[[], _Result]) -> _Result:
        """Run a pass, with what it reads before its first call and behind its last."""
        self._pass_edge(self._opens, opens=True)
        result = run()
        self._pass_edge(self._closes, opens=False)
        return result

    def _pass(self, call: int) -> None:
        ended, begun = self._closes.get(call), self._opens.get(call)
        if self._probes is None:
            return
        if ended is not None:
            self._probes.release(self._graph, ended)
        if begun is not None:
            self._probes.acquire(self._graph, begun)

    def _pass_edge(self, steps: dict[int, int], *, opens: bool) -> None:
        step = steps.get(_EDGE)
        if step is not None and self._probes is not None:
            (self._probes.acquire if opens else self._probes.release)(self._graph, step)
