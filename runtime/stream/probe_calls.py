"""Turns the probe calls of a compiled program into acquires and releases of the steps it was observed in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from penstock.passes.probes import NOTHING_STREAMS, CompiledCalls, Probes
from penstock.schedule.payload.codec import ProbeOrder

_EDGE = -1
_Result = TypeVar("_Result")


def probe_calls(order: ProbeOrder, probed: Collection[int], streamer: Probes | None) -> CompiledCalls:
    """What the probes of a compiled program talk to where `streamer` streams the steps `probed`."""
    return NOTHING_STREAMS if streamer is None else ProbeCalls(order, probed, streamer)


class ProbeCalls(CompiledCalls):
    """Stands between a compiled program and the streamer, which sees only the steps `probed`.

    A call may end one step and begin another.
    """

    def __init__(self, order: ProbeOrder, probed: Collection[int], probes: Probes) -> None:
        self._graph = order.graph
        self._probes = probes
        wanted = frozenset(probed)
        self._opens = {call: k for k, call in enumerate(order.opens) if k in wanted}
        self._closes = {call: k for k, call in enumerate(order.closes) if k in wanted}

    def acquire(self, graph: int, step: int) -> None:
        self._pass(2 * step)

    def release(self, graph: int, step: int) -> None:
        self._pass(2 * step + 1)

    def enclose(self, run: Callable[[], _Result]) -> _Result:
        self._pass_edge(self._opens, opens=True)
        result = run()
        self._pass_edge(self._closes, opens=False)
        return result

    def _pass(self, call: int) -> None:
        ended, begun = self._closes.get(call), self._opens.get(call)
        if ended is not None:
            self._probes.release(self._graph, ended)
        if begun is not None:
            self._probes.acquire(self._graph, begun)

    def _pass_edge(self, steps: dict[int, int], *, opens: bool) -> None:
        step = steps.get(_EDGE)
        if step is not None:
            (self._probes.acquire if opens else self._probes.release)(self._graph, step)
