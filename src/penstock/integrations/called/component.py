"""Calls of a module whose weights stream: observed when they are new, and streamed by a plan from then on.

The outermost call is a pass; the call of a module that reads weights is a step of it. For a step, parameters
take the places of the twins that stand in `_parameters` otherwise, so that nothing that reads a weight
outside of its step sees the memory of another one. In the first call of a kind each step has its weights in
memory of their own.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.adapters import adapted_layers, unmerge_disabled
from penstock.integrations.called import plans
from penstock.integrations.called.between_calls import BetweenCalls, Keep
from penstock.integrations.called.by_units.reads import Seen
from penstock.integrations.called.by_units.units import UnitReads
from penstock.integrations.called.facts import ModuleFacts, Order
from penstock.integrations.called.forwards import Forwards, OwnSteps, Wrapped
from penstock.integrations.called.kinds import KnownKinds, kind_of, refuse_elsewhere, refuse_grad
from penstock.integrations.called.measuring import (
    ROOM,
    CallArguments,
    CallSizes,
    OwnMemory,
    meters_of,
    taken_by,
)
from penstock.integrations.called.passes import Pass, one_pass
from penstock.integrations.called.places import (
    Places,
    Step,
    StepWeights,
    can_read,
    leave_twins_out,
    write_back,
)
from penstock.integrations.called.plans import PlanMemory
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.absent import Answer, answer_with
from penstock.integrations.kept import KeptFiles, KeptWeights, digest_of
from penstock.passes.weights.subclasses import has_parts, plain_tensors
from penstock.runtime.device.opening import target_device
from penstock.runtime.options import LoadOptions, LoadRequest
from penstock.runtime.stream.engine import Stats
from penstock.runtime.stream.loaded import LoadedWeights
from penstock.runtime.system.announcing import announced
from penstock.schedule.facts.errors import BudgetError, StreamError
from penstock.schedule.facts.sizes import format_budget, format_size, seconds_since
from penstock.schedule.plan import Plan

_log = logging.getLogger(__name__)

_MOST_ORDERS = 4
"""Orders of one entry that are planned. A call in any other order loads on demand what comes out of turn."""

_AGAIN = 0.25
"""The effort of a plan that is made again for the same orders, as code of kernels took some of its room.

It takes half the time. Plans of 81 of 85 random problems were as fast to 1 %; the worst was 5.6 % slower.
"""


class CalledModule:
    """A module whose own Python runs, within the memory of a cap.

    Args:
        name: What messages call it.
        module: A module whose parameters are absent (`emptied.hollow.Hollow`): they are its twins.
        facts: The facts of the module, made before its parameters lost their memory.
        kept: The files that hold the weights.
        cap: The memory for weights and calls, which components use in turns.
        entries: Methods other than `forward` that libraries call, such as `decode` or `vision.encode`.
        keep: What writes weights to the cache that were written between calls; they stay in memory without.
        options: How plans are made and run.
    """

    _watches = True  # weights of which operators read single units

    def __init__(
        self,
        name: str,
        module: nn.Module,
        facts: ModuleFacts,
        weight_files: Sequence[KeptWeights],
        cap: Cap,
        *,
        entries: Sequence[str] = (),
        keep: Keep | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self.name, self.module, self.kept = name, module, list(weight_files)
        self.plan: Plan | None = None
        self.orders: list[Order] = []
        self._cap, self._options = cap, LoadRequest.of(options)
        self._process = os.getpid()
        self._state = threading.Lock()  # held while a step begins
        self._kinds = KnownKinds()
        self._sizes = CallSizes()
        self._device = device = target_device(self._options.device)
        self._sizes_of = functools.partial(CallArguments.of, device)
        self._pass: Pass | None = None
        # Calls so far, and bytes that the present plan leaves for them and has for weights.
        self._passes = self._room = self._planned = 0
        self._planned_for: object = None  # the orders and the cap of the last plan
        self._left_beside = 0  # what the present plan leaves for weights that it does not foresee
        self._impossible: object = None  # the terms on which no plan fitted
        self._active = True
        self._viewed = set[int]()  # twins of which something kept views when the last call began
        self._added = self._own_bytes = 0  # bytes of parts that came later, and of those without twins
        places = Places(module, facts.parts)
        for twin, value in places.twins.items():
            for part, plain in plain_tensors(places.names[twin], value).items():
                answer_with(plain, Answer(self, twin, part.removeprefix(places.names[twin])))
        self._files = KeptFiles(name, self.kept)
        own_memory = OwnMemory(facts, device, cap.count_read)
        self._between = BetweenCalls(places, own_memory, self.kept, keep, self._make_room)
        self._forwards = Forwards(module, entries, self._called)
        self._build(places)
        self._own_bytes = self._places.bytes_of_others()
        leave_twins_out(1)
        self._end_overrides = weakref.finalize(self, leave_twins_out, -1)

    def _build(self, places: Places) -> None:
        """Find out who reads what. Calls are observed anew."""
        facts = places.renamed(self._between.own.facts, self._between.names)
        self._places, self._own = places, OwnMemory(facts, self._device, self._cap.count_read)
        self._steps = StepWeights(self.module, self._own, places)
        self._memory = PlanMemory(self._steps, self._cap.count_read)

        self._own_steps = steps = OwnSteps(self.name, self._steps, self._memory, self._cap)
        watches = self._watches and self._options.device == "cpu"
        self._units = steps.units = UnitReads(
            self.module, self._steps, self._cap, steps.stay, steps.have_room, by_units=watches
        )
        self._steps.find()
        self._units.rest()
        self._adapted = adapted_layers(self.module)
        self._forget_orders()

    def _update(self) -> None:
        """Take up what has changed since the last call: parts that came or went, and weights written."""
        if before := self._viewed:  # references to their values are counted, but for ours
            self._places.settle({}, (self._memory.staying,))
            for twin in before:
                self._memory.staying.pop(twin, None)
        viewed = self._between.finish()
        self._viewed = set(self._between.opened)
        staying = self._memory.staying = self._memory.staying | viewed
        if not (self._forwards.have_changed or viewed.keys() != before or self._between.has_changed):
            if before:
                self._memory.settle()
            return
        self.unload()
        self._places.settle({}, (staying,))
        self._units.rest()
        self._forwards.find()
        self._between.has_changed = False
        self._build(Places(self.module, (), self._between.twins, staying))
        self._memory.staying = staying
        for twin in staying.keys() & self._places.names.keys():
            self._steps.learned.resident |= self._steps.storages_of(twin)
        self._steps.find()
        self._memory.settle()
        added = max(0, self._places.bytes_of_others() - self._own_bytes)
        self._cap.reserved += added - self._added
        self._added = added

    def _make_room(self, nbytes: int) -> bool:
        """Give the memory of the plan back if `nbytes` beside it are more than the cap; tell if all fit."""
        with self._cap.lock:
            self._cap.turn(self)
            if self.plan is not None and self.plan.budget + nbytes > self._cap.room:
                self._free()
            return nbytes <= self._cap.room

    @property
    def facts(self) -> ModuleFacts:
        """The facts of the module."""
        return self._steps.facts

    @property
    def stats(self) -> Stats | None:
        """The counters of the present plan, or None where none is loaded."""
        return self._memory.weights.stats(self._passes) if self._memory.weights else None

    @property
    def largest_bytes(self) -> int:
        """The bytes of the most weights that are in memory at once whatever the plan is."""
        return self._own_steps.bytes_at_once(self._own_steps.largest)

    @property
    def weights(self) -> list[Path]:
        """The files that hold the weights."""
        return [file for weights in self.kept for file in weights.files]

    @property
    def residency(self) -> tuple[plans.Residency, ...]:
        """What the present plan does with the weights of each module; empty where there is none."""
        weights = self._memory.weights
        return plans.residency_of(weights.plan, self._steps, self.name) if weights else ()

    def unload(self) -> None:
        """Give the memory of weights back. The next call plans and loads again."""
        self._between.forget_addresses()
        self._free()

    def _free(self) -> None:
        """Give back the memory of weights that a plan has, but of written ones, and of a call without one."""
        written = self._memory.written_in_place(self._memory.present)
        self._memory.close()
        for twin, value in written:
            self._own_steps.keep(None, twin, value, "a call writes")
            self._between.has_changed = True  # who reads it is found again before the next call
        self._units.close()
        self._own.close()

    def let_go(self) -> Callable[[], None]:
        """Give every module its own forward and its twins again; returns what gives these written values."""
        self.unload()
        self._active = False
        self._cap.reserved -= self._added
        staying, self._memory.staying = self._memory.staying, {}
        self._between.opened.clear()
        self._places.settle({}, (staying,))
        self._units.rest()
        self._forwards.let_go()
        self._end_overrides()
        for hold in filter(None, (weights.hold for weights in self.kept)):
            hold.close()
        return functools.partial(write_back, staying, self._between.twins)

    def save_written(self) -> ModuleFacts:
        """Save weights written since the last call; return where all are, or raise as `_check_files`."""
        self._update()
        self._check_files()
        return self._between.own.facts

    def _check_files(self) -> None:
        """Raise SourceError where a weight file is gone, or has other bytes than there were in memory."""
        files = self._files.check(self.kept, self._between.own.facts)
        if files != self.facts.files:  # files that were touched have other stamps
            self._between.own.restamp(files)
            self._own.restamp(files)

    # Who reads what.

    def _learn(self) -> None:
        """Find the steps again with what a pass has shown. If the steps change, observe orders anew."""
        before = set(self._steps.steps)
        self.unload()
        self._steps.find()
        if set(self._steps.steps) != before:
            self._forget_orders()

    def _stack(self, lists: Sequence[str]) -> None:
        """Read the weights of modules of which values choose by units from now on."""
        self.unload()
        twins = {place.fqn: place.twin for place in self._places.all}
        self._steps.learned.small |= self._units.stack(lists, twins)
        self._steps.find()
        self._forget_orders()

    def _forget_orders(self) -> None:
        self.orders.clear()
        self._kinds.clear()
        self._latest: tuple[int, Sequence[Seen]] | None = None  # the last call's order, and its steps

    # Calls.

    def _called(self, wrapped: Wrapped, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the method of a module, as a call of its own or within the pass that runs."""
        original, path = wrapped.own, wrapped.path
        if not self._active:
            return original(*args, **kwargs)
        current = self._pass
        if current is None:  # all that Dynamo traces
            return self._call(wrapped, args, kwargs)
        thread = threading.get_ident()
        if thread != current.thread and wrapped.entry == current.entry:
            return self._call(wrapped, args, kwargs)
        current.running.append(path)
        current.threads.add(thread)
        if current.live is not None:
            current.live.note_autocast()
        try:
            step = self._steps.steps.get(path) if wrapped.is_forward else None
            return (
                original(*args, **kwargs)
                if step is None
                else self._run_step(current, step, original, args, kwargs)
            )
        finally:
            current.running.remove(path)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, wrapped: Wrapped, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        refuse_elsewhere((args, kwargs), self.name, self._process)
        with self._cap.in_use():
            if not self._active:  # restored while this call waited for its turn
                return wrapped.called(*args, **kwargs)
            refuse_grad((args, kwargs))
            self._memory.refuse_viewed()
            self._update()
            if unmerge_disabled(self._adapted):
                self._update()
            method = wrapped.entry
            kind, arguments = kind_of(method, args, kwargs), self._sizes_of(method, args, kwargs)
            with self._cap.calling(self) as alone, one_pass(), torch.no_grad():
                order = None if alone else self._order_of(method, kind, arguments)
                current = self._pass = Pass(method, order)
                self._units.awake(current)
                run = functools.partial(wrapped.called, *args, **kwargs)
                try:
                    output, beside = self._run(current, run, arguments)
                finally:
                    self._pass = None
                    self._memory.leave()
                    self._units.rest()
                    if self._units.spoiled:
                        self.unload()
            if beside is not None:
                self._sizes.add(arguments, self._sizes_of(method, args, kwargs), beside)
            self._passes += 1
            self._check_uses(current)
            self._note(current, kind)
            if order is not None:
                self._room = self._cap.room - self._planned
                grown = self._own_steps.beside_plans > self._left_beside
                if grown or max(ROOM * (beside or 0), self._sizes.beside) > self._room:
                    self.unload()
            return self._own_steps.with_weights(output)

    def _order_of(self, method: str, kind: object, arguments: CallArguments) -> int | None:
        """The order that a call probably has; None if it is observed, or may take more than there is room."""
        orders_of_method = [graph for graph, known in enumerate(self.orders) if known.entry == method]
        order = self._kinds.expected(kind, orders_of_method[0] if len(orders_of_method) == 1 else None)
        if order is None or not self._sizes or self._terms == self._impossible:
            return None
        most = self._sizes.most(arguments)
        if self._memory.weights is not None and most > self._room:  # kernels may have taken some of it since
            self._check_files()
            self.unload()
        if self._memory.weights is None:
            if kind not in self._kinds and self.orders[order].unit_bytes > self.facts.few_unit_bytes:
                return None
            self._room = self._sizes.room(self._cap.nbytes)
        return order if most <= self._room else None

    @property
    def _terms(self) -> object:
        """What decides whether a plan fits."""
        return self._sizes.beside, self._cap.room, len(self.orders), self._own_steps.beside_plans

    def _run(
        self, current: Pass, call: Callable[[], Any], arguments: CallArguments
    ) -> tuple[Any, int | None]:
        """Return what a call returns, and the bytes that it took beside weights, if they were measured."""
        run = functools.partial(self._units.run_to_end, current, call)
        if current.order is None:
            return self._observed(current, run, arguments)
        try:
            weights = self._memory.weights or self._open()
        except BudgetError as error:  # the largest step and what a call takes need not come together
            _log.warning("one module is in memory at a time, which is slow: %s", str(error))
            current.order, self._impossible = None, self._terms
            return self._observed(current, run, arguments)
        if self._sizes.most(arguments) > self._room:  # the least plan leaves less than calls were to have
            current.order = None
            return self._observed(current, run, arguments)
        weights.wait()
        self._memory.enter()
        with self._cap.counting_kernels(arguments.tensors):
            current.mark = time.perf_counter_ns()
            if self._sizes.is_known(arguments, self._room):
                return weights.run(current.order, None, run), None
            live, meter = meters_of(self._options.device, beside_arena=True)
            current.live = live
            live.note_autocast()
            with live:
                output = weights.run(current.order, None, run)
        return output, arguments.allocated + max(live.peak, meter.look())

    def _observed(
        self, current: Pass, run: Callable[[], Any], arguments: CallArguments
    ) -> tuple[Any, int | None]:
        """Run a call with one step at a time in memory, and measure what it takes beside that."""
        self._check_files()
        self.unload()
        self._cap.begin(arguments.allocated)
        begun, (live, current.meter) = time.monotonic(), meters_of(self._options.device)
        current.given_bytes, current.live = arguments.allocated, live
        live.note_autocast()
        with live, announced(f"a call of a new kind of {self.name}, one module at a time,"):
            output = run()
        meter = current.meter
        beside = arguments.allocated + taken_by(live, meter, self._cap.kernels)
        self._cap.give_back()
        meter.look()
        self._cap.leave(meter.stays(live))
        words = "%s ran a call of a new kind one module at a time in %s; it takes %s beside weights"
        _log.info(words, self.name, seconds_since(begun), format_size(beside))
        return output, None if current.has_compiled else beside

    def _note(self, current: Pass, kind: object) -> None:
        """Remember the order in which a call ran. A new one is part of the next plan."""
        if current.learned:
            self._learn()
            return
        if current.reads.whole:
            self.unload()
        planned = self._memory.orders.seen if current.order is not None and self._memory.orders else None
        known = current.number_among(planned or self.orders, self.facts.few_unit_bytes)
        if known is not None:
            self._kinds.note(kind, known)
            self._latest = known, current.steps
            return
        if lists := self._units.siblings.chosen(current.entry, current.steps):
            self._stack(lists)
            return
        orders_of_method = [graph for graph, order in enumerate(self.orders) if order.entry == current.entry]
        if len(orders_of_method) == _MOST_ORDERS:
            self._kinds.note(kind, orders_of_method[-1])
            return
        self._kinds.note(kind, len(self.orders))
        self.orders.append(current.as_order())
        self._units.settle(self.orders)
        self.unload()

    # Steps.

    def _run_step(
        self,
        current: Pass,
        step: Step,
        original: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        begun = time.perf_counter_ns()
        if current.reads.held is not None:
            self._units.release(current)
        with self._state:
            number = None if current.open is not None else self._memory.next_step(current, step)
            if number is not None:
                current.open = step
        if number is None:
            if current.open is None and self._memory.reads_units_only(current, step.path):
                if not self._units.is_member(step.path):
                    current.steps.append(Seen(step.path, step.path))
                return original(*args, **kwargs)
            self._make_way(current, step)
            with self._own_steps.running(current, step, begun, (args, kwargs)):
                return original(*args, **kwargs)
        return self._memory.run(current, step, number, begun, (original, args, kwargs))

    def _make_way(self, current: Pass, step: Step) -> None:
        """Give each step memory of its own, if one that the plan does not have would not fit beside it."""
        weights = self._memory.weights
        if (
            current.order is None
            or current.open is not None
            or weights is None
            or self._options.device != "cpu"
        ):
            return
        taken = weights.plan.budget + self._own_steps.bytes_of(step) + self._sizes.beside
        if taken > self._cap.room and not self._memory.is_viewed:
            self._check_uses(current)
            current.order = None
            self.unload()

    # Plans.

    def _open(self) -> LoadedWeights:
        self._check_files()
        begun = time.monotonic()
        with self._cap.working():
            before, self._planned_for = self._planned_for, (tuple(self.orders), self._cap.nbytes)
            effort = _AGAIN if before == self._planned_for else 1
            planned, self._room = self._plan_for(self.orders, self._cap.nbytes, self._cap.room, effort)
            self._planned, self._left_beside = self._cap.room - self._room, self._own_steps.beside_plans
        self.plan = planned.plan
        weights = self._memory.load(planned, self._options, self._sizes.beside)
        self._units.open(weights, planned.traced)
        nbytes, memory = format_size(self.plan.budget), format_budget(self._cap.nbytes)
        done = f"{memory}, planned in {seconds_since(begun)}: {self.plan.residency}"
        _log.info("%s streams within %s of %s%s", self.name, nbytes, done, plans.advice_on(self.plan))
        return weights

    def _plan_for(
        self, orders: Sequence[Order], memory: int, room: int, effort: float = 1
    ) -> tuple[plans.PlannedOrders, int]:
        """Plan orders in `room` bytes of `memory`; returned with the plan are the bytes that calls have."""
        known, error = (orders, self._options, self._steps, self._units), self._own_steps.too_little
        room -= self._own_steps.beside_plans
        return plans.plan_calls(
            *known, sizes=self._sizes, memory=memory, room=room, effort=effort, too_little=error
        )

    def planned_within(self, memory: int) -> Plan | None:
        """Return how calls like the last one would be planned within `memory` bytes; None before any plan."""
        with self._cap.lock:
            if self._latest is None:
                return None
            number, steps = self._latest
            order = self.orders[number].timed([seen.time for seen in steps])
            return self._plan_for([order], memory, memory - self._cap.nbytes + self._cap.room)[0].plan

    def refuse_within(self, use: str) -> None:
        """Raise StreamError in a thread that runs a call of the module, or parts of it."""
        if (current := self._pass) is not None and threading.get_ident() in current.threads:
            raise StreamError(f"{use} in a call of the {self.name}: do that when the call has ended")

    # Reads and writes that a plan does not foresee.

    def share(self, twin: int, suffix: str, value: torch.Tensor) -> None:
        """Note that something has a view of what `answer` has returned."""
        current = self._pass
        if twin in self._memory.staying:
            return
        if current is None:
            self._between.share(twin)
        elif not any(value is current_value for current_value in current.values.values()):
            name = self._between.names[twin] + suffix
            current.copies.append((name, value, digest_of(value)))

    def write(self, twin: int, value: torch.Tensor) -> bool:
        """Note that something has written to what `answer` has returned; returns False if that is lost."""
        if twin in self._memory.staying:
            return True
        if (current := self._pass) is None:
            self._between.write(twin)
            return True
        if self._standing(current, twin) is not None:  # seen at the end of the step, or of the pass
            return True
        if has_parts(self._places.twins[twin]) or self._between.shares(twin) is not None:
            return False
        self._units.unwatch(self._steps.storages_of(twin))
        self._own_steps.keep(current, twin, value, "the call writes")
        return True

    def _standing(self, current: Pass, twin: int) -> torch.Tensor | None:
        """Return the weight that stands for a twin now, if one does."""
        return {**current.values, **self._memory.present, **self._memory.staying}.get(twin)

    def memory(self, twin: int, suffix: str) -> torch.UntypedStorage | None:
        """Return the memory of what `answer` returns in a call; between calls None."""
        value = None if self._pass is None else self.answer(twin, suffix)
        if value is None:
            return None
        self.share(twin, suffix, value)
        return value.untyped_storage()

    def address(self, twin: int, suffix: str) -> int | None:
        """Return where what `answer` returns is, until the next call or the end of the step."""
        if self._active and self._pass is None:
            with self._cap.lock:
                if self._kept(twin) is None:
                    return self._between.address(twin, suffix)
        if (value := self.answer(twin, suffix)) is None:
            return None
        self.share(twin, suffix, value)
        return value.data_ptr()

    def answer(self, twin: int, suffix: str) -> torch.Tensor | None:
        """Return what a twin, or a part of it, stands for; None once the module is restored.

        In a step of its own, the weight is there already. Otherwise it is read from its file, and the module
        that asks reads it in its step from the next call on, if it may be a step.
        """
        if not self._active:
            return None
        if (current := self._pass) is None or twin not in self._places.names:
            with self._cap.lock:  # a call of another thread may begin now
                value = self._kept(twin)
                return plain_tensors("", self._between.value(twin) if value is None else value)[suffix]
        fqn = self._places.names[twin]
        if not (twin in self._memory.staying or threading.get_ident() in current.threads):
            # This says nothing of what the call reads.
            return plain_tensors("", self._own_steps.weight(twin, {}))[suffix]
        if (value := self._standing(current, twin)) is not None:
            return plain_tensors("", value)[suffix]
        reader = current.path
        reads = self._steps.learned.reads.setdefault(fqn, set())
        if reader not in reads and not self._steps.storages_of(twin) <= self._steps.readers.resident:
            reads.add(reader)
            is_step = reader in self._forwards.modules and can_read(reader, self._steps.steps)
            current.learned |= is_step or self._units.watch(fqn, self._places.twins[twin])
        nbytes = self.facts.bytes_of(self._steps.storages_of(twin))
        self._own_steps.have_room(current, nbytes)
        return plain_tensors("", self._own_steps.weight(twin, {}))[suffix]

    def _kept(self, twin: int) -> torch.Tensor | None:
        """Return a weight that stays in memory between calls, as calls have written it; None for others."""
        if self._memory.written_in_place([twin]):
            self._free()
        return self._memory.staying.get(twin)

    def _check_uses(self, current: Pass) -> None:
        """Raise StreamError if the pass wrote a weight that leaves memory, or keeps a view of it."""
        try:
            self._memory.refuse_written(current)
        except StreamError:
            self.unload()
            raise
        if self._memory.is_viewed:
            self.unload()
            self._memory.refuse_viewed()
