"""A module whose calls stream: each kind of call becomes a method of its artifact when it first comes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

import penstock
from penstock.integrations.cached import artifact_key, place_of, with_phases
from penstock.integrations.calls.exported import ExportedCall, export_call
from penstock.integrations.calls.kept_calls import KeptCalls
from penstock.integrations.calls.kinds import Call, named, refuse_grad
from penstock.integrations.cap import STEP, Cap
from penstock.integrations.collector import with_collector
from penstock.integrations.kept import KeptWeights, names_of
from penstock.integrations.libraries import EXPORTING
from penstock.integrations.progress import seconds_since, shown
from penstock.integrations.training.backward import Backward
from penstock.integrations.training.parameters import Trained
from penstock.integrations.training.saved import Saved, Values
from penstock.integrations.training.steps import Steps
from penstock.passes.building.fake_export import Built
from penstock.passes.graph.retarget import indexed
from penstock.passes.joining import join_methods
from penstock.passes.lowering.eager import LoweredProgram
from penstock.runtime.cache import Cache, Hold
from penstock.runtime.device.accelerator import find_accelerator
from penstock.runtime.device.opening import ACCELERATOR, device_kind, hardware_of
from penstock.runtime.files.artifact_files import read_seen
from penstock.runtime.files.safetensors_file import own_place, reading
from penstock.runtime.module import StreamedModule
from penstock.runtime.program import Program
from penstock.runtime.training.module import TrainingCall
from penstock.schedule.facts.catalog import part_nbytes
from penstock.schedule.facts.errors import (
    BudgetError,
    PassError,
    PayloadError,
    PlanError,
    SourceError,
    StreamError,
)
from penstock.schedule.facts.sizes import format_budget, format_size
from penstock.schedule.plan import Plan

_log = logging.getLogger(__name__)

_OTHER_RESULTS = (
    "gradients have come to values that the model returns beside its loss, or to none: there are gradients "
    "from the loss alone, or else from logits or last_hidden_state (call it without labels, and compute the "
    "loss of its logits, or apply penstock to the part that returns what you need)"
)

_MOST_METHODS = 48
"""Kinds of calls of one module. More of them mean that single sizes are exported, which never ends."""

_LOWERINGS = ("eager", "inductor")

_ROOM = 1.25
"""The memory that a plan leaves beside weights, relative to what the call takes: the next may be longer."""


@dataclass(frozen=True)
class Where:
    """The cache that artifacts are in, the device that runs them, and how they are lowered.

    Raises StreamError for a device that is not here, PassError for an unknown lowering, and for one that
    writes machine code to a cache that others write to: whoever can change code there would run it as this
    user.
    """

    cache: Cache
    device: str
    lowering: str

    def __post_init__(self) -> None:
        hardware_of(self.device)
        if device_kind(self.device) == ACCELERATOR:
            find_accelerator(self.device)
        if self.lowering not in _LOWERINGS:
            known = " or ".join(_LOWERINGS)
            raise PassError(f"there is no lowering {self.lowering!r}: choose {known}")
        if self.lowering != "eager" and (writer := self.cache.writer):
            raise PassError(
                f"others can write to the cache {self.cache.folder} ({writer}), and lowering="
                f"{self.lowering!r} runs code from there: choose another cache= or take that right "
                f"(chmod go-w {writer.path})"
            )

    @property
    def target(self) -> torch.device:
        """The device of tensors: the accelerator, or the CPU for `cpu` and the simulated device."""
        if device_kind(self.device) != ACCELERATOR:
            return torch.device("cpu")
        return indexed(torch.device(self.device))


class Component:
    """A module that is streamed when it is called.

    `check` is called before each call, and raises where the program would no longer do what the module says.
    `blank` makes a copy of the module with fake parameters, when something has to be exported, and `methods`
    says what its methods take. `weights` are what files keep of the values, and `calls` what the cache has of
    exported calls. What is put into the cache is `made_for` this module. `cap` is shared with the other
    components, which unload when this one is called. `trained` are parameters that the module keeps in
    memory, and that each call is given.
    """

    def __init__(
        self,
        name: str,
        blank: Callable[[], Built],
        weights: Sequence[KeptWeights],
        where: Where,
        cap: Cap,
        *,
        calls: KeptCalls,
        methods: Mapping[str, inspect.Signature],
        made_for: str,
        trained: Trained | None = None,
    ) -> None:
        self.name, self._made_for = name, made_for
        self._signatures = methods
        self._trained = trained
        self._steps, self._saved = Steps(name), Saved()
        self.check: Callable[[], None] = lambda: None
        self.own: Callable[[str], Any] | None = None  # the module's methods, once it is restored
        self.kept = list(weights)
        self.prepared: list[str] = []  # the kinds of calls that have a program, in words
        self._artifact: Hold | None = None
        self._blank, self._calls, self._where, self._cap = cache(blank), calls, where, cap
        self._methods: list[ExportedCall] = []
        self._stages: dict[str, int] = {}  # of kinds of calls whose sizes cannot all be open
        self._program: Program | None = None
        self._earlier: Program | None = None
        self._plan: Plan | None = None
        self._module: StreamedModule | None = None
        self._beside = self._planned = self._rehearsed = 0

    def __repr__(self) -> str:
        calls = "1 kind of call" if len(self.prepared) == 1 else f"{len(self.prepared)} kinds of calls"
        state = self._plan.residency if self._plan else "no plan yet"
        return f"Component({self.name}, {calls} exported, {state})"

    @property
    def weights(self) -> list[Path]:
        """The files that hold the values."""
        return [file for one in self.kept for file in one.files]

    @property
    def stats(self) -> Any:
        """The counters of the loaded module, or None where none is loaded."""
        return self._module.stats if self._module else None

    def read_bytes(self, *, cached: bool) -> int:
        """Bytes of weights that the program reads from files in the cache, or else from files in place.

        It is 0 where nothing is compiled yet.
        """
        if self._program is None:
            return 0
        payload, folder = self._program.payload, self._where.cache.folder.absolute()
        paths = [Path(file.path) for file in payload.files]  # a packed file's is relative
        kept = [not path.is_absolute() or path.is_relative_to(folder) for path in paths]
        return sum(e.nbytes for one in payload.storages for e in one.extents if kept[e.file] == cached)

    def call(self, entry: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module with any arguments that it takes."""
        with self._cap.lock:
            if self.own is None:
                return self._call(entry, args, kwargs)
        return self.own(entry)(*args, **kwargs)

    def _call(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.check()
        refuse_grad((args, kwargs))
        call = Call.of(entry, named(self._signatures[entry], args, kwargs))
        if self._trained is not None:
            call = self._trained.joined(call)
        method = self._method_for(call)
        if self._cap.rehearsing:
            self._rehearsed = max(self._rehearsed, method.bytes_beside(call))
            return method.returned(call, method.zeros(call))
        if method.backward is None:
            with torch.no_grad():
                module = self._loaded(method.bytes_beside(call), self._saved.nbytes())
                outputs = module.call(method.name, list(call.tensors))
        else:
            outputs = self._with_backward(method, method.backward, call)
        method.check(outputs)
        return method.returned(call, outputs)

    def _with_backward(self, method: ExportedCall, backward: Backward, call: Call) -> Sequence[torch.Tensor]:
        """Run the forward of a call; the results have a `grad_fn`, which runs the backward."""
        beside = method.bytes_beside(call)
        own: Values = frozenset()  # what this forward saves, which is counted in `beside`

        def run(name: str, leaves: Sequence[Any]) -> Any:
            nonlocal own
            with self._cap.lock:
                if self.own is not None:
                    raise StreamError(
                        f"{self.name} was restored between forward and backward: call forward again"
                    )
                module = self._loaded(beside, self._saved.nbytes(own))
                made = module.run(name, leaves)
                if name != backward.name:
                    own = self._saved.add(made[1], leaves)
                elif self._plan is not None:
                    self._steps.add(module.stats, self._plan.streamed_bytes)
                return made

        training = TrainingCall(
            backward.training, backward.training.rungs[0], run, advice=f"{self.name}: {_OTHER_RESULTS}"
        )
        outputs: Sequence[torch.Tensor] = training.result(list(call.tensors))
        return outputs

    def forget_rehearsal(self) -> None:
        """Forget the memory that calls of a failed rehearsal would have taken."""
        self._rehearsed = 0

    def prepare(self) -> None:
        """Compile and plan for the calls of a rehearsal. Raises BudgetError where they do not fit."""
        with self._cap.lock:
            beside, self._rehearsed = self._rehearsed, 0
            if self._methods:
                self._plan_for(beside)
                self._plan_ahead(beside)

    def _method_for(self, call: Call) -> ExportedCall:
        """The exported method that serves a call; a new one is exported where none does."""
        for method in self._methods:
            if method.accepts(call):
                return method
        if len(self._methods) == _MOST_METHODS:
            raise StreamError(
                f"{self.name} was called in {_MOST_METHODS} kinds and sizes that need a program each: call "
                "it with fewer kinds of arguments or with sizes that repeat, or begin again with apply or "
                "load, which forgets them"
            )
        self.refuse_lost()
        self._cap.turn(self)
        self.unload()
        with self._cap.working():
            key = self._calls.key()
            found = self._calls.find(call, key)
            method = found or self._exported(call, key)
        if found:
            _log.info("%s (%s) is in the cache, as exported before", self.name, call.title)
        self._methods.append(method)
        self.prepared.append(f"{call.entry} of {call.text}")
        self._program = self._plan = None
        return method

    def _exported(self, call: Call, key: str | None) -> ExportedCall:
        _log.info("exporting %s.%s for %s", self.name, call.entry, call.text)
        begun = monotonic()
        try:
            with EXPORTING, with_collector(), shown(f"preparing {self.name}: {call.title}"):
                made = self._calls.keep(export_call(self._blank(), call, self._stages), key)
        except PassError as error:
            if not call.tensors:
                raise StreamError(
                    f"{self.name}.{call.entry} was called without a tensor, for {call.text}: give it "
                    "tensors, such as a tokenizer or a processor makes of text and pictures"
                ) from error
            raise PassError(f"{self.name}.{call.entry} of {call.text}: {error}") from error
        _log.info("exported %s (%s) in %s", self.name, call.title, seconds_since(begun))
        return made

    def unload(self) -> None:
        """Free the arena's memory; the next call loads again."""
        module, self._module = self._module, None
        if module is not None:
            module.close()

    def let_go(self) -> None:
        """Let what is in the cache be removed. The component cannot be called any more."""
        for held in (self._artifact, *(one.hold for one in self.kept)):
            if held is not None:
                held.close()

    def refuse_lost(self) -> None:
        """Raise SourceError where a weight file is missing, before anything is given up for it."""
        for file in self.weights:
            with reading(file):
                there = file.is_file()
            if not there:
                raise SourceError(
                    f"{file} is gone, and it held the weights of {self.name}, which are not in memory: put "
                    "the file back; where that cannot be, restore() is impossible too, so load the model "
                    "again, from files that are there"
                )

    def _loaded(self, beside: int, saved: int) -> StreamedModule:
        """The loaded module, whose plan leaves `beside` bytes for the call, and others `saved`.

        Other components unload first.
        """
        if self._module is None:
            self.refuse_lost()
        self._cap.turn(self)
        plan = self._plan_for(beside, saved)
        if self._module is None:
            self._module = self._compiled().load(plan=plan, device=self._where.device)
        return self._module

    def _plan_for(self, beside: int, saved: int = 0) -> Plan:
        """The current plan, or a new one where that leaves less than `beside` bytes for the call.

        So it is with `saved`, the bytes of values that other forwards saved for their backwards. A new one is
        made too where less is left of the cap, by more than planning itself leaves in memory.
        """
        beside += saved
        if self._plan is not None and beside <= self._beside and self._planned <= self._cap.room + STEP:
            return self._plan
        begun, program = monotonic(), self._compiled()
        self.refuse_lost()
        self.unload()
        room = self._cap.room
        with self._cap.working():
            plan, budget = self._first_plan(program, self._budget(program, room, beside))
        if budget + beside > room:
            raise self._too_little(budget, beside, saved)
        if plan is None:
            with self._cap.working():
                plan = self._plan_within(program, budget)
        _log.info(
            "%s streams within %s of %s, compiled and planned in %s, arena %s%s: %s",
            self.name,
            format_size(plan.budget),
            format_budget(self._cap.nbytes),
            seconds_since(begun),
            plan.arena.backing if plan.arena.kind == "paged" else plan.arena.kind,
            f", {format_size(plan.pool.nbytes)} for experts, rows and tiles" if plan.pool else "",
            plan.hardware.note,
        )
        self._plan, self._beside = plan, room - budget
        self._planned = min(budget, program.weight_bytes) + self._beside
        return plan

    def _plan_ahead(self, beside: int) -> None:
        """Make the plan that the next process will look for: nothing that exporting left is in its room."""
        if self._cap.own:
            program = self._compiled()
            with self._cap.working():
                self._first_plan(
                    program, self._budget(program, self._cap.nbytes - self._cap.reserved, beside)
                )

    def _budget(self, program: Program, room: int, beside: int) -> int:
        """The bytes for weights in `room`, beside a call that takes `beside` bytes."""
        left = max(self._beside, int(beside * _ROOM))
        return max(room - left, min(1, program.weight_bytes))

    def _too_little(self, floor: int, beside: int, saved: int) -> BudgetError:
        """The error for a cap that has no room for the weights of one step, a call and what others saved."""
        cap = self._cap
        own = f"{format_size(cap.own)} are in use by what penstock exported and planned, " if cap.own else ""
        if cap.reserved:
            own += f"{format_size(cap.reserved)} are for trained parameters, their gradients and AdamW, "
        if saved:
            own += f"{format_size(saved)} are saved by other calls, whose backward has not come, "
        least = floor + beside + cap.own + cap.reserved
        other = "call backward() after each of them" if saved else "call it with smaller inputs"
        return BudgetError(
            f"{self.name} does not run in {format_budget(cap.nbytes)}: {own}a call takes "
            f"{format_size(beside - saved)} beside weights, and {format_size(floor)} of weights are needed "
            f"at once; give at least {format_size(least, up=True)}, or {other}",
            floor_bytes=least,
        )

    def _first_plan(self, program: Program, budget: int) -> tuple[Plan | None, int]:
        """The plan for a budget, and the budget; where that is below the floor, no plan, and the floor."""
        try:
            return self._plan_within(program, budget), budget
        except BudgetError as error:
            if error.floor_bytes is None:
                raise
            return None, error.floor_bytes

    def _plan_within(self, program: Program, budget: int) -> Plan:
        return program.plan(min(budget, program.weight_bytes), device=self._where.device)

    def _compiled(self) -> Program:
        if self._program is None:
            with EXPORTING, self._cap.working():
                self._program = self._earlier = self._compile()
        return self._program

    def _compile(self) -> Program:
        self.refuse_lost()
        cache, eager = self._where.cache, self._where.lowering == "eager"
        contents = [method.content() for method in self._methods]
        name = artifact_key(contents, self.weights, f"{self._where.lowering} {names_of(self.kept)}")
        with reading(self.weights[0] if self.weights else cache.folder):
            ctimes = {str(own_place(file)): file.stat().st_ctime_ns for file in self.weights}
        path = place_of(
            cache.programs,
            name,
            ".penstock",
            is_seen=lambda made: ctimes.items() <= read_seen(made).items(),
            is_current=partial(_is_of_its_files, trust=cache.own),
        )
        opened: list[Program] = []

        def whole() -> bool:
            with suppress(PayloadError, PlanError, SourceError):
                opened.append(penstock.open(path, trust=cache.trusts(path)))
            return bool(opened)

        self._artifact = cache.keep(path, self._made_for, lambda: self._write(path), whole=whole)
        program = opened[0] if opened else penstock.open(path, trust=cache.trusts(path))
        self._refuse_changed(program)
        if eager:  # code that Inductor compiled computes on aligned weights
            phases = {f"model.{fqn}": phase for one in self.kept for fqn, phase in one.phases.items()}
            program = with_phases(program, phases)
        program.activation_bytes = max(one.code.activations().peak() for one in self._parts)
        if eager:
            program.lowered = LoweredProgram(program.payload, {one.name: one.code for one in self._parts})
        return program

    def _refuse_changed(self, program: Program) -> None:
        """Raise SourceError where the program reads other bytes than the module had in memory."""
        known = {f"model.{fqn}": digest for one in self.kept for fqn, digest in one.digests.items()}
        for weight in program.payload.tensors:
            storage = program.payload.storages[weight.parts[0].storage]
            whole = part_nbytes(weight.parts[0]) == storage.nbytes
            if whole and storage.sha256 and known.get(weight.fqn, storage.sha256) != storage.sha256:
                path = program.payload.files[storage.extents[0].file].path
                raise SourceError(
                    f"{path} has been changed since {self.name} was loaded from it: load the model again"
                )

    @property
    def _parts(self) -> list[ExportedCall | Backward]:
        """The methods of the artifact."""
        return [part for one in self._methods for part in (one, one.backward) if part is not None]

    def _write(self, path: Path) -> Program:
        names = names_of(self.kept)
        with with_collector():
            return penstock.compile(
                join_methods({one.name: one.annotated() for one in self._parts}),
                path,
                lowering=self._where.lowering,
                weights=self.weights,
                rename=lambda fqn: names.get(own := fqn.removeprefix("model."), own),
                pack=False,
                earlier=self._earlier,
            )


def _is_of_its_files(path: Path, *, trust: bool) -> bool:
    """Whether the weight files of an artifact are those that it was made of."""
    with suppress(PayloadError, PlanError):  # a damaged artifact is written again
        try:
            penstock.open(path, trust=trust)
        except SourceError:
            return False
    return True
