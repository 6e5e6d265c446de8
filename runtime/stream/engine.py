"""The engine of a pass: its tables, the queue of its transfers, and their states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from penstock.passes.lowering.method_code import MethodGraph
from penstock.schedule.clock.event_graph import acting_steps
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Arena, Range, Schedule, Storage, Trace
from penstock.schedule.payload.codec import ProbeOrder
from penstock.schedule.plan import Plan
from penstock.schedule.space.spans import merged, subtract


@dataclass
class Counters:
    """The counters of a streamer so far, in bytes, nanoseconds and events.

    `bytes_moved` came into the arena, and `bytes_written` went out of it to the spill file. `bytes_read` are
    those of `bytes_moved` that readers brought; the others were mapped on the caller's thread.
    """

    bytes_moved: int = 0
    bytes_read: int = 0
    misses: int = 0
    stall_ns: int = 0
    bytes_written: int = 0


def sum_of(*counters: Counters) -> Counters:
    """Returns the sum of several counters."""
    names = [field.name for field in fields(Counters)]
    return Counters(**{name: sum(getattr(counter, name) for counter in counters) for name in names})


@dataclass(frozen=True)
class MemoryUse:
    """The memory that loaded weights take, in bytes, and the threads that read them; see `Stats`."""

    held_bytes: int
    peak_bytes: int
    readers: int = 0
    pinned_bytes: int = 0
    mapped_bytes: int = 0
    simulated_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stats(MemoryUse):
    """The counters of a streamed module since it was loaded.

    Attributes:
        passes: Calls that ended.
        bytes_moved: Bytes of weights that came into memory.
        misses: Steps that ran out of the planned order, whose weights were loaded on demand.
        stall_seconds: Time in which the caller waited for weights, loading the resident ones included.
        budget: Bytes of the plan's budget.
        arena: Where weights live and why, in words.
        bytes_written: Bytes of kept values that left for the spill file.
        held_bytes: Bytes of weights in memory now: the arena's ranges and the storages outside of it.
        peak_bytes: The most that `held_bytes` has been, within the budget.
        readers: Threads that read weights.
        pinned_bytes: Bytes that the host holds for a device that copies from it.
        mapped_bytes: The part of `held_bytes` that is the page cache's own.
        simulated_seconds: Virtual time of a simulated device, loading included; None for any other.
    """

    passes: int
    bytes_moved: int
    misses: int
    stall_seconds: float
    budget: int
    arena: str
    bytes_written: int = 0


class Streamer(Protocol):
    """Streams for a module, which calls it at the two probes and at the edges of passes.

    `StreamEngine` is the state machine behind it; a simulated device stands before its engine.
    """

    @property
    def counters(self) -> Counters:
        """The counters so far."""

    def probed(self, graph: int) -> tuple[int, ...]:
        """Returns the steps at which the plan acts in a pass of method `graph`, ascending."""

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of its own threads, which cannot wait for themselves."""

    def begin(self, graph: int) -> None:
        """Start a pass of method `graph`."""

    def acquire(self, graph: int, step: int) -> None:
        """Make the weights of `step` readable for the kernels that are called next."""

    def release(self, graph: int, step: int) -> None:
        """Note that the kernels of `step` have been called."""

    def end(self, graph: int) -> None:
        """End the pass."""

    def abort(self) -> None:
        """Forget everything except the resident ranges, because the pass has failed."""

    def close(self) -> None:
        """Wait for what is on its way, and stop."""


class PooledReads(ABC):
    """The pool of a plan in memory. A program's calls ask it for what they read there."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a pass; what a pass before has left unclear is dropped."""

    @abstractmethod
    def rewrite(self, graph: MethodGraph, trace: Trace) -> MethodGraph:
        """Return the graph, which the caller gives away, with calls that ask for what they read."""

    @abstractmethod
    def calls(self, trace: Trace, order: ProbeOrder) -> Mapping[int, Callable[..., Any]]:
        """Return by number the reads of compiled code, whose order is `order`, that ask."""

    @abstractmethod
    def open_recorder(self) -> Any:
        """Return a recorder of what calls ask for."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """What was done so far."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of what is in memory or on its way."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that `held_bytes` has been."""

    @property
    @abstractmethod
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the readers, which cannot wait for themselves."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the readers, and give all memory back. It may be called again."""


PIECE = 2 << 20
"""Bytes that one reader copies at a time: large enough for a disk, small enough to share out."""


@dataclass(frozen=True)
class Piece:
    """A part of a transfer that one reader copies; `step` and `after` are the transfer's.

    With `out` it goes from the arena to the spill file. `mark` is where it is counted (see Queue).
    """

    start: int
    stop: int
    step: int
    after: int
    out: bool = False
    mark: int = -1


@dataclass(frozen=True)
class Queue:
    """The pieces of one pass in issue order, and how many each step waits for.

    Entry k of `counts` is what the read of step k waits for, entry n what the call itself waits for before
    step 0, and entry n + 1 + k what the end of step k waits for: pieces that go out. `made` is for an engine,
    to keep what it makes of the pieces for as long as the queue.
    """

    graph: int
    pieces: tuple[Piece, ...]
    counts: tuple[int, ...]
    made: list[Any] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, graph: int, pieces: Iterable[Piece], steps: int) -> Queue:
        pieces = tuple(replace(p, mark=p.step + (steps + 1 if p.out else 0)) for p in pieces)
        counts = [0] * (2 * steps + 1)
        for piece in pieces:
            counts[piece.mark] += 1
        return cls(graph, pieces, tuple(counts))


@dataclass(frozen=True)
class MethodTable:
    """The steady pass of a method. `needs[k]` are the ranges that step k reads beside the resident ones.

    `takes[k]` are the ranges that step k writes, which take memory when it begins, and `continues` says that
    a step reads what only the method before has written. `before` is the number of the method whose pass
    comes before as planned, and `ahead` the queue of the pass that comes next.
    """

    graph: int
    before: int
    needs: tuple[tuple[Range, ...], ...]
    takes: tuple[tuple[Range, ...], ...]
    continues: bool
    probed: tuple[int, ...]
    drops: dict[int, list[Range]]
    steady: Queue
    ahead: Queue
    boundary: tuple[Range, ...]
    crosses_calls: bool

    @property
    def steps(self) -> int:
        return len(self.needs)


@dataclass
class Position:
    """Says which piece is issued next, and how far the pass is.

    `queue.pieces[index]` is issued next. It is `ahead` when it is for the pass after the one of `method`,
    whose steps are counted by `ended`. `left` and `left_ahead` count, by step, the pieces that are not
    copied yet. Every change needs the streamer's lock.
    """

    queue: Queue
    method: MethodTable
    left: list[int] = field(default_factory=list)
    left_ahead: list[int] = field(default_factory=list)
    index: int = 0
    ahead: bool = True
    ended: int = 0

    @classmethod
    def before(cls, queue: Queue, method: MethodTable) -> Position:
        """Returns the position before a pass that begins with `queue`, after a pass that has ended."""
        return cls(queue, method, left_ahead=list(queue.counts), ended=method.steps)

    def begin(self, method: MethodTable) -> None:
        """Begin the pass that was ahead, as a pass of `method`."""
        if self.queue.graph != method.graph:
            self.queue, self.left_ahead = method.steady, list(method.steady.counts)
        self.method = method
        self.left, self.left_ahead = self.left_ahead, list(method.ahead.counts)
        self.ahead, self.ended = False, 0
        self._turn()

    def may_start(self, index: int) -> bool:
        """Tells whether the step that piece `index` waits for has ended."""
        if index >= len(self.queue.pieces):
            return False
        after = self.queue.pieces[index].after
        if self.ahead:
            return after < 0 and after + self.method.steps < self.ended
        return after < self.ended

    @property
    def counts(self) -> list[int]:
        """The counts that the next piece belongs to."""
        return self.left_ahead if self.ahead else self.left

    def small_pieces(self) -> Sequence[Piece]:
        """Returns the next piece and those behind it that may start too, up to the size of a large one."""
        nbytes, end = 0, self.index
        while self.may_start(end):
            nbytes += self.queue.pieces[end].stop - self.queue.pieces[end].start
            if nbytes > PIECE and end > self.index:
                break
            end += 1
        return self.queue.pieces[self.index : end]

    def advance(self, count: int) -> None:
        """Go past the next `count` pieces, which are issued, and behind the last one into the next pass."""
        self.index += count
        self._turn()

    def _turn(self) -> None:
        if not self.ahead and self.index >= len(self.queue.pieces):
            self.queue, self.index, self.ahead = self.method.ahead, 0, True


def tabulate(
    plan: Plan, schedule: Schedule, trace: Trace, storages: Sequence[Storage], *, piece: int | None = PIECE
) -> MethodTable:
    """Returns the table of a schedule, whose transfers are cut every `piece` bytes, or not at all (None).

    Its own pass comes next, until `in_turn` says otherwise.
    """
    pieces = [
        Piece(r.start, r.stop, t.step, t.after, t.direction == "out")
        for t in schedule.transfers
        for r in cut([Range(t.start, t.stop)], _piece_bytes(plan, piece))
    ]
    drops: dict[int, list[Range]] = {}
    for drop in schedule.drops:
        drops.setdefault(drop.step, []).append(Range(drop.start, drop.stop))
    steady = Queue.of(schedule.graph, pieces, len(trace.steps))
    needs = tuple(tuple(_step_ranges(plan, storages, step.reads)) for step in trace.steps)
    takes = tuple(tuple(_step_ranges(plan, storages, step.writes)) for step in trace.steps)
    written = {s for step in trace.steps for s in step.writes}
    read = {s for step in trace.steps for s in step.reads if storages[s].kind == "produced"}
    return MethodTable(
        graph=schedule.graph,
        before=schedule.graph if trace.follows is None else trace.follows,
        needs=needs,
        takes=takes,
        continues=not read <= written | set(plan.outside),
        probed=tuple(acting_steps(plan, schedule.graph, [storage.nbytes for storage in storages])),
        drops=drops,
        steady=steady,
        ahead=steady,
        boundary=plan.boundary_of(schedule),
        crosses_calls=schedule.boundary is not None or any(t.after < 0 for t in schedule.transfers),
    )


def in_turn(tables: Sequence[MethodTable]) -> dict[int, MethodTable]:
    """Returns the tables by method, each with the queue of the pass that comes after its own."""
    ahead = {table.before: table.steady for table in tables}
    return {table.graph: replace(table, ahead=ahead[table.graph]) for table in tables}


def first_pass(plan: Plan, method: MethodTable, *, resident_loaded: bool, piece: int | None = PIECE) -> Queue:
    """Returns the queue of a pass that starts with nothing on the device, or with the resident ranges alone.

    The queue has the method's boundary in its order, and then the transfers of the pass. The call waits for
    the resident ranges, and each step waits for the other ranges of the boundary that it is the first to
    read. The last probed step waits for those that only another method reads.
    """
    resident, n = merged(plan.resident), method.steps
    most = _piece_bytes(plan, piece)
    ranges = [] if resident_loaded else cut(plan.resident, most)
    pieces = [Piece(r.start, r.stop, n, -1) for r in ranges]
    pieces += [
        Piece(r.start, r.stop, _first_read(method, r), -1)
        for r in cut(subtract(method.boundary, resident), most)
    ]
    return Queue.of(method.graph, pieces + [p for p in method.steady.pieces if p.after >= 0], n)


def _first_read(method: MethodTable, piece: Range) -> int:
    for step in method.probed:
        if any(need.start < piece.stop and piece.start < need.stop for need in method.needs[step]):
            return step
    return method.probed[-1] if method.probed else method.steps


def _piece_bytes(plan: Plan, piece: int | None) -> int:
    granule = plan.arena.granule
    if piece is None:
        return max((s.stop for s in plan.arena.segments), default=granule)
    return max(piece // granule, 1) * granule


def cut(ranges: Iterable[Range], piece: int) -> list[Range]:
    """Cut `ranges` every `piece` bytes, in order, so that several readers can share one."""
    return [
        Range(start, min(start + piece, whole.stop))
        for whole in ranges
        for start in range(whole.start, whole.stop, piece)
    ]


def _step_ranges(plan: Plan, storages: Sequence[Storage], reads: Iterable[int]) -> list[Range]:
    """Returns the ranges that a step that reads, or writes, storages needs beside the resident ones."""
    arena = plan.arena
    needed = [
        _whole_granules(arena, Range(arena.layout[s], arena.layout[s] + storages[s].nbytes))
        for s in reads
        if arena.layout[s] >= 0 and storages[s].nbytes and s not in plan.outside
    ]
    return subtract(merged(needed), merged(plan.resident))


def _whole_granules(arena: Arena, piece: Range) -> Range:
    if arena.kind == "contiguous":
        return piece
    segment = arena.segments[bisect_right([s.start for s in arena.segments], piece.start) - 1]
    start = piece.start // arena.granule * arena.granule
    stop = -(-piece.stop // arena.granule) * arena.granule
    return Range(max(start, segment.start), min(stop, segment.stop))


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
