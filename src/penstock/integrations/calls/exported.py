"""The program that was exported for one kind of call of a module, and what it assumes of calls."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from penstock.integrations.calls.arguments import Builder, Collector, State, Tree
from penstock.integrations.calls.assumptions import Assumptions, truth_of
from penstock.integrations.calls.isolation import RememberedError, watch_memory
from penstock.integrations.calls.kinds import Call, method_of
from penstock.integrations.calls.modes import FastPathError, modes_of_call
from penstock.integrations.calls.stages import Stage, stages_of, within
from penstock.integrations.calls.values import Values, has_values, known_in_trace, with_values
from penstock.integrations.libraries import as_when_called
from penstock.integrations.training.backward import Backward, differentiate
from penstock.integrations.training.parameters import given, in_modes
from penstock.passes.activations import Activations
from penstock.passes.annotate import Annotated, annotate_with_values
from penstock.passes.building.caches import empty_caches
from penstock.passes.building.fake_export import Built, with_computed_buffers
from penstock.passes.calls.checks import Dimension, InputChecks
from penstock.passes.calls.inputs import dimension_of, guards_of
from penstock.passes.lowering.method_code import MethodCode, method_code
from penstock.passes.sparse.chains import by_expert
from penstock.passes.training.own_gradients import refused_own_gradients
from penstock.passes.weights.lifted import with_named_constants
from penstock.passes.weights.subclasses import with_plain_parts
from penstock.passes.weights.values import has_values as holds_values
from penstock.passes.weights.values import storage_bytes
from penstock.runtime.sparse.trial import reads_units_only
from penstock.schedule.facts.errors import PassError, StreamError

_log = logging.getLogger(__name__)

Size = int | Dimension

_MOST_ANSWERS = 24
"""How often a call is exported until it decides what was assumed."""


@dataclass(frozen=True)
class Result:
    """What a call returned and left in the states that it was given, and what it assumed of its tensors.

    `values` are those of tensors which have no others in any call that the program serves, and `grad` is the
    grad mode of these calls where the model asked for it; None where it did not.
    """

    output: Tree
    states: tuple[State, ...]
    assumed: tuple[bool, ...]
    values: Values = ()
    grad: bool | None = None


@dataclass(frozen=True)
class Output:
    """What a tensor that a program returns looks like."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]

    def zeros(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """Zeros of the sizes of a call. Raises PassError where a size depends on values."""
        shape, stride = ([_at(n, sizes) for n in of] for of in (self.shape, self.stride))
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device).zero_()


@dataclass(frozen=True)
class ExportedCall:
    """A program that serves one kind of call: how it is called, and what runs of it.

    `truth` computes what the values of a call's tensors decide; None where that needs weights, or nothing
    is decided. `annotated()` is the program as facts, of which an artifact is made, and `content()` a hash of
    all that it computes. A call with gradients has a `backward`, and the program is its forward.
    """

    name: str
    kind: str
    result: Result
    outputs: tuple[Output, ...]
    truth: fx.GraphModule | None
    code: MethodCode
    annotated: Callable[[], Annotated]
    content: Callable[[], str]
    backward: Backward | None = None

    @property
    def assumed(self) -> tuple[bool, ...]:
        """The assumptions with which it was exported, in the order of the questions."""
        return self.result.assumed

    @cached_property
    def checks(self) -> InputChecks:
        """The checks of a call's tensors."""
        return InputChecks(self.code.signature.leaves, self.code.signature.guards)

    @cached_property
    def activations(self) -> Activations:
        """The memory that its intermediate values take."""
        return self.code.activations()

    def decided(self, call: Call) -> tuple[bool, ...]:
        """What a call's tensors decide of them; where weights would be needed, the assumptions themselves."""
        return _decided(self.truth, self.assumed, call)

    def accepts(self, call: Call) -> bool:
        """Whether the program computes what the model would for this call."""
        if self.kind != call.kind or self.result.grad not in (None, call.grad):
            return False
        try:
            self.checks.check(list(call.tensors))
        except StreamError:
            return False
        return has_values(call, self.result.values) and self.decided(call) == self.assumed

    def bytes_beside(self, call: Call) -> int:
        """Bytes that the call takes beside weights, for the tensors that it is given too."""
        sizes = self.checks.check(list(call.tensors))
        peaks = [self.activations.peak(sizes)]
        if self.backward is not None:
            peaks.append(self.backward.activations.peak(sizes))
        return max(peaks) + call.nbytes

    def check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise StreamError where the outputs tell that the call was not as it was assumed to be."""
        told = outputs[len(outputs) - len(self.assumed) :]
        if tuple(bool(value) for value in told) != self.assumed:
            raise StreamError(
                "the model makes a mask of its weights, or writes to one in place, and it hides something "
                "else than it did when the model was exported: this model cannot be streamed"
            )

    def zeros(self, call: Call) -> list[torch.Tensor]:
        """Zeros of the shapes of a call's outputs. Raises PassError where shapes depend on values."""
        sizes = self.checks.check(list(call.tensors))
        outputs = self.outputs[: len(self.outputs) - len(self.assumed)]
        return [one.zeros(sizes) for one in outputs] + [torch.tensor(answer) for answer in self.assumed]

    def returned(self, call: Call, outputs: Sequence[torch.Tensor]) -> Any:
        """The model's return value, made of the program's outputs; the call's states are updated."""
        builder = Builder(outputs, call.tensors, call.states)
        output = builder.give(self.result.output)
        for target, state in zip(call.states, self.result.states, strict=True):
            builder.update(target, state)
        return output


def export_call(model: Built, call: Call, needed: MutableMapping[str, int] | None = None) -> ExportedCall:
    """Export a model for a call, and again until the assumptions are what the call decides.

    Sizes stay open where they can (`stages.py`). `needed` remembers by kind of call which stage it took, so
    that a call of another size begins there. Raises PassError for what cannot be exported.
    """
    needed = {} if needed is None else needed
    stages = stages_of(call)
    known: tuple[bool, ...] = ()
    for _ in range(_MOST_ANSWERS):
        exported, result = _export_in_stages(known, model, call, stages, needed)
        own = with_named_constants(exported, _name(call, result))
        truth = truth_of(own, len(result.assumed)) if result.assumed else None
        known = _decided(truth, result.assumed, call)
        if known == result.assumed:  # most of the work comes now
            return _serving(call, own, result, truth)
    raise PassError("what its masks hide changes with every answer: call it without masks")


def _export_in_stages(
    known: Sequence[bool], model: Built, call: Call, stages: Sequence[Stage], needed: MutableMapping[str, int]
) -> tuple[ExportedProgram, Result]:
    """Export with the sizes open that can be. Raises the error of the last one where none exports."""
    for number in range(min(needed.get(call.kind, 0), len(stages) - 1), len(stages)):
        try:
            exported, result = _export(known, model, call, stages[number])
        except (RememberedError, FastPathError):
            raise
        except PassError as error:
            if number + 1 == len(stages):
                raise
            fixed = stages[number + 1].fixed
            _log.info("%s: so %s are part of the program; calls of others are exported anew", error, fixed)
            continue
        needed[call.kind] = number
        return exported, result
    raise AssertionError("there is always a stage")


def _decided(truth: fx.GraphModule | None, assumed: tuple[bool, ...], call: Call) -> tuple[bool, ...]:
    if truth is None:
        return assumed
    with torch.no_grad():
        return tuple(bool(value) for value in truth.forward(*call.tensors))


def _serving(call: Call, own: ExportedProgram, result: Result, truth: fx.GraphModule | None) -> ExportedCall:
    name = _name(call, result)
    program, backward = own, None
    if call.keeps is None:
        program = by_expert(own, reads_units_only)
    else:
        program, backward = differentiate(own, name, len(call.trained), result.output, call.keeps)
    return ExportedCall(
        name,
        call.kind,
        result,
        _outputs_of(own),
        truth,
        method_code(program),
        lambda: annotate_with_values({name: program}),
        lambda: _content(own) + (repr(backward.training) if backward else ""),
        backward,
    )


def _content(exported: ExportedProgram) -> str:
    text = exported.graph_module.print_readable(print_output=False, include_stride=True, include_device=True)
    facts = (text, exported.graph_signature, exported.range_constraints, guards_of(exported))
    digest = hashlib.sha256(repr(facts).encode())
    for name, value in with_computed_buffers(exported).constants.items():
        known = isinstance(value, torch.Tensor) and holds_values(value)
        digest.update(f"{name} {storage_bytes(value).tolist() if known else value!r}".encode())
    return digest.hexdigest()


def _name(call: Call, result: Result) -> str:
    """An identifier that no other program for calls of the module has."""
    facts = (
        call.kind,
        [tuple(tensor.shape) for tensor in call.tensors],
        result.assumed,
        result.values,
        result.grad,
    )
    return f"call_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _export(known: Sequence[bool], model: Built, call: Call, stage: Stage) -> tuple[ExportedProgram, Result]:
    """Export a model for a call with the answers to its first questions that are `known`."""
    made: list[tuple[Result, list[str]]] = []
    flat = _Flat(model.module, call, stage.values, known, lambda *result: made.append(result)).eval()
    beside = known_in_trace(model.module, stage.values)
    gradients = refused_own_gradients() if call.keeps else nullcontext()
    with empty_caches(model.module), within(stage.limit_s), beside, gradients:
        exported = with_plain_parts(model.export(([*call.tensors],), ([*stage.sizes],), module=flat))
    result, remembered = made[-1]
    if remembered:
        raise RememberedError(
            f"the {type(model.module).__name__} remembers something of a call ({', '.join(remembered[:3])}), "
            "which a program cannot: give it to the model as an argument and return it, or apply penstock to "
            "the parts of the model that remember nothing"
        )
    return exported, result


class _Flat(nn.Module):
    """A module as a function of a list of tensors, for one kind of call.

    `record` is given what the module returned, because export drops attributes that a module sets while it
    runs, and the names of what it remembers of the call.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        values: Values,
        known: Sequence[bool],
        record: Callable[[Result, list[str]], None],
    ) -> None:
        super().__init__()
        self.model = model
        self._call, self._values, self._known, self._record = call, values, known, record

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        call, known = self._call, with_values(tensors, self._values)
        builder = Builder(known)
        arguments = builder.give(call.tree)
        decisions = Assumptions(self._known, call.full_masks)
        with (
            as_when_called(decisions),
            given(self.model, call.trained, known[len(known) - len(call.trained) :]),
            in_modes(self.model, call.modes, call.settings),
            watch_memory(self.model) as remembered,
            modes_of_call(call.grad, call.keeps is not None) as mode,
        ):
            output = method_of(self.model, call.entry)(**arguments)
        collector = Collector(tensors, builder.states)
        tree = collector.take(output)
        states = tuple(collector.state(one) for one in builder.states)
        grad = call.grad if mode.asked else None
        self._record(Result(tree, states, tuple(decisions.answers), self._values, grad), remembered)
        return [*collector.tensors, *decisions.tensors]


def _outputs_of(exported: ExportedProgram) -> tuple[Output, ...]:
    known: dict[str, Dimension] = {}

    def size(n: int | torch.SymInt) -> Size:
        if isinstance(n, int):
            return n
        text = str(n.node.expr)
        if text not in known:
            known[text] = dimension_of(exported, n)
        return known[text]

    nodes: Any = exported.graph_module.graph.output_node().args[0]
    values = [node.meta["val"] for node in nodes]
    return tuple(
        Output(one.dtype, one.device, tuple(map(size, one.shape)), tuple(map(size, one.stride())))
        for one in values
    )


def _at(size: Size, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    value = size.value(sizes)
    if value is None:
        unknown = ", ".join(symbol for symbol in size.symbols if symbol not in sizes)
        raise PassError(f"a size, {size.text}, depends on values that are not known ({unknown})")
    return int(value)
