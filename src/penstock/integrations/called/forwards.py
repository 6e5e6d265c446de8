"""The wrapped methods of a module and its parts, and steps whose weights have memory of their own."""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.integrations.called.by_units.reads import Seen
from penstock.integrations.called.by_units.units import UnitReads
from penstock.integrations.called.facts import StepTime
from penstock.integrations.called.measuring import (
    ROOM,
    compiled_graphs,
    plain_tensors_only,
    run_uncounted,
)
from penstock.integrations.called.passes import Pass
from penstock.integrations.called.places import COMPILED, Step, StepWeights, Watched, is_compiled, sums_of
from penstock.integrations.called.plans import PlanMemory
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.hollow import copy_part, reduce_part, replace_attribute
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.sizes import format_budget, format_size

_log = logging.getLogger(__name__)


_GROWN = 4 << 20
"""Free pages of the heap go back when the process has grown by this much, as that takes milliseconds."""


_Began = tuple[int, int, int, int]
"""What there was before a step: its number in the call, compiled graphs, and bytes of inputs and others."""


class OwnSteps:
    """Runs steps that no plan has. `name` is the module's in messages; `units` come before the first step."""

    units: UnitReads

    def __init__(self, name: str, steps: StepWeights, memory: PlanMemory, cap: Cap) -> None:
        self._name, self._steps, self._own = name, steps, steps.own
        self._memory, self._cap = memory, cap
        self._took: dict[str, tuple[int, int]] = {}  # of steps: bytes of inputs, and what came then
        self.beside_plans = 0
        """The most bytes of weights that have come beside those of a plan, as those of a step in another."""

    def weight(self, twin: int, memory: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return a weight over `memory`, which this completes from the files."""
        places = self._steps.places
        weight = self._own.weight(places.twins[twin], places.names[twin], memory)
        if twin not in self._steps.sums:
            self._steps.sums[twin] = sums_of(weight)
        return weight

    def with_weights(self, output: Any) -> Any:
        """Return what a call has returned, with values for weights that it has returned as they are."""
        twins = self._steps.places.twins
        if not any(id(leaf) in twins for leaf in pytree.tree_leaves(output)):
            return output
        return pytree.tree_map(lambda leaf: self.weight(id(leaf), {}) if id(leaf) in twins else leaf, output)

    @contextmanager
    def running(self, current: Pass, step: Step, begun: int, inputs: object) -> Iterator[None]:
        """Have the weights of a step that no plan has in memory of their own, which is then given back."""
        twins, storages = self._read_by(step)
        nbytes = self._steps.facts.bytes_of(storages)
        began = self._measured(current, step.path, nbytes, inputs)
        nested = current.open is not None
        if nested or current.order is not None:
            outer = self.bytes_at_once(current.open.path) if current.open and current.order is None else 0
            self.beside_plans = max(self.beside_plans, current.own_bytes - outer + nbytes)
        seen = Seen(step.path, step.path)
        if not nested and not self.units.is_member(step.path):
            current.steps.append(seen)
        with plain_tensors_only():
            memory = self._own.read(storages)
            values = {twin: self.weight(twin, memory) for twin in twins}
        watched = [(twin, Watched(value, self._steps.sums[twin])) for twin, value in values.items()]
        filled = step.fill(values)
        before = current.open, current.values
        current.open, current.values = before[0] or step, {**before[1], **values}
        _start(watched)
        current.own_bytes += nbytes
        inner = current.inner_ns
        ready = time.perf_counter_ns()
        try:
            yield
        finally:
            ended = time.perf_counter_ns()
            used = [(twin, weight) for twin, weight in watched if weight.is_viewed or weight.is_written]
            self._measure(current, step.path, began)
            current.own_bytes -= nbytes
            current.open, current.values = before
            step.empty(filled)
            if not nested:
                lead = max(0, begun - current.mark)
                took = ended - ready - (current.inner_ns - inner)
                seen.time = StepTime(lead, max(0, took))  # reads of several threads overlap
            for twin, weight in used:
                use = "writes" if weight.is_written else "keeps a view of"
                self.keep(current, twin, weight.value, f"{step.path or self._name} {use}")
            if current.meter is not None:
                for weights in (memory, values, watched, used, filled):
                    weights.clear()
                current.meter.restart()
            current.mark = time.perf_counter_ns()

    def _read_by(self, step: Step) -> tuple[list[int], list[int]]:
        """Return the twins of a step that are to have memory of their own, and their storages."""
        storages = self._steps.readers.storages[step.path]
        left_out = self.units.left_out(step.path, storages)
        there = self._memory.staying.keys() | self._memory.present.keys()
        twins = [t for t in step.twins if t not in there and not self._steps.storages_of(t) & left_out]
        needed = set().union(*map(self._steps.storages_of, twins))
        return twins, [s for s in storages if s in needed]

    def bytes_of(self, step: Step) -> int:
        """Return the bytes of weights of a step that would have memory of their own now."""
        return self._steps.facts.bytes_of(self._read_by(step)[1])

    def keep(self, current: Pass | None, twin: int, value: torch.Tensor, use: str) -> None:
        """Keep a weight in memory from now on as `value`, for the reason `use`."""
        _log.info("%s stays in memory: %s it", self._steps.places.names[twin], use)
        self._memory.staying[twin] = value
        self._steps.learned.resident |= self._steps.storages_of(twin)
        self._memory.settle()
        if current is not None:
            current.learned = True

    def stay(self, current: Pass, twin: int) -> torch.Tensor:
        """Keep a weight in memory from now on that a call writes to; return it."""
        value = self.weight(twin, {})
        self.keep(current, twin, value, "the call writes")
        return value

    def _measured(self, current: Pass, path: str, nbytes: int, inputs: object) -> _Began:
        """Note what there is before a step reads `nbytes` of weights. Raises BudgetError as `_check_room`."""
        current.own_steps += 1
        input_bytes = there = 0
        if current.meter is not None:
            input_bytes = sum(t.nbytes for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))
            self._check_room(current, path, nbytes, input_bytes)
            there = current.meter.now
        return current.own_steps, compiled_graphs(), input_bytes, there

    def _measure(self, current: Pass, path: str, began: _Began) -> None:
        """Note what a step has taken. What a compiler has taken in it is none of later calls."""
        if current.meter is None:
            return
        number, graphs, input_bytes, there = began
        if compiled_graphs() != graphs:
            current.has_compiled = True
            current.meter.forget()
            return
        current.meter.look(current.own_bytes)
        if current.own_steps == number:  # none within this one
            took = input_bytes, max(0, current.meter.recent - there)
            self._took[path] = max(took, self._took.get(path, took))

    def _check_room(
        self, current: Pass, path: str, nbytes: int, input_bytes: float = inf, held_bytes: int = 0
    ) -> None:
        """Raise BudgetError before weights are read that do not fit the cap beside what the call takes.

        `held_bytes` of weights are there beside those of steps.
        """
        meter = current.meter
        assert meter is not None, "calls without a plan are measured"

        def beside_weights() -> int:
            taken = meter.look(current.own_bytes + held_bytes)
            before, took = self._took.get(path, (-1, 0))
            if input_bytes <= before:
                taken = meter.now + took
            return max(0, current.given_bytes + current.own_bytes + held_bytes + taken - self._cap.spare)

        beside = beside_weights()
        if meter.now > meter.trimmed + _GROWN or nbytes + beside > self._cap.room:
            self._cap.give_back()
            beside = beside_weights()
            meter.trimmed = meter.now
        if nbytes + beside > self._cap.room:
            floor, most = max((self.bytes_at_once(self.largest), self.largest), (nbytes, path))
            raise self.too_little(floor, beside, most, current.given_bytes)

    def have_room(self, current: Pass, nbytes: int, held_bytes: int = 0) -> None:
        """Raise BudgetError before an operator with `held_bytes` reads `nbytes` that do not fit the cap."""
        if current.meter is not None:
            self._check_room(current, current.path, nbytes, held_bytes=held_bytes)
        elif current.order is not None:
            self.beside_plans = max(self.beside_plans, held_bytes + nbytes)

    @property
    def largest(self) -> str:
        """The path of the module that reads the most bytes of weights at once."""
        return max(self._steps.steps, key=self.bytes_at_once, default="")

    def bytes_at_once(self, path: str) -> int:
        """Return the bytes of weights that the step of a module reads whole."""
        storages = self._steps.readers.storages.get(path, ())
        return self._steps.facts.bytes_of(set(storages) - self.units.left_out(path, storages))

    def too_little(self, floor: int, beside: int, path: str = "", given_bytes: int = 0) -> BudgetError:
        """Return the error of a cap that is too small for `floor` bytes of weights, and `beside` others.

        `given_bytes` of these are of the caches and inputs of the call.
        """
        room = ROOM * beside + (ROOM - 1) * min(given_bytes, self._cap.spare)  # a call never takes the same
        least = floor + int(room) + self._cap.nbytes - self._cap.room
        who = f"{path} reads {format_size(floor)}" if path else f"{format_size(floor)} of weights are needed"
        ways = ["or call it with smaller inputs"]
        if is_compiled(self._steps.module):
            ways.append("or compile its layers instead of the whole")
        takes = f"the call takes {format_size(beside)} beside weights, and " if beside else ""
        if beside and 2 * given_bytes > beside:
            takes = (
                f"the inputs of the call and the cache of its context take {format_size(given_bytes)}, and "
            )
            ways = smaller_caches(on_cpu=self._own.on_cpu)
        if self._cap.own:
            takes = f"plans and kernels of earlier calls keep {format_size(self._cap.own)}, {takes or 'and '}"
        return BudgetError(
            f"{self._name} does not run in {format_budget(self._cap.nbytes)}: {takes}{who} at once; "
            f"give at least {format_size(least, up=True)}, {', '.join(ways)}",
            floor_bytes=least,
        )


def _start(watched: Sequence[tuple[int, Watched]]) -> None:
    """Begin to watch weights; no variable of the step refers to one when its memory is given back."""
    for _, weight in watched:
        weight.start()


def smaller_caches(*, on_cpu: bool) -> list[str]:
    """Return in words how a context takes less memory, by ways that work here."""
    ways = ["or a shorter context"]
    if not on_cpu:
        ways.append('or a cache in the memory of the host (generate(cache_implementation="offloaded"))')
    if any(_is_installed(name) for name in ("optimum.quanto", "hqq")):
        ways.append('or a quantised cache (generate(cache_implementation="quantized"))')
    return ways


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


Run = Callable[["Wrapped", Sequence[Any], Mapping[str, Any]], Any]
"""Runs a call of a wrapped method."""


@dataclass(eq=False)
class Wrapped:
    """A wrapped method.

    Attributes:
        path: The present path of its module.
        method: The name of the method.
        own: The method as it was.
        called: What stands in its place.
    """

    path: str
    method: str
    own: Callable[..., Any]
    called: Callable[..., Any]

    @cached_property
    def is_forward(self) -> bool:
        """Tell whether this is what a call of the module runs."""
        return self.method in ("forward", COMPILED)

    @property
    def entry(self) -> str:
        """The path, and behind it the method if that is not `forward`."""
        return self.path if self.is_forward else f"{self.path}.{self.method}".removeprefix(".")


class Forwards:
    """The wrapped methods of a module and of all modules in it.

    Args:
        module: The module.
        entries: Methods other than `forward` that libraries call, with the paths of their modules.
        run: What runs the calls.

    Attributes:
        modules: The modules, by path.
    """

    modules: Mapping[str, nn.Module]

    def __init__(self, module: nn.Module, entries: Sequence[str], run: Run) -> None:
        self._module, self._run = module, run
        self._wrapped: dict[int, list[tuple[Wrapped, Callable[[], None]]]] = {}
        self._children: list[tuple[nn.Module, list[nn.Module | None], object]] = []
        self.find()
        for method_path in entries:
            path, _, method = method_path.rpartition(".")
            self._wrap(path, self.modules[path], method)

    @property
    def have_changed(self) -> bool:
        """Tell whether modules have come, gone or moved since `find`, or were compiled."""
        return any(
            module._compiled_call_impl is not call
            or ((children or module._modules) and [*module._modules.values()] != children)
            for module, children, call in self._children
        )

    def find(self) -> None:
        """Wrap the forwards of new modules, and let go of modules that are no parts any more."""
        self.modules = dict(self._module.named_modules())
        compiled = {path for path, module in self.modules.items() if is_compiled(module)}
        inside = tuple(f"{path}." if path else "" for path in compiled)
        modules = {
            path: module
            for path, module in self.modules.items()
            if path in compiled or not path.startswith(inside)
        }
        present = {id(module) for module in modules.values()}
        for gone in [key for key in self._wrapped if key not in present]:
            self._unwrap(gone)
        for path, module in modules.items():
            method = COMPILED if path in compiled and module._compiled_call_impl is not None else "forward"
            wraps = self._wrapped.get(id(module), [])
            if wraps and wraps[0][0].method != method:
                wraps.pop(0)[1]()
            for wrapped, _ in wraps:
                wrapped.path = path
            if not wraps or wraps[0][0].method != method:
                self._wrap(path, module, method)
        self._children = [
            (module, list(module._modules.values()), module._compiled_call_impl)
            for module in self.modules.values()
        ]

    def let_go(self) -> None:
        """Give all modules their own methods again."""
        for known in list(self._wrapped):
            self._unwrap(known)
        self._children.clear()

    def _unwrap(self, known: int) -> None:
        for _, undo in reversed(self._wrapped.pop(known)):
            undo()

    def _wrap(self, path: str, module: nn.Module, method: str) -> None:
        original, run = getattr(module, method), self._run
        if is_compiled(module):
            original = functools.update_wrapper(partial(run_uncounted, original), original)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return run(wrapped, args, kwargs)

        wrapped = Wrapped(path, method, original, called)
        undo = ExitStack()
        undo.callback(replace_attribute(module, method, called))
        for name, copies in (("__deepcopy__", copy_part), ("__reduce_ex__", reduce_part)):
            if name not in vars(module):
                undo.callback(replace_attribute(module, name, partial(copies, module)))
        wraps = self._wrapped.setdefault(id(module), [])
        wraps.insert(0 if wrapped.is_forward else len(wraps), (wrapped, undo.close))
