"""Calls of a module whose weights stream: observed when they are new, and streamed by a plan from then on.

The forward of every module is wrapped. The outermost call is a pass; the call of a module that reads weights
is a step of it. For a step, parameters take the places of the twins that stand in `_parameters` otherwise. So
nothing that reads a weight outside of its step sees the memory of another one.

The first call of a kind needs no plan: each step has its weights in memory of their own. It shows the order
of the steps, their times, the memory that the call takes, and which weights something writes or keeps views
of.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.integrations.called.facts import ModuleFacts, Order, StepTime
from penstock.integrations.called.kinds import kind_of
from penstock.integrations.called.measuring import LiveBytes, PeakMeter, call_bytes
from penstock.integrations.called.own_memory import OwnMemory, like, plain_tensors_only
from penstock.integrations.called.places import Places, Step, Values, Watched, leave_twins_out
from penstock.integrations.called.readers import Learned, can_read, find_readers
from penstock.integrations.called.reads import PassReads, Seen
from penstock.integrations.called.units import Host, UnitReads
from penstock.integrations.calls.kinds import refuse_grad
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.absent import answer_with
from penstock.integrations.kept import KeptWeights, digest_of
from penstock.integrations.progress import seconds_since
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.choice import PlanRequest, decide
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.loading import LoadOptions, load_weights
from penstock.runtime.stream.interface import Stats
from penstock.runtime.stream.passes import LoadedWeights
from penstock.schedule.facts.errors import BudgetError, SourceError, StreamError
from penstock.schedule.facts.model import SparseRead
from penstock.schedule.facts.sizes import format_budget, format_size
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

_log = logging.getLogger(__name__)

_MOST_ORDERS = 4
"""Orders of one entry that are planned. A call in any other order loads on demand what comes out of turn."""

_ROOM = 1.25
"""A plan leaves room for calls that take so much more memory than any that was observed."""

_ALIKE = 1.1
"""Calls whose arguments are larger than any before by at most this factor are not measured."""

_SLACK = 16 << 20, 8
"""A plan leaves at least this for calls that grow, or this part of the cap if that is less."""

_NO_FOLDER = Path()
"""In place of an artifact's folder: the paths of weight files are absolute."""


@dataclass(frozen=True)
class Residency:
    """What a plan does with the weights that a module reads.

    Attributes:
        module: The path of the module.
        nbytes: Bytes of these weights.
        how: `"stays"` in memory, `"streams"`, comes `"by units"`, or is `"read at once"` by each operator
            that asks for it.
        why: The reason, in words.
    """

    module: str
    nbytes: int
    how: str
    why: str


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
    steps: list[Seen] = field(default_factory=list)
    reads: PassReads = field(default_factory=PassReads)
    inner_ns: int = 0  # of reads by units
    own_bytes: int = 0  # of weights in memory of their own
    copies: list[tuple[str, torch.Tensor, str]] = field(default_factory=list)
    meter: PeakMeter | None = None
    learned: bool = False

    @property
    def path(self) -> str:
        """The path of the module that runs."""
        return self.running[-1] if self.running else self.entry


class CalledModule:
    """A module whose own Python runs, within the memory of a cap.

    Args:
        name: What messages call it.
        module: A module whose parameters are absent (`emptied.hollow.Hollow`): they are its twins.
        facts: The facts of the module, made before its parameters lost their memory.
        kept: The files that hold the weights.
        cap: The memory for weights and calls, which components use in turns.
        entries: Methods other than `forward` that libraries call, such as `decode` or `vision.encode`.
        options: How plans are made and run.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        facts: ModuleFacts,
        kept: Sequence[KeptWeights],
        cap: Cap,
        *,
        entries: Sequence[str] = (),
        options: LoadOptions = LoadOptions(),
    ) -> None:
        self.name, self.module, self.facts, self.kept = name, module, facts, kept
        self.plan: Plan | None = None
        self.orders: list[Order] = []
        self._cap = cap
        self._options = options
        self._process = os.getpid()
        self._state = threading.Lock()  # held while a step begins
        self._kinds: dict[object, int] = {}
        self._measured: list[
            tuple[int, int]
        ] = []  # of observed calls, bytes of arguments and bytes beside weights
        self._learned = Learned()
        self._own = OwnMemory(facts)
        self._traced: list[Order] = []  # the orders as the present plan has them
        self._seen: list[Order] = []  # the orders as passes of the present plan show them
        self._left_out: list[dict[str, set[int]]] = []  # by order and path, what is read by units
        self._fills: list[
            dict[str, Values]
        ] = []  # by order and path, what a step puts in places, if not all values
        self._staying: dict[int, torch.Tensor] = {}  # weights that have memory of their own from now on
        self._present: dict[int, torch.Tensor] = {}  # weights that the present plan has in memory throughout
        self._values: dict[int, torch.Tensor] = {}  # weights over the memory of the present plan
        self._step_values: dict[str, Values] = {}  # the same, by the path of the step that reads them
        self._weights: LoadedWeights | None = None
        self._watched: list[tuple[int, Watched]] = []
        self._probed: list[frozenset[int]] = []
        self._positions: list[dict[str, list[int]]] = []
        self._pass: Pass | None = None
        self._passes = 0
        self._room = 0  # bytes that the present plan leaves for calls
        self._active = True
        self._viewed: list[
            tuple[str, weakref.ref[torch.UntypedStorage]]
        ] = []  # views of memory that has gone
        self._modules = dict(module.named_modules())
        self._places = Places(module)
        for twin, value in self._places.twins.items():
            for part, plain in plain_tensors(self._places.names[twin], value).items():
                answer_with(plain, _Answer(self, twin, part))
        self._units = UnitReads(
            module,
            facts,
            self._own,
            Host(lambda: self._pass, self._room_of_units, self._is_read_by, self._stay),
        )
        self._find_steps()
        self._undo = [weakref.finalize(self, leave_twins_out())]
        for path, one in self._modules.items():
            self._wrap(path, one, "forward")
        for entry in entries:
            path, _, method = entry.rpartition(".")
            self._wrap(path, self._modules[path], method)

    @property
    def stats(self) -> Stats | None:
        """The counters of the present plan, or None where none is loaded."""
        return self._weights.stats(self._passes) if self._weights else None

    @property
    def weights(self) -> list[Path]:
        """The files that hold the weights."""
        return [file for one in self.kept for file in one.files]

    @property
    def residency(self) -> tuple[Residency, ...]:
        """What the present plan does with the weights of each module; empty where there is none."""
        plan = self.plan if self._weights is not None else None
        if plan is None:
            return ()
        layout, storages = plan.arena.layout, self.facts.storages
        moved = [(one.start, one.stop) for schedule in plan.schedules for one in schedule.transfers]
        pooled = set(plan.pool.storages) if plan.pool is not None else set[int]()
        twins = {fqn: twin for twin, fqn in self._places.names.items()}

        def of(module: str, fqns: Sequence[str]) -> Residency:
            own = set[int]().union(*(self._storages_of(twins[fqn]) for fqn in fqns if fqn in twins))
            nbytes = sum(storages[s].nbytes for s in own)
            if own <= self._learned.resident:
                return Residency(module, nbytes, "stays", "calls write it, or keep views of it")
            streams = any(
                start < layout[s] + storages[s].nbytes and layout[s] < stop
                for s in own
                for start, stop in moved
                if layout[s] >= 0
            )
            if own & pooled:
                return Residency(module, nbytes, "by units", "calls read some of it")
            if streams:
                return Residency(module, nbytes, "streams", "there is no room for all weights")
            return Residency(module, nbytes, "stays", "there is room for it")

        return tuple(of(path or self.name, fqns) for path, fqns in self._readers.fqns.items())

    def unload(self) -> None:
        """Give the memory of weights back. The next call plans and loads again."""
        weights, self._weights = self._weights, None
        if weights is not None:
            self._present = {}
            self._settle()
            viewed = [
                (self._places.names[twin], one.memory()) for twin, one in self._watched if one.is_viewed
            ]
            self._watched, self._values, self._step_values, self._fills = [], {}, {}, []
            self._close(weights, viewed)
        self._units.close()
        self._own.close()

    def _close(self, weights: LoadedWeights, viewed: Sequence[tuple[str, torch.UntypedStorage]]) -> None:
        """Give the memory of a plan back: at once, or when the last view of it is gone."""
        if not viewed:
            weights.close()
            return
        weights.tensors.clear()  # or what closes it would keep the memory that it waits for
        for name, memory in viewed:
            self._viewed.append((name, weakref.ref(memory)))
            weakref.finalize(memory, weights.close)

    def let_go(self) -> Callable[[], None]:
        """Give every module its own forward and its twins again, and let what is in the cache be removed.

        Returns what gives parameters that calls have written their present values, once they have memory
        again.
        """
        self.unload()
        self._active = False
        staying, self._staying = self._staying, {}
        self._places.settle({}, (staying,))
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        for one in self.kept:
            if one.hold is not None:
                one.hold.close()

        def write() -> None:
            with torch.no_grad():
                for twin, value in staying.items():
                    self._places.twins[twin].copy_(value)

        return write

    def refuse_lost(self) -> None:
        """Raise SourceError where a weight file is missing, before anything is given up for it."""
        for file in self.weights:
            with reading(file):
                there = file.is_file()
            if not there:
                raise SourceError(
                    f"{file} is gone, and it held the weights of {self.name}, which are not in memory: "
                    "put the file back; where that cannot be, restore() is impossible too, so load the model "
                    "again, from files that are there"
                )

    # Who reads what.

    def _find_steps(self) -> None:
        self._readers = find_readers(self.module, self.facts, self._learned)
        reads = self._learned.reads
        self._steps = {
            path: self._places.step(path, fqns, [fqn for fqn in fqns if path in reads.get(fqn, ())])
            for path, fqns in self._readers.fqns.items()
        }

    def _learn(self) -> None:
        """Find the steps again with what a pass has shown. If the steps change, observe orders anew."""
        before = set(self._steps)
        self.unload()
        self._find_steps()
        if set(self._steps) != before:
            self.orders.clear()
            self._kinds.clear()

    def _stack(self, lists: Sequence[str]) -> None:
        """Read the weights of modules of which values choose by units from now on."""
        self.unload()
        twins = {place.fqn: place.twin for place in self._places.all}
        self.facts, small = self._units.stack(lists, twins)
        self._own.facts = self.facts
        self._learned.small |= small
        self._find_steps()
        self.orders.clear()
        self._kinds.clear()

    def _settle(self) -> None:
        self._places.settle({**self._present, **self._staying}, (self._staying, self._values))

    def _storages_of(self, twin: int) -> set[int]:
        parts = plain_tensors(self._places.names[twin], self._places.twins[twin])
        return {self.facts.parts[name].storage for name in parts}

    # Calls.

    def _wrap(self, path: str, module: nn.Module, method: str) -> None:
        before = module.__dict__.get(method)
        own = getattr(module, method)
        is_forward = method == "forward"
        entry = path if is_forward else f"{path}.{method}".removeprefix(".")

        @functools.wraps(own)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return own(*args, **kwargs)
            current = self._pass
            if current is None or (entry == current.entry and threading.get_ident() != current.thread):
                return self._call(entry, called, args, kwargs)
            current.running.append(path)
            try:
                step = self._steps.get(path) if is_forward else None
                return (
                    own(*args, **kwargs) if step is None else self._run_step(current, step, own, args, kwargs)
                )
            finally:
                current.running.remove(path)

        module.__dict__[method] = called

        def undo() -> None:
            if module.__dict__.get(method) is called:
                del module.__dict__[method]
                if before is not None:
                    module.__dict__[method] = before

        self._undo.append(undo)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(
        self, entry: str, called: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make an outermost call."""
        if os.getpid() != self._process:
            raise StreamError(f"a forked child cannot call the {self.name}: load it in the child")
        with self._cap.lock:
            if not self._active:  # restored while this call waited for its turn
                return called(*args, **kwargs)
            refuse_grad((args, kwargs))
            self._refuse_viewed()
            nbytes, kind = call_bytes((args, kwargs)), kind_of(entry, args, kwargs)
            with self._cap.calling(self) as alone, _uncached_autocast(), torch.no_grad():
                current = self._pass = Pass(entry, None if alone else self._order_of(entry, kind, nbytes))
                try:
                    own = functools.partial(called, *args, **kwargs)
                    output = self._run(
                        current, functools.partial(self._units.run_to_end, current, own), nbytes
                    )
                finally:
                    self._pass = None
                    if self._units.spoiled:
                        self.unload()
            self._passes += 1
            self._check_uses(current)
            self._note(current, kind)
            return self._with_weights(output)

    def _with_weights(self, output: Any) -> Any:
        """Return what a call has returned, with values for weights that it has returned as they are."""
        leaves, spec = pytree.tree_flatten(output)
        if not any(id(leaf) in self._places.twins for leaf in leaves):
            return output
        for index, leaf in enumerate(leaves):
            if id(leaf) in self._places.twins:
                leaves[index] = self._in_own_memory(id(leaf), {})
        return pytree.tree_unflatten(leaves, spec)

    def _in_own_memory(self, twin: int, memory: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a weight over `memory`, which it completes from the files."""
        fqn, value = self._places.names[twin], self._places.twins[twin]
        with plain_tensors_only():
            return like(value, fqn, lambda name: self._own.tensor(name, memory))

    def _order_of(self, entry: str, kind: object, nbytes: int) -> int | None:
        """Return the order that a call probably has; None where it is observed.

        That is so, too, where it may take more memory than there is room for beside the plan: attention takes
        up to the square of the tokens.
        """
        own = [graph for graph, one in enumerate(self.orders) if one.entry == entry]
        order = self._kinds.get(kind, own[0] if len(own) == 1 else None)
        if self._weights is None and self._units.roots and kind not in self._kinds:
            return None
        if order is None or not self._measured:
            return None
        if self._weights is None:
            self._room = self._room_beside()
        larger = max(1.0, nbytes / max(1, self._largest))
        return order if larger <= _ALIKE or self._beside * larger**2 <= self._room else None

    @property
    def _largest(self) -> int:
        """Bytes of the arguments of the largest call that was measured."""
        return max((nbytes for nbytes, _ in self._measured), default=0)

    @property
    def _beside(self) -> int:
        """The most bytes that a call has taken beside weights."""
        return max((beside for _, beside in self._measured), default=0)

    def _room_beside(self) -> int:
        """Return the bytes that a plan leaves for calls."""
        slack = min(_SLACK[0], self._cap.nbytes // _SLACK[1])
        return max(int(_ROOM * self._beside), self._beside + slack)

    def _run(self, current: Pass, run: Callable[[], Any], nbytes: int) -> Any:
        if current.order is None:
            return self._observed(current, run, nbytes)
        if self._weights is None:
            self._open()
        weights = self._weights
        assert weights is not None
        weights.wait()
        current.mark = time.perf_counter_ns()
        if nbytes <= _ALIKE * self._largest:
            return weights.run(current.order, None, run)
        with LiveBytes() as live:
            output = weights.run(current.order, None, run)
        self._measured.append((nbytes, nbytes + live.peak))
        if _ROOM * (nbytes + live.peak) > self._room:
            self.unload()
        return output

    def _observed(self, current: Pass, run: Callable[[], Any], nbytes: int) -> Any:
        """Run a call with one step at a time in memory, and measure what it takes beside that."""
        self.refuse_lost()
        self.unload()
        begun, current.meter = time.monotonic(), PeakMeter()
        with LiveBytes() as live:
            output = run()
        beside = nbytes + max(live.peak, current.meter.look() - self._cap.kernels)
        self._measured.append((nbytes, beside))
        _log.info(
            "%s ran a call of a new kind one module at a time in %s; it takes %s beside weights",
            self.name,
            seconds_since(begun),
            format_size(beside),
        )
        return output

    def _note(self, current: Pass, kind: object) -> None:
        """Remember the order in which a call ran. A new one is part of the next plan."""
        if current.learned:
            self._learn()
            return
        if lists := self._units.siblings.chosen(current.entry, current.steps):
            self._stack(lists)
            return
        if current.reads.whole:
            self.unload()
        paths = tuple(one.path for one in current.steps)
        for graph, order in enumerate(self.orders):
            known = order if current.order is None else self._seen[graph]
            if (known.entry, known.paths) == (current.entry, paths) and current.reads.is_like(
                known, current.steps
            ):
                self._kinds[kind] = graph
                return
        own = [graph for graph, order in enumerate(self.orders) if order.entry == current.entry]
        if len(own) == _MOST_ORDERS:
            self._kinds[kind] = own[-1]
            return
        tail = time.perf_counter_ns() - current.mark
        self._kinds[kind] = len(self.orders)
        times = tuple(one.time for one in current.steps)
        reads = tuple(one.as_read() for one in current.steps)
        owners = tuple(one.owner for one in current.steps)
        self.orders.append(Order(current.entry, paths, times, tail, reads, owners))
        self._units.settle(self.orders)
        self.unload()

    # Steps.

    def _run_step(
        self,
        current: Pass,
        step: Step,
        own: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        begun = time.perf_counter_ns()
        self._units.release(current)
        with self._state:
            number = None if current.open is not None else self._next(current, step)
            if number is not None:
                current.open = step
        if number is None:
            if (
                current.order is not None
                and current.open is None
                and self._reads_units_only(current.order, step)
            ):
                if not self._units.is_member(step.path):
                    current.steps.append(Seen(step.path, step.path))
                return own(*args, **kwargs)
            with self._own_step(current, step, begun):
                return own(*args, **kwargs)
        assert current.order is not None
        assert self._weights is not None
        streamer = self._weights.streamer if number in self._probed[current.order] else None
        try:
            if streamer is not None:
                streamer.acquire(current.order, number)
            current.values = self._fills[current.order].get(step.path, self._step_values[step.path])
            filled = step.fill(current.values)
            current.steps.append(seen := Seen(step.path, step.path))
            inner = current.inner_ns
            ready = time.perf_counter_ns()
            try:
                return own(*args, **kwargs)
            finally:
                ended = time.perf_counter_ns()
                step.empty(filled)
                if streamer is not None:
                    streamer.release(current.order, number)
                lead = max(0, begun - current.mark)
                seen.time = StepTime(lead, ended - ready - (current.inner_ns - inner))
                current.mark = time.perf_counter_ns()
        finally:
            current.open, current.values = None, {}

    def _reads_units_only(self, order: int, step: Step) -> bool:
        return self._left_out[order].get(step.path) == set(self._readers.storages[step.path])

    def _without(self, path: str, storages: Collection[int]) -> Values:
        away, values = set(storages) - self._learned.small, self._step_values[path]
        return {twin: one for twin, one in values.items() if not self._storages_of(twin) & away}

    def _next(self, current: Pass, step: Step) -> int | None:
        """Return the number of a step in the expected order; None where it has none."""
        if current.order is None:
            return None
        order = self._traced[current.order].paths
        if current.position < len(order) and order[current.position] == step.path:
            number = current.position
        else:
            numbers = self._positions[current.order].get(step.path)
            if numbers is None:
                return None
            number = next((k for k in numbers if k >= current.position), numbers[0])
        current.position = number + 1
        return number

    @contextmanager
    def _own_step(self, current: Pass, step: Step, begun: int) -> Iterator[None]:
        """Have the weights of a step that no plan has in memory of their own, which is then given back."""
        storages = self._readers.storages[step.path]
        left_out = self._units.left_out(step.path, storages)
        storages = tuple(s for s in storages if s not in left_out)
        nbytes = sum(self.facts.storages[s].nbytes for s in storages)
        if current.meter is not None:
            self._check_room(step, nbytes, current.meter.look() - self._cap.kernels)
        nested = current.open is not None
        seen = Seen(step.path, step.path)
        if not nested and not self._units.is_member(step.path):
            current.steps.append(seen)
        with plain_tensors_only():
            memory = self._own.read(storages)
            values = {
                twin: self._in_own_memory(twin, memory)
                for twin in step.twins
                if twin not in self._staying and not self._storages_of(twin) & left_out
            }
        watched = [(twin, Watched(value)) for twin, value in values.items()]
        filled = step.fill(values)
        before = current.open, current.values
        current.open, current.values = before[0] or step, {**before[1], **values}
        for _, one in watched:
            one.start()
        current.own_bytes += nbytes
        inner = current.inner_ns
        ready = time.perf_counter_ns()
        try:
            yield
        finally:
            ended = time.perf_counter_ns()
            used = [(twin, one) for twin, one in watched if one.is_viewed or one.is_written]
            if current.meter is not None:
                current.meter.look(current.own_bytes)
            current.own_bytes -= nbytes
            current.open, current.values = before
            step.empty(filled)
            if not nested:
                lead = max(0, begun - current.mark)
                seen.time = StepTime(lead, ended - ready - (current.inner_ns - inner))
            self._keep(current, step, used)
            current.mark = time.perf_counter_ns()

    def _keep(self, current: Pass, step: Step, used: Sequence[tuple[int, Watched]]) -> None:
        """Keep weights in memory from now on that a step has written, or of which something keeps views."""
        for twin, one in used:
            what = "writes" if one.is_written else "keeps a view of"
            _log.info("%s stays in memory: %s %s it", self._places.names[twin], step.path or self.name, what)
            self._staying[twin] = one.value
            self._learned.resident |= self._storages_of(twin)
        if used:
            current.learned = True
            self._settle()

    # Plans.

    def _open(self) -> None:
        """Plan for all orders that are known, and load."""
        self.refuse_lost()
        begun, facts = time.monotonic(), self.facts
        staying = sum(facts.storages[s].nbytes for s in self._learned.resident)
        beside, self._room = self._beside, self._room_beside()
        with self._cap.working():
            room = self._cap.room
            budget = max(1, min(facts.nbytes, room - self._room) - staying)
            try:
                payload, self.plan = self._planned(budget)
            except BudgetError as error:
                floor = error.floor_bytes or 0
                if floor + staying + beside > room:
                    raise self._too_little(floor + staying, beside) from error
                payload, self.plan = self._planned(floor)
                self._room = room - floor - staying
        self._weights = load_weights(_NO_FOLDER, payload, self.plan, self._options, beside)
        tensors, outside = self._weights.tensors, set(self.plan.outside)
        with plain_tensors_only():
            for twin, value in self._places.twins.items():
                if twin not in self._staying:
                    self._values[twin] = like(value, self._places.names[twin], tensors.__getitem__)
        self._step_values = {
            path: {twin: self._values[twin] for twin in step.twins if twin in self._values}
            for path, step in self._steps.items()
        }
        self._fills = [
            {path: self._without(path, out) for path, out in one.items()} for one in self._left_out
        ]
        self._present = {
            twin: one for twin, one in self._values.items() if self._storages_of(twin) <= outside
        }
        self._settle()
        self._watched = [
            (twin, Watched(one)) for twin, one in self._values.items() if twin not in self._present
        ]
        for _, one in self._watched:
            one.start()
        self._probed = [frozenset(self._weights.probed(graph)) for graph in range(len(self.orders))]
        self._positions = [_positions(order) for order in self._traced]
        self._units.open(self._weights, self._traced)
        _log.info(
            "%s streams within %s of %s, planned in %s: %s",
            self.name,
            format_size(self.plan.budget),
            format_budget(self._cap.nbytes),
            seconds_since(begun),
            self.plan.residency,
        )

    def _planned(self, budget: int) -> tuple[Payload, Plan]:
        """Plan all orders.

        If the plan cannot read some storages by units, the steps of modules read these whole in the next try.
        """
        facts, readers = self.facts, self._readers
        merged: set[tuple[int, str, int]] = set()
        if budget >= facts.nbytes:
            merged |= {(g, *one) for g, order in enumerate(self.orders) for one in order.by_units()}
        while True:
            reads: list[dict[str, tuple[int, ...]]] = []
            self._traced, self._seen, self._left_out = [], [], []
            for graph, order in enumerate(self.orders):
                joined = {(path, s) for g, path, s in merged if g == graph}
                out = {
                    path: self._units.left_out(path, all_of, joined)
                    for path, all_of in readers.storages.items()
                }
                out = {
                    path: some | (self._learned.small & set(readers.storages[path]))
                    for path, some in out.items()
                }
                reads.append(
                    {p: tuple(s for s in all_of if s not in out[p]) for p, all_of in readers.storages.items()}
                )
                own = order.reduced(
                    functools.partial(self._units.keeps, merged=joined, resident=self._resident)
                )
                self._seen.append(own)
                self._traced.append(own.reduced(functools.partial(_has_reads, reads[-1])))
                self._left_out.append({path: some for path, some in out.items() if some})
            payload = facts.payload(self._traced, reads, readers.resident | self._learned.small)
            by_units = any(order.by_units() for order in self._traced)
            request = PlanRequest(budget, arena=self._options.arena, by_units=by_units, traces=payload.traces)
            plan = decide(_NO_FOLDER, payload, request)
            unserved = {
                (graph, order.owners[k], read.storage)
                for graph, order in enumerate(self._traced)
                for k, step in enumerate(payload.traces[graph].steps)
                for read in step.sparse
                if plan.pool is None or not plan.pool.has(read)
                if self._is_read_by(order.owners[k], read.storage)
            }
            if not unserved:
                outside = set(plan.outside)
                away = functools.partial(self._units.keeps, merged=(), resident=outside)
                self._seen = [order.reduced(away) for order in self._seen]
                return payload, plan
            merged |= unserved

    @property
    def _resident(self) -> set[int]:
        return self._learned.resident | self._learned.small | self._readers.resident

    def _is_read_by(self, path: str, storage: int) -> bool:
        """Tell whether a storage is read in the step of a module."""
        return storage in self._readers.storages.get(path, ())

    def _stay(self, twin: int) -> torch.Tensor:
        """Have a weight that is written to stay in memory from now on, and return it."""
        fqn, current = self._places.names[twin], self._pass
        value = self._in_own_memory(twin, {})
        _log.info("%s stays in memory: the call writes it", fqn)
        self._staying[twin] = value
        self._learned.resident |= self._storages_of(twin)
        self._settle()
        if current is not None:
            current.learned = True
        return value

    def _room_of_units(self) -> int:
        """Return the bytes that reads by units without a plan may take at once."""
        current, room = self._pass, self._cap.room
        if current is None or current.meter is None:
            return room
        return max(0, room - current.own_bytes - max(0, current.meter.peak - self._cap.kernels))

    def _check_room(self, step: Step, nbytes: int, beside: int) -> None:
        """Raise BudgetError before a step is read that does not fit the cap beside what the call takes."""
        if nbytes + max(0, beside) > self._cap.room:
            raise self._too_little(nbytes, max(0, beside), step.path)

    def _too_little(self, floor: int, beside: int, path: str = "") -> BudgetError:
        least = floor + beside + self._cap.nbytes - self._cap.room
        who = f"{path} reads {format_size(floor)}" if path else f"{format_size(floor)} of weights are needed"
        return BudgetError(
            f"{self.name} does not run in {format_budget(self._cap.nbytes)}: the call takes {format_size(beside)} "
            f"beside weights, and {who} at once; give at least {format_size(least, up=True)}, or call it with "
            "smaller inputs",
            floor_bytes=least,
        )

    # Reads and writes that a plan does not foresee.

    def _answer(self, twin: int, name: str) -> torch.Tensor | None:
        """Return what a twin, or a part of it, stands for; None outside of calls, which is refused.

        In a step of its own, the weight is there already. Otherwise it is read from its file, and the module
        that asks reads it in its step from the next call on, if it may be a step.
        """
        current = self._pass
        if current is None:
            return None
        fqn = self._places.names[twin]
        for values in (self._staying, self._present, current.values):
            if twin in values:
                return plain_tensors(fqn, values[twin])[name]
        reader = current.running[-1] if current.running else current.entry
        reads = self._learned.reads.setdefault(fqn, set())
        if reader not in reads:
            reads.add(reader)
            may_be_step = reader in self._modules and can_read(reader, self._steps)
            current.learned = (
                current.learned or may_be_step or self._units.watch(fqn, self._places.twins[twin])
            )
        return plain_tensors(fqn, self._in_own_memory(twin, {}))[name]

    def _check_uses(self, current: Pass) -> None:
        """Raise StreamError if the pass wrote a weight that leaves memory, or keeps a view of it."""
        for fqn, copy, digest in current.copies:
            if digest_of(copy.detach().contiguous()) != digest:
                raise StreamError(f"the call writes {fqn}, which is not in memory: restore() the model first")
        for twin, one in self._watched:
            if one.is_written:
                self.unload()
                raise StreamError(
                    f"the call writes {self._places.names[twin]}, which is not in memory between calls: "
                    "restore() the model first"
                )
        if any(one.is_viewed for _, one in self._watched):
            self.unload()
            self._refuse_viewed()

    def _refuse_viewed(self) -> None:
        """Raise StreamError while something keeps a view of a weight in memory that has been given back."""
        self._viewed = [(fqn, memory) for fqn, memory in self._viewed if memory() is not None]
        if self._viewed:
            raise StreamError(
                f"something keeps a view of {self._viewed[0][0]}, which is not in memory between calls: "
                "restore() the model first, or keep a clone() of the view"
            )


@dataclass(frozen=True)
class _Answer:
    """What operators of a call take in place of a twin, or of a part of one."""

    module: CalledModule
    twin: int
    name: str

    def value(self) -> torch.Tensor | None:
        return self.module._answer(self.twin, self.name)

    def keep(self, value: torch.Tensor) -> None:
        current = self.module._pass
        if current is not None and not any(value is one for one in current.values.values()):
            current.copies.append((self.name, value, digest_of(value.detach().contiguous())))


def _has_reads(reads: Mapping[str, tuple[int, ...]], path: str, read: SparseRead | int | None) -> bool:
    return read is not None or bool(reads.get(path))


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Keep autocast from holding converted copies of weights; it converts to the same bits each time."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _positions(order: Order) -> dict[str, list[int]]:
    """Return the numbers of the steps of each module."""
    positions: dict[str, list[int]] = {}
    for number, path in enumerate(order.paths):
        positions.setdefault(path, []).append(number)
    return positions
