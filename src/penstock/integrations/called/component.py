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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.called.by_units.reads import Seen
from penstock.integrations.called.by_units.units import Host, UnitReads
from penstock.integrations.called.facts import ModuleFacts, Order, StepTime
from penstock.integrations.called.kinds import kind_of
from penstock.integrations.called.measuring import ROOM, ArgumentBytes, CallSizes, call_bytes, meters_of
from penstock.integrations.called.own_memory import OwnMemory
from penstock.integrations.called.own_steps import OwnSteps
from penstock.integrations.called.passes import Pass, uncached_autocast
from penstock.integrations.called.places import Places, Step, leave_twins_out
from penstock.integrations.called.plan_memory import PlanMemory
from penstock.integrations.called.plans import Residency, plan_orders, residency_of
from penstock.integrations.called.readers import StepWeights, can_read
from penstock.integrations.calls.kinds import refuse_grad
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.absent import answer_with
from penstock.integrations.kept import KeptWeights, digest_of
from penstock.integrations.progress import seconds_since
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.device.opening import target_device
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.loading import LoadOptions
from penstock.runtime.stream.interface import Stats
from penstock.runtime.stream.passes import LoadedWeights
from penstock.schedule.facts.errors import BudgetError, SourceError, StreamError
from penstock.schedule.facts.sizes import format_budget, format_size
from penstock.schedule.plan import Plan

_log = logging.getLogger(__name__)

_MOST_ORDERS = 4
"""Orders of one entry that are planned. A call in any other order loads on demand what comes out of turn."""


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
        options: LoadOptions | None = None,
    ) -> None:
        self.name, self.module, self.kept = name, module, kept
        self.plan: Plan | None = None
        self.orders: list[Order] = []
        self._cap = cap
        self._options = options or LoadOptions()
        self._process = os.getpid()
        self._state = threading.Lock()  # held while a step begins
        self._kinds: dict[object, int] = {}
        self._sizes = CallSizes()
        self._device = target_device(self._options.device)
        self._own = OwnMemory(facts, self._device)
        self._pass: Pass | None = None
        self._passes = 0
        self._room = 0  # bytes that the present plan leaves for calls
        self._active = True
        self._modules = dict(module.named_modules())
        self._places = Places(module)
        for twin, value in self._places.twins.items():
            for part, plain in plain_tensors(self._places.names[twin], value).items():
                answer_with(plain, _Answer(self, twin, part))
        self._steps = StepWeights(module, facts, self._places)
        self._memory = PlanMemory(self._steps)
        host = Host(
            lambda: self._pass,
            lambda: self._own_steps.room_of_units(self._pass),
            self._steps.is_read_by,
            lambda twin: self._own_steps.stay(self._pass, twin),
        )
        self._units = UnitReads(module, facts, self._own, host, by_units=self._options.device == "cpu")
        self._own_steps = OwnSteps(
            name, self._steps, self._own, units=self._units, memory=self._memory, cap=cap
        )
        self._steps.find()
        self._undo: list[Callable[[], object]] = [weakref.finalize(self, leave_twins_out())]
        for path, one in self._modules.items():
            self._wrap(path, one, "forward")
        for entry in entries:
            path, _, method = entry.rpartition(".")
            self._wrap(path, self._modules[path], method)

    @property
    def facts(self) -> ModuleFacts:
        """The facts of the module; weights that become units of a stack change them."""
        return self._steps.facts

    @property
    def stats(self) -> Stats | None:
        """The counters of the present plan, or None where none is loaded."""
        weights = self._memory.weights
        return weights.stats(self._passes) if weights else None

    @property
    def weights(self) -> list[Path]:
        """The files that hold the weights."""
        return [file for one in self.kept for file in one.files]

    @property
    def residency(self) -> tuple[Residency, ...]:
        """What the present plan does with the weights of each module; empty where there is none."""
        if self.plan is None or self._memory.weights is None:
            return ()
        return residency_of(self.plan, self._steps, self.name)

    def unload(self) -> None:
        """Give the memory of weights back. The next call plans and loads again."""
        self._memory.close()
        self._units.close()
        self._own.close()

    def let_go(self) -> Callable[[], None]:
        """Give every module its own forward and its twins again, and let what is in the cache be removed.

        Returns what gives parameters that calls have written their present values, once they have memory
        again.
        """
        self.unload()
        self._active = False
        staying, self._memory.staying = self._memory.staying, {}
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

    def _learn(self) -> None:
        """Find the steps again with what a pass has shown. If the steps change, observe orders anew."""
        before = set(self._steps.steps)
        self.unload()
        self._steps.find()
        if set(self._steps.steps) != before:
            self.orders.clear()
            self._kinds.clear()

    def _stack(self, lists: Sequence[str]) -> None:
        """Read the weights of modules of which values choose by units from now on."""
        self.unload()
        twins = {place.fqn: place.twin for place in self._places.all}
        self._steps.facts, small = self._units.stack(lists, twins)
        self._own.facts = self.facts
        self._steps.learned.small |= small
        self._steps.find()
        self.orders.clear()
        self._kinds.clear()

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
                step = self._steps.steps.get(path) if is_forward else None
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
            self._memory.refuse_viewed()
            given, kind = call_bytes((args, kwargs), self._device), kind_of(entry, args, kwargs)
            with self._cap.calling(self) as alone, uncached_autocast(), torch.no_grad():
                current = self._pass = Pass(
                    entry, None if alone else self._order_of(entry, kind, given.nbytes)
                )
                try:
                    own = functools.partial(called, *args, **kwargs)
                    output = self._run(
                        current, functools.partial(self._units.run_to_end, current, own), given
                    )
                finally:
                    self._pass = None
                    if self._units.spoiled:
                        self.unload()
            self._passes += 1
            self._check_uses(current)
            self._note(current, kind)
            return self._own_steps.with_weights(output)

    def _order_of(self, entry: str, kind: object, nbytes: int) -> int | None:
        """Return the order that a call probably has; None where it is observed.

        That is so, too, where it may take more memory than there is room for beside the plan: attention takes
        up to the square of the tokens.
        """
        own = [graph for graph, one in enumerate(self.orders) if one.entry == entry]
        order = self._kinds.get(kind, own[0] if len(own) == 1 else None)
        if self._memory.weights is None and self._units.roots and kind not in self._kinds:
            return None
        if order is None or not self._sizes.measured:
            return None
        if self._memory.weights is None:
            self._room = self._sizes.room(self._cap.nbytes)
        return order if self._sizes.has_room(nbytes, self._room) else None

    def _run(self, current: Pass, run: Callable[[], Any], given: ArgumentBytes) -> Any:
        if current.order is None:
            return self._observed(current, run, given)
        weights = self._memory.weights or self._open()
        weights.wait()
        current.mark = time.perf_counter_ns()
        if self._sizes.is_known(given.nbytes):
            return weights.run(current.order, None, run)
        live, meter = meters_of(self._options.device, beside_arena=True)
        with live:
            output = weights.run(current.order, None, run)
        beside = given.allocated + max(live.peak, meter.look())
        self._sizes.measured.append((given.nbytes, beside))
        if ROOM * beside > self._room:
            self.unload()
        return output

    def _observed(self, current: Pass, run: Callable[[], Any], given: ArgumentBytes) -> Any:
        """Run a call with one step at a time in memory, and measure what it takes beside that."""
        self.refuse_lost()
        self.unload()
        begun, (live, current.meter) = time.monotonic(), meters_of(self._options.device)
        with live:
            output = run()
        beside = given.allocated + max(live.peak, current.meter.look() - self._cap.kernels)
        self._sizes.measured.append((given.nbytes, beside))
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
        paths, planned = tuple(one.path for one in current.steps), self._memory.orders
        for graph, order in enumerate(self.orders):
            known = order if current.order is None or planned is None else planned.seen[graph]
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
            number = None if current.open is not None else self._memory.next_step(current, step)
            if number is not None:
                current.open = step
        if number is None:
            if (
                current.order is not None
                and current.open is None
                and self._memory.reads_units_only(current.order, step.path)
            ):
                if not self._units.is_member(step.path):
                    current.steps.append(Seen(step.path, step.path))
                return own(*args, **kwargs)
            with self._own_steps.running(current, step, begun):
                return own(*args, **kwargs)
        assert current.order is not None
        weights = self._memory.weights
        assert weights is not None
        streamer = weights.streamer if number in self._memory.probed[current.order] else None
        try:
            if streamer is not None:
                streamer.acquire(current.order, number)
            current.values = self._memory.fill_of(current.order, step.path)
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

    # Plans.

    def _open(self) -> LoadedWeights:
        """Plan for all orders that are known, and load."""
        self.refuse_lost()
        begun, facts = time.monotonic(), self.facts
        staying = sum(facts.storages[s].nbytes for s in self._steps.learned.resident)
        beside, self._room = self._sizes.beside, self._sizes.room(self._cap.nbytes)
        plan = functools.partial(
            plan_orders, self.orders, self._options, self._steps, self._units, beside=beside
        )
        with self._cap.working():
            room = self._cap.room
            budget = max(1, min(facts.nbytes, room - self._room) - staying)
            try:
                planned = plan(budget=budget)
            except BudgetError as error:
                floor = error.floor_bytes or 0
                if floor + staying + beside > room:
                    raise self._own_steps.too_little(floor + staying, beside) from error
                planned = plan(budget=floor)
                self._room = room - floor - staying
        self.plan = planned.plan
        weights = self._memory.load(planned, self._options, beside)
        self._units.open(weights, planned.traced)
        _log.info(
            "%s streams within %s of %s, planned in %s: %s",
            self.name,
            format_size(self.plan.budget),
            format_budget(self._cap.nbytes),
            seconds_since(begun),
            self.plan.residency,
        )
        return weights

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
        for values in (self._memory.staying, self._memory.present, current.values):
            if twin in values:
                return plain_tensors(fqn, values[twin])[name]
        reader = current.running[-1] if current.running else current.entry
        reads = self._steps.learned.reads.setdefault(fqn, set())
        if reader not in reads:
            reads.add(reader)
            may_be_step = reader in self._modules and can_read(reader, self._steps.steps)
            current.learned = (
                current.learned or may_be_step or self._units.watch(fqn, self._places.twins[twin])
            )
        return plain_tensors(fqn, self._own_steps.weight(twin, {}))[name]

    def _check_uses(self, current: Pass) -> None:
        """Raise StreamError if the pass wrote a weight that leaves memory, or keeps a view of it."""
        fqn = self._memory.written_copy(current)
        if fqn is not None:
            raise StreamError(f"the call writes {fqn}, which is not in memory: restore() the model first")
        fqn = self._memory.written()
        if fqn is not None:
            self.unload()
            raise StreamError(
                f"the call writes {fqn}, which is not in memory between calls: restore() the model first"
            )
        if self._memory.is_viewed:
            self.unload()
            self._memory.refuse_viewed()


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
