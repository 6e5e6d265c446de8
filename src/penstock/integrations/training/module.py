"""A module that is trained while its frozen weights stream: one trace has a forward and its backward."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.called.by_units.reads import Seen
from penstock.integrations.called.component import CalledModule
from penstock.integrations.called.facts import Order, StepTime
from penstock.integrations.called.forwards import Wrapped
from penstock.integrations.called.kinds import IN_MEMORY, kind_of, refuse_elsewhere
from penstock.integrations.called.measuring import (
    CallArguments,
    CallSizes,
    PeakMeter,
    like,
    plain_tensors_only,
)
from penstock.integrations.called.passes import Pass
from penstock.integrations.called.places import Places, Step
from penstock.integrations.emptied.absent import AbsentTensor
from penstock.integrations.training.activations import (
    Activations,
    LeastSizes,
    LiveActivations,
    PackedWeight,
    packing,
)
from penstock.passes.training.facts import COPIES
from penstock.passes.weights.subclasses import has_parts, plain_tensors
from penstock.runtime.stream.engine import Counters, Streamer
from penstock.runtime.stream.loaded import LoadedWeights
from penstock.runtime.system.memory import give_back_when_freed
from penstock.schedule.facts.errors import BudgetError, PassError, StreamError
from penstock.schedule.facts.sizes import format_size, format_time

_log = logging.getLogger(__name__)


@dataclass
class Steps:
    """Counts the backward passes of a component, and logs the first, the second, the fourth, and so on.

    A line says what was moved since the one before, on average. Where the weights were loaded again
    meanwhile, it counts from then.
    """

    name: str
    done: int = 0
    _since: int = 0
    _said_to_fit: bool = False
    _before: tuple[int, int, float, int] = (0, 0, 0.0, 0)
    _written: tuple[int, int] = (0, 0)

    def add(self, stats: Any, streamed: int, written: int) -> None:
        """Count a backward pass, after which the loaded module has these counters.

        `streamed` are the bytes that its plan copies in a step. Once it is said where there are none.
        `written` are those of activations that have left memory so far.
        """
        self.done, self._since = self.done + 1, self._since + 1
        if not streamed and not self._said_to_fit:
            self._said_to_fit = True
            _log.warning(
                "all weights of %s fit into memory, and nothing streams: it trains as fast without penstock",
                self.name,
            )
        now = stats.passes, stats.bytes_moved, stats.stall_seconds, stats.misses
        if now[0] < self._before[0]:
            self._before, self._since = (0, 0, 0.0, 0), 1
        if self.done & (self.done - 1):
            return
        _, moved, stalled, misses = (a - b for a, b in zip(now, self._before, strict=True))
        _log.info(
            "%s, step %d: %s of weights moved and %s waited for them in each, misses %d; "
            "%s of activations written to a file and read again",
            self.name,
            self.done,
            format_size(int(moved // self._since)),
            format_time(stalled / self._since * 1e9),
            misses,
            format_size((written - self._written[1]) // (self.done - self._written[0])),
        )
        self._before, self._since, self._written = now, 0, (self.done, written)


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of a module that required grad when this was made.

    Attributes:
        module: The module.
        parameters: The parameters, each once.
    """

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, module: nn.Module, name: str, model: nn.Module) -> TrainedParameters:
        """Return the parameters of the user's `model` that require grad now.

        The model is the module, or holds it, beside prompts that are trained, for example. `name` is the
        module's in messages.

        Raises PassError if these are none or all, and for one that cannot be trained beside what streams.
        """
        named = [*model.named_parameters(), *module.named_parameters()]
        names = {id(value): fqn for fqn, value in named if value.requires_grad}
        parameters = tuple(value for value in model.parameters() if value.requires_grad)
        if len({value.requires_grad for value in (*parameters, *module.parameters())}) < 2:
            lacking = "is frozen and would stream" if parameters else "requires grad"
            raise PassError(
                f"{name} has no parameter that {lacking}: freeze its weights and give it an adapter "
                "(get_peft_model of peft), or leave train=True out"
            )
        for value in parameters:
            if has_parts(value) or value.device.type != "cpu":
                kind = type(value).__name__ if has_parts(value) else f"on {value.device}"
                raise PassError(
                    f"{names[id(value)]} requires grad and is {kind}: train plain parameters on the CPU, or "
                    "freeze it (requires_grad_(False))"
                )
        memory = {value.untyped_storage()._cdata: names[id(value)] for value in parameters}
        for fqn, other in [*module.named_parameters(), *module.named_buffers()]:
            if id(other) in names or has_parts(other) or isinstance(other, AbsentTensor):
                continue
            trained = memory.get(other.untyped_storage()._cdata)
            if trained is not None:
                raise PassError(
                    f"{trained} requires grad and shares its memory with {fqn}, which is frozen and would "
                    f"stream: freeze {trained}, or give it a copy of its own"
                )
        return cls(module, parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, their gradients, and the optimiser's state, which is assumed AdamW's."""
        return COPIES * sum(value.nbytes for value in self.parameters)

    def without(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a module, by FQN, that are not trained."""
        trained_ids = {id(value) for value in self.parameters}
        return {fqn: value for fqn, value in tensors.items() if id(value) not in trained_ids}

    def refuse_others(self) -> None:
        """Raise StreamError for a weight that streams, and requires grad now."""
        for fqn, value in self.module.named_parameters():
            if isinstance(value, AbsentTensor) and value.requires_grad:
                raise StreamError(
                    f"{fqn} requires grad now, and it streams since penstock was applied: freeze it, or "
                    "restore() and apply penstock again"
                )


_NO_ARGUMENTS = CallArguments(None, 0, {}, {})

_BACKWARD = "backward: "
"""How the names of steps of a backward begin; the names of the weights that they read follow."""


_LARGE = 1 << 20
"""Freed blocks of so many bytes go back to the system.

A Llama with a cap of 96 MiB, trained on 512 tokens with activations of 1.5 MiB each, took 317 MiB above its
imports with blocks of 2 MiB, as freed activations stayed in the heap, and 121 MiB with blocks of 256 KiB.
With those, a step of 64 tokens of a larger Llama took 566 ms, and 538 with blocks of 1 MiB.
"""


@dataclass(eq=False)
class _Opened:
    """The step of the node of a backward that asked for weights last."""

    node: object
    seen: Seen
    storages: set[int] = field(default_factory=set)
    ready: int = 0  # when these were in memory
    number: int = -1  # in the expected order, -1 if there is none
    streamer: Streamer | None = None  # of which this step was acquired
    memory: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _TrainingPass(Pass):
    """A forward and its backward."""

    kind: object = None
    arguments: CallArguments = _NO_ARGUMENTS
    weights: LoadedWeights | None = None
    outside: frozenset[int] = frozenset()  # storages that the plan has in memory throughout
    before: Counters = field(default_factory=Counters)  # of the plan, before the pass
    live: LiveActivations | None = None
    opened: _Opened | None = None
    in_backward: bool = False
    is_whole: bool = True  # it began with a forward


class TrainedModule(CalledModule):
    """A module some of whose parameters are trained, and stay in memory.

    Args:
        trained: These parameters.
        folder: Where files of activations are made that have no room.

    Attributes:
        activations: What forwards keep for their backwards.

    Other arguments are those of `CalledModule`.
    """

    _watches = False  # saved views of units would need their units in the backward

    def __init__(self, *args: Any, trained: TrainedParameters, folder: Path, **options: Any) -> None:
        self._trained = trained
        self._present: _TrainingPass | None = None
        self._last: Order | None = None
        self.activations = Activations(folder, trained.parameters)
        self._whole, self._least = CallSizes(), LeastSizes()  # if all activations stay, and if they leave
        self._keeps_least = False  # the present plan has no room for all activations
        super().__init__(*args, **options)
        give_back_when_freed(_LARGE)
        self._log = Steps(self.name)

    def _build(self, places: Places) -> None:
        super()._build(places)
        self._steps.learned.vectors_stay = True
        self._steps.find()

    def _free(self) -> None:
        """Give the memory of weights back. The next call, or the rest of a backward, loads again."""
        self._drop()
        super()._free()

    # Forwards.

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, wrapped: Wrapped, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        run, method = functools.partial(wrapped.called, *args, **kwargs), wrapped.entry
        refuse_elsewhere((args, kwargs), self.name, self._process)
        with self._cap.in_use():
            if self._active and torch._C._current_graph_task_id() != -1:
                return self._run_again(run)
            present = self._present
            if present is not None and present.in_backward and present.thread != threading.get_ident():
                raise StreamError(f"a backward of the {self.name} runs in another thread: wait for its end")
            self._drop()
            if not self._active or not torch.is_grad_enabled():
                return super()._call(wrapped, args, kwargs)
            self._trained.refuse_others()
            self._memory.refuse_viewed()
            self._update()
            arguments = self._sizes_of(method, args, kwargs)
            kind = (kind_of(method, args, kwargs), self.module.training)
            with self._cap.calling(self) as alone:
                order = None if alone else self._order_with_gradients(method, kind, arguments)
                current = _TrainingPass(method, order, kind=kind, arguments=arguments)
                self._pass = current
                try:
                    output = self._forward(current, run)
                except BaseException:
                    self._end(current, as_planned=False)
                    raise
                finally:
                    self._pass = None
                    self._memory.leave()
            self._passes += 1
            self._present = current
            self._check_uses(current)
            return self._own_steps.with_weights(output)

    def _order_with_gradients(self, method: str, kind: object, arguments: CallArguments) -> int | None:
        """Return the order that a call with gradients probably has; None where it is observed."""
        evaluation, self._sizes = self._sizes, self._least
        try:
            if self.activations.nbytes + self._whole.beside > self._room and not self._keeps_least:
                self.unload()
            return self._order_of(_entry_with_gradients(method), kind, arguments)
        finally:
            self._sizes = evaluation

    def _forward(self, current: _TrainingPass, run: Callable[[], Any]) -> Any:
        live = LiveActivations(self.activations, self._device)
        if current.order is None:
            self._files.refuse_lost(self.kept)
            self.unload()
            current.meter, current.live = PeakMeter(), live
            room = self._cap.room - self._largest_step
        else:
            self._begin(current)
            self._memory.enter()
            if self._whole.is_known(current.arguments, self._room):
                room = self._room - self._least.taken_by(current.arguments)
                with self.activations.forward(lambda: self.activations.beyond(room)):
                    return run()
            room = self._room
        with self.activations.forward(lambda: live.beside - room), live:
            output = run()
        self._note_sizes(current, live.most, live.least)
        return output

    @property
    def _largest_step(self) -> int:
        """The bytes of the step that reads most."""
        return max(map(self.facts.bytes_of, self._steps.readers.storages.values()), default=0)

    def _note_sizes(self, current: _TrainingPass, most: int, least: int) -> None:
        """Remember what a call took beside weights, if all activations stay and if they leave."""
        for sizes, taken in ((self._whole, most), (self._least, least)):
            sizes.add(current.arguments, current.arguments, current.arguments.allocated + taken)

    def _open(self) -> LoadedWeights:
        """Plan with room for all activations; where there is too little, for those that cannot leave."""
        evaluation = self._sizes
        try:
            try:
                taken = self._whole.beside + self.activations.nbytes
                self._sizes, self._keeps_least = CallSizes(max(evaluation.beside, taken)), False
                return super()._open()
            except BudgetError:
                least = max(evaluation.beside, self._least.beside)
                self._sizes, self._keeps_least = LeastSizes(least), True
                return super()._open()
        finally:
            self._sizes = evaluation

    def _run_step(
        self,
        current: Pass,
        step: Step,
        original: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        def with_hooks(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            with packing(current, current.values, self._places.names, self._unpack, self.activations):
                return original(*args, **kwargs)

        if isinstance(current, _TrainingPass) and current.live is not None:
            nbytes = self.facts.bytes_of(self._steps.readers.storages[step.path])
            self.activations.leave(current.live.beside + nbytes - self._cap.room)
            if current.live.beside + nbytes > self._cap.room:
                raise self._own_steps.too_little(nbytes, current.live.beside, step.path)
        return super()._run_step(current, step, with_hooks, args, kwargs)

    # Passes.

    def _begin(self, current: _TrainingPass) -> None:
        """Begin a pass of the plan in an expected order."""
        assert current.order is not None
        current.weights = weights = self._memory.weights or self._open()
        weights.wait()
        current.outside = frozenset(weights.plan.outside)
        current.mark = time.perf_counter_ns()
        current.before = weights.begin(current.order)

    def _end(self, current: _TrainingPass, *, as_planned: bool) -> None:
        """End a pass. One that did not run as planned starts from the beginning next time."""
        self._close_step(current)
        weights, current.weights = current.weights, None
        if weights is not None and weights is self._memory.weights:
            if as_planned:
                assert current.order is not None
                weights.end(current.order, current.before)
            else:
                weights.abort()

    def _drop(self) -> None:
        """End the present pass, whose backward has not come or has failed."""
        current, self._present = self._present, None
        self.activations.end_backward()
        if current is not None:
            self._end(current, as_planned=False)
            self._measure(current)
            if current.kind not in self._kinds and not current.in_backward:
                self._note(current, current.kind)  # a loss that nobody derives

    def _finish(self) -> None:
        """End the present pass at the end of its backward."""
        with self._cap.in_use():
            current, self._present = self._present, None
            self.activations.end_backward()
            if current is None:
                return
            self._end(current, as_planned=True)
            self._measure(current)
            if current.order is not None and self.plan is not None:
                self._log.add(self.stats, self.plan.streamed_bytes, self.activations.bytes_written)
            if current.learned or current.is_whole:
                self._note(current, current.kind)

    def _measure(self, current: _TrainingPass) -> None:
        """Remember what kernels of an observed pass have taken beside weights and tensors."""
        if current.live is not None and current.meter is not None:
            self._note_sizes(current, current.meter.look() - self._cap.kernels, 0)
            current.live = current.meter = None

    def _note(self, current: Pass, kind: object) -> None:
        if isinstance(current, _TrainingPass):
            current.entry = _entry_with_gradients(current.entry)
            backward, before = self._steps.learned.backward, len(self._steps.learned.backward)
            for seen in current.steps:
                if seen.path.startswith(_BACKWARD) and seen.path not in backward:
                    parts = [self.facts.parts[name] for name in seen.path[len(_BACKWARD) :].split(", ")]
                    backward[seen.path] = tuple(sorted({part.storage for part in parts}))
            if len(backward) > before:
                self._steps.find()
        super()._note(current, kind)
        graph = self._kinds.last(kind)
        if isinstance(current, _TrainingPass) and current.in_backward and graph is not None:
            self._last = self.orders[graph]

    # Backwards.

    def _joined(self) -> _TrainingPass:
        """Return the pass of the backward that runs now; one that has ended is taken up again."""
        if not self._active:
            raise StreamError(f"the {self.name} was restored between forward and backward: call it again")
        self._cap.turn(self)
        current = self._present
        if current is None:
            graph = next((k for k, order in enumerate(self.orders) if order is self._last), None)
            current = _TrainingPass("", graph, is_whole=False)
            if graph is None:
                self.unload()
            else:
                self._begin(current)
            self._present = current
        if not current.in_backward:
            self.activations.begin_backward()
            current.in_backward, current.thread = True, threading.get_ident()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        return current

    def _run_again(self, run: Callable[[], Any]) -> Any:
        """Run a module within a backward, as checkpointing does, as the next steps of its pass."""
        current = self._joined()
        if current.opened is not None and current.opened.node is not torch._C._current_autograd_node():
            self._close_step(current)
        before = self._pass, current.open
        self._pass = current
        if current.opened is not None:  # the node has a weight already: steps use memory of their own
            current.open = current.open or next(iter(self._steps.steps.values()))
        self._memory.enter()
        try:
            with self.activations.hooks(), current.live or nullcontext():
                return run()
        finally:
            self._memory.leave()
            self._pass, current.open = before

    def _close_step(self, current: _TrainingPass) -> None:
        """Give back what the node has read that asked for weights last."""
        opened, current.opened = current.opened, None
        if opened is None:
            return
        now = time.perf_counter_ns()
        opened.seen.time = StepTime(opened.seen.time.lead_ns, now - opened.ready)
        current.mark = now
        if opened.streamer is not None:
            assert current.order is not None
            opened.streamer.release(current.order, opened.number)

    def _unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return a saved tensor that lies in a weight, for the node of a backward that asks for it."""
        node: object = torch._C._current_autograd_node()
        if node is not None and torch.is_grad_enabled():
            raise StreamError(
                f"{self._places.names[packed.twin]} is not in memory for gradients of gradients "
                f"(create_graph=True): {IN_MEMORY}"
            )
        with self._cap.lock:
            if node is None:  # somebody looks at what a node has saved
                return self._saved(packed, functools.partial(self._own.tensor, memory={}))
            current = self._joined()
            current.is_whole = current.is_whole and packed.owner is current
            if current.meter is not None:
                current.meter.look()
            storages = self._steps.storages_of(packed.twin)
            return self._saved(packed, self._brought(current, node, packed, storages))

    def _saved(self, packed: PackedWeight, tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
        with plain_tensors_only():
            if packed.part is not None:
                return packed.over(tensor_of(packed.part))
            twin = self._places.twins[packed.twin]
            return like(twin, self._places.names[packed.twin], tensor_of).detach()

    def _brought(
        self, current: _TrainingPass, node: object, packed: PackedWeight, storages: set[int]
    ) -> Callable[[str], torch.Tensor]:
        """Have the storages of a weight in memory for a node; returns what returns its plain tensors."""
        begun = time.perf_counter_ns()
        if current.opened is None or current.opened.node is not node:
            self._close_step(current)
            seen = Seen(_BACKWARD, "", StepTime(max(0, begun - current.mark), 0))
            current.steps.append(seen)
            current.opened = _Opened(node, seen)
        opened = current.opened
        parts = plain_tensors(self._places.names[packed.twin], self._places.twins[packed.twin])
        opened.seen.path = opened.seen.owner = _with_names(opened.seen.path, parts)
        weights = current.weights
        try:
            if weights is not None:
                streaming = storages - current.outside
                if opened.number < 0 and streaming:
                    self._acquire(current, opened, streaming)
                if streaming <= opened.storages:
                    return weights.tensors.__getitem__
                if opened.number < 0:
                    self._leave_plan(current)
            return functools.partial(self._own.tensor, memory=opened.memory)
        finally:
            opened.ready = time.perf_counter_ns()

    def _leave_plan(self, current: _TrainingPass) -> None:
        """Go on without the plan, which lacks a step: there is room for one step at a time then."""
        current.weights = current.order = None
        super()._free()

    def _acquire(self, current: _TrainingPass, opened: _Opened, storages: set[int]) -> None:
        """Have the next step of a backward that reads storages in the arena, if there is one."""
        assert self._memory.orders is not None
        assert current.order is not None
        assert current.weights is not None
        paths = self._memory.orders.traced[current.order].paths
        begin = min(current.position, len(paths))
        for number in (*range(begin, len(paths)), *range(begin)):
            reads = self._steps.learned.backward.get(paths[number], ())
            if storages <= set(reads):
                self._memory.move(current, number)
                opened.number, opened.storages = number, set(reads)
                if current.weights.streamer is not None and self._memory.waits(current, number):
                    opened.streamer = current.weights.streamer
                    opened.streamer.acquire(current.order, number)
                return


def _entry_with_gradients(method: str) -> str:
    return f"{method or 'model'} with gradients"


def _with_names(path: str, names: Mapping[str, object]) -> str:
    """Return the name of a step of a backward that reads more weights."""
    before = path.removeprefix(_BACKWARD)
    return _BACKWARD + ", ".join(sorted({*filter(None, before.split(", ")), *names}))
