"""The state machine that every engine runs: the current pass, its next step, and deviations from the plan.

One pass of a method is `begin`, then `acquire` and `release` of each probed step in the order of its trace,
then `end`. Transfers start strictly in the order of the plan, each as soon as the step that it waits for has
ended, even if that step belongs to the pass before, so that prefetch runs across calls. A deviation from the
plan (another order of steps, a failed read, an exception in the model) is a miss, or ends in `abort`, after
which the next pass starts from the resident ranges. It makes a pass slower, never wrong.

An engine makes transfers and waits for them: `stream/streamer.py` with threads that fill an arena, and
`device/streamer.py` with the streams and events of a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.runtime.stream.interface import Counters
from penstock.runtime.stream.queue import PIECE, MethodTable, Position, first_pass, in_turn, tabulate
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Range, Storage
from penstock.schedule.plan import Plan


class StreamEngine(ABC):
    """Streams the weights of one plan, which has at least one schedule.

    `piece` is the number of bytes at which transfers are cut; None leaves them whole.
    """

    _position: Position

    def __init__(self, plan: Plan, storages: Sequence[Storage], *, piece: int | None = PIECE) -> None:
        self.counters = Counters()
        traces = {trace.graph: trace for trace in plan.traces}
        self.methods: dict[int, MethodTable] = in_turn(
            [tabulate(plan, s, traces[s.graph], storages, piece=piece) for s in plan.schedules]
        )
        self._plan = plan
        self._keeps = any(any(method.takes) for method in self.methods.values())
        self._forget_pass()

    def probed(self, graph: int) -> tuple[int, ...]:
        """Returns the steps at which the plan acts in a pass of method `graph`, ascending."""
        return self.methods[graph].probed

    def begin(self, graph: int) -> None:
        """Start a pass of method `graph`."""
        self._check()
        if self._is_unclear or not self._can_follow(graph):
            if self.methods[graph].continues:
                raise StreamError(
                    "the values that a call has kept for its backward are not in memory any more, because "
                    "another call came between or one failed: call the module again"
                )
            self._start_over(graph)
        self._start(self.methods[graph])

    def acquire(self, graph: int, step: int) -> None:
        """Have the kernels that follow find everything that `step` reads in the arena."""
        if self._demand is None and self._expected and self._expected[-1] == step:
            self._wait(step)
            if takes := self.methods[graph].takes[step]:
                self._take(takes)
        else:
            if self._keeps:
                raise StreamError(
                    f"step {step} of graph {graph} came out of turn, and what a forward has kept for its "
                    "backward would be lost: compile with spill=False"
                )
            self._load_on_demand(self.methods[graph].needs[step])

    def release(self, graph: int, step: int) -> None:
        """Let the transfers that wait for `step` start, whose kernels have been called."""
        if self._demand is not None:
            return
        if not self._expected or self._expected[-1] != step:
            raise StreamError(f"step {step} of graph {graph} was released without being acquired")
        if self._keeps:
            self._wait_out(step)
        self._expected.pop()
        self._leave(step, self.methods[graph].drops.get(step, ()))

    def end(self, graph: int) -> None:
        """End the pass. With `wrap="barrier"`, what it has started for the next pass joins it."""
        if self._demand is not None or self._expected:
            self.abort()
        else:
            self._finish(self.methods[graph])

    @abstractmethod
    def abort(self) -> None:
        """Forget everything but the resident ranges, so that the next pass starts from the boundary again."""

    # The state of a pass.

    def _forget_pass(self) -> None:
        self._expected: list[int] = []  # the probed steps still to come in this pass, the next one last
        self._demand: Sequence[Range] | None = None  # ranges loaded since this pass left the planned order
        self._running = False

    def _enter(self, method: MethodTable) -> None:
        """Begin a pass of `method`, all steps of which are still to come."""
        self._position.begin(method)
        self._expected = list(reversed(method.probed))
        self._running = True

    def _position_before(self, graph: int, *, resident_loaded: bool, piece: int | None = PIECE) -> Position:
        """Returns the position before a pass that starts from the resident ranges, or from nothing."""
        method = self.methods[graph]
        queue = first_pass(self._plan, method, resident_loaded=resident_loaded, piece=piece)
        return Position.before(queue, method)

    @property
    def _is_unclear(self) -> bool:
        """Tells whether the pass before has neither ended nor aborted, as after an interrupt."""
        return self._running

    def _can_follow(self, graph: int) -> bool:
        """Tells whether the transfers under way for the expected pass also serve a pass of `graph`."""
        now = self._position
        if now.queue.graph == graph:
            return True
        crossing = self.methods[graph].crosses_calls or now.method.crosses_calls
        # The queue of a first pass brings the boundary, which the other method's steady queue does not.
        return not crossing and now.index == 0 and now.queue is now.method.ahead

    # The methods of an engine.

    @abstractmethod
    def _check(self) -> None:
        """Raise the error that keeps this engine from running another pass."""

    @abstractmethod
    def _start_over(self, graph: int) -> None:
        """Forget everything but the resident ranges, and expect a pass of `graph` next."""

    @abstractmethod
    def _start(self, method: MethodTable) -> None:
        """Enter a pass, and start the transfers that may start."""

    @abstractmethod
    def _wait(self, step: int) -> None:
        """Make the kernels that are called next run after the transfers of a step."""

    @abstractmethod
    def _take(self, ranges: Sequence[Range]) -> None:
        """Give memory to ranges that the kernels which are called next write."""

    @abstractmethod
    def _wait_out(self, step: int) -> None:
        """Make what follows the end of a step run after the transfers out that this end waits for."""

    @abstractmethod
    def _leave(self, step: int, drops: Sequence[Range]) -> None:
        """Note that a step has ended, and drop what the plan drops with it."""

    @abstractmethod
    def _finish(self, method: MethodTable) -> None:
        """Note that a pass has ended as planned."""

    @abstractmethod
    def _load_on_demand(self, needed: Sequence[Range]) -> None:
        """Bring the ranges that a step needs outside of the planned order, which is a miss."""
