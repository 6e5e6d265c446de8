"""One module whose calls stream: for each kind of call, when it first comes, a method of one artifact."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

import penstock
from penstock.integrations.calls import Builder, Collector
from penstock.integrations.content_key import content_key
from penstock.integrations.decisions import Decisions, truth_of
from penstock.integrations.hollow import write_once
from penstock.integrations.kinds import Call, Result, method_of, named, refuse_grad
from penstock.integrations.libraries import as_when_called
from penstock.integrations.memory import watch_memory
from penstock.integrations.rebound import same_layout, with_other_file
from penstock.passes.activations import activation_bytes
from penstock.passes.fake_export import Built
from penstock.passes.input_checks import InputChecks
from penstock.passes.inputs import guards_of, leaves_of
from penstock.passes.lowering.eager import LoweredProgram
from penstock.passes.subclasses import with_plain_parts
from penstock.runtime.binding import Names
from penstock.runtime.device_loading import device_kind
from penstock.runtime.module import StreamedModule
from penstock.runtime.program import Program
from penstock.schedule.errors import BudgetError, PassError, StreamError
from penstock.schedule.model import Plan
from penstock.schedule.sizes import format_size

_MOST_METHODS = 24
"""Kinds of call of one module. A model with more exports for single sizes, which is no way to run it."""

_LOWERINGS = ("eager", "inductor")

_ROOM = 1.25
"""Times the memory that a call takes beside weights, which is set aside, so that the next fits as well."""


@dataclass(frozen=True)
class _Method:
    name: str
    kind: tuple[object, ...]
    exported: ExportedProgram
    checks: InputChecks
    result: Result
    per_input_byte: float
    """Bytes beside weights for each byte of inputs, as exported."""
    truth: Callable[[Sequence[torch.Tensor]], tuple[bool, ...]] | None
    """What the values of a call's tensors decide; None where that needs weights."""

    @property
    def assumed(self) -> tuple[bool, ...]:
        return tuple(self.result.decisions.answers)

    def decided(self, call: Call) -> tuple[bool, ...]:
        return self.assumed if self.truth is None else self.truth(call.tensors)

    def accepts(self, call: Call) -> bool:
        try:
            self.checks.check(list(call.tensors))
        except StreamError:
            return False
        return self.decided(call) == self.assumed

    def check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise StreamError where a call was not what it was assumed to be."""
        told = outputs[len(outputs) - len(self.assumed) :]
        if tuple(bool(value) for value in told) != self.assumed:
            raise StreamError(
                "the model makes a mask of its weights, or writes to one in place, and it hides something "
                "else than it did when the model was exported: this model cannot be streamed"
            )


class _Flat(nn.Module):
    """The module as a function of a list of tensors, for one kind of call.

    `record` is told what a call returns; export forgets what a module sets while it runs.
    """

    def __init__(
        self, model: nn.Module, call: Call, known: Sequence[bool], record: Callable[[Result], None]
    ) -> None:
        super().__init__()
        self.model = model
        self._call, self._known, self._record = call, known, record

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        builder = Builder(tensors)
        arguments = builder.give(self._call.tree)
        decisions = Decisions(self._known, self._call.full_masks)
        with as_when_called(decisions), watch_memory(self.model) as remembered:
            output = method_of(self.model, self._call.entry)(**arguments)
        collector = Collector(tensors, builder.states)
        tree = collector.take(output)
        states = tuple(collector.state(one) for one in builder.states)
        self._record(Result(tree, states, decisions, remembered))
        return [*collector.tensors, *decisions.tensors]


@dataclass(frozen=True)
class Where:
    """The folder for artifacts, the device that runs them, and how they are lowered.

    Raises StreamError for a device, PassError for a lowering that there is not.
    """

    folder: Path
    device: str
    lowering: str

    def __post_init__(self) -> None:
        if device_kind(self.device) == "cuda" and not torch.cuda.is_available():
            raise StreamError(f"there is no CUDA device here for {self.device}: use cpu or sim:rtx4090")
        if self.lowering not in _LOWERINGS:
            known = " or ".join(_LOWERINGS)
            raise PassError(f"there is no lowering {self.lowering!r}: choose {known}")

    @property
    def target(self) -> torch.device:
        """Where tensors are: the GPU, or for a CPU and the simulated device the CPU."""
        if not self.device.startswith("cuda"):
            return torch.device("cpu")
        return torch.device("cuda", torch.device(self.device).index or 0)


class Component:
    """A module that is streamed whenever it is called, after `check` has passed.

    `blank` is a copy of it with fake parameters, `weights` are the files that hold their values, under the
    names that `names` has for them, or their own. `turn` is told before each call, makes other components
    give back what they hold, and says what this one may hold.
    """

    def __init__(
        self,
        name: str,
        blank: Built,
        weights: Sequence[Path],
        where: Where,
        turn: Callable[[Component], int],
        *,
        names: Mapping[str, Names] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self._names = names
        self.check: Callable[[], None] = lambda: None
        self.weights = list(weights)
        self._blank, self._where, self._turn = blank, where, turn
        self._methods: list[_Method] = []
        self._program: Program | None = None
        self._plan: Plan | None = None
        self._module: StreamedModule | None = None
        self._beside = 0
        self._one = threading.RLock()  # two kinds of calls exported at once would get one name

    @property
    def stats(self) -> Any:
        """Of the module that is loaded now; None where there is none."""
        return self._module.stats if self._module else None

    def call(self, entry: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of the module returns for these arguments, which may be any that it takes."""
        with self._one:
            return self._call(entry, args, kwargs)

    def _call(self, entry: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.check()
        refuse_grad((args, kwargs))
        call = Call.of(entry, named(method_of(self._blank.module, entry), args, kwargs))
        method = self._method_for(call)
        with torch.no_grad():
            module = self._loaded(method, call)
            outputs = module.call(method.name, list(call.tensors))
        method.check(outputs)
        builder = Builder(outputs, call.tensors, call.states)
        output = builder.give(method.result.output)
        for target, state in zip(call.states, method.result.states, strict=True):
            builder.update(target, state)
        return output

    def _method_for(self, call: Call) -> _Method:
        """The method that serves a call, exported now where there is none."""
        for method in self._methods:
            if method.kind == call.kind and method.accepts(call):
                return method
        if len(self._methods) == _MOST_METHODS:
            raise StreamError(
                f"{self.name} was called in {_MOST_METHODS} kinds and sizes that need a program each: call "
                "it with fewer kinds of arguments, or with sizes that repeat"
            )
        method = self._export(call)
        self.unload()
        self._methods.append(method)
        self._program = self._plan = None
        return method

    def unload(self) -> None:
        """Give the arena's memory back; the next call takes it again."""
        if self._module is not None:
            self._module.close()
            self._module = None

    def swap(self, new: Path) -> None:
        """Read `new` from now on in the place of the weight file that has its layout; nothing is exported."""
        with self._one:
            self.unload()
            old = next(file for file in self.weights if same_layout(file, new))
            program = None if self._program is None else with_other_file(self._program, old, new)
            self.weights[self.weights.index(old)] = new  # from here on nothing can fail
            self._program, self._plan = program, self._plan if program else None

    def _export(self, call: Call) -> _Method:
        """The method for a call; exported again where it decides otherwise than was assumed."""
        known: tuple[bool, ...] = ()
        for _ in range(_MOST_METHODS):
            method = self._export_for(call, known)
            known = method.decided(call)
            if known == method.assumed:
                return method
        raise PassError(f"what the masks of the {self.name} hide changes with every answer: call it without")

    def _export_for(self, call: Call, known: Sequence[bool]) -> _Method:
        print(f"penstock: exporting {self.name}.{call.entry} for a new kind of call", file=sys.stderr)
        results: list[Result] = []
        flat = _Flat(self._blank.module, call, known, results.append).eval()
        sizes = [{d: Dim.AUTO for d, n in enumerate(t.shape) if n > 1} for t in call.tensors]
        exported = with_plain_parts(self._blank.export(([*call.tensors],), (sizes,), module=flat))
        if names := results[-1].remembered:
            raise PassError(
                f"the {self.name} remembers something of a call ({', '.join(names[:3])}), which a program "
                "cannot: it cannot be streamed as it is"
            )
        beside = activation_bytes(exported) + call.nbytes
        return _Method(
            f"call{len(self._methods)}",
            call.kind,
            exported,
            InputChecks(leaves_of(exported), guards_of(exported)),
            results[-1],
            beside / max(call.nbytes, 1),
            truth_of(exported, len(results[-1].decisions.answers)),
        )

    def _loaded(self, method: _Method, call: Call) -> StreamedModule:
        """The module within what is left beside this call, which other components make room for."""
        cap = self._turn(self)
        beside = int(method.per_input_byte * call.nbytes)
        if self._module is not None and beside <= self._beside:
            return self._module
        self.unload()
        if self._program is None:
            self._program = self._compile()
        if self._plan is None or beside > self._beside:
            self._beside = max(self._beside, int(beside * _ROOM))
            self._plan = self._plan_within(self._program, cap)
        self._module = self._program.load(plan=self._plan, device=self._where.device)
        return self._module

    def _plan_within(self, program: Program, cap: int) -> Plan:
        budget = min(cap - self._beside, program.weight_bytes)
        floor = program.floor(self._where.device)
        if budget < floor:
            raise BudgetError(
                f"{self.name} does not run in {format_size(cap)}: a call takes {format_size(self._beside)} "
                f"beside weights, and {format_size(floor)} of weights are needed at once; give at least "
                f"{format_size(floor + self._beside)}, or call it with smaller inputs",
                floor_bytes=floor + self._beside,
            )
        return program.plan(budget, device=self._where.device, effort=0.25)

    def _compile(self) -> Program:
        programs = {method.name: method.exported for method in self._methods}
        path = (
            self._where.folder
            / f"{content_key(programs, self.weights, f'{self._where.lowering} {self._names}')}.penstock"
        )
        write_once(path, lambda: self._write(programs, path))
        program = penstock.open(path)
        if self._where.lowering == "eager":
            program.lowered = LoweredProgram.of(program.payload, programs)  # what it would read again
        return program

    def _write(self, programs: Mapping[str, ExportedProgram], path: Path) -> Program:
        self._where.folder.mkdir(parents=True, exist_ok=True)
        return penstock.compile(
            programs,
            path,
            lowering=self._where.lowering,
            weights=self.weights,
            rename=lambda fqn: self._names.get(own := fqn.removeprefix("model."), own),
            pack=False,
        )
