"""The program that was exported for one kind of call of a module, and what it assumes of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from penstock.integrations.calls.arguments import Builder, Collector
from penstock.integrations.calls.assumptions import Assumptions, truth_of
from penstock.integrations.calls.isolation import empty_caches, watch_memory
from penstock.integrations.calls.kinds import Call, Result, method_of
from penstock.integrations.libraries import as_when_called
from penstock.passes.activations import Activations
from penstock.passes.building.fake_export import Built
from penstock.passes.calls.checks import InputChecks
from penstock.passes.calls.inputs import guards_of, leaves_of
from penstock.passes.graph.nodes import size_at
from penstock.passes.weights.subclasses import with_plain_parts
from penstock.schedule.facts.errors import PassError, StreamError

_MOST_ANSWERS = 24
"""How often a call is exported until it decides what was assumed."""


@dataclass(frozen=True)
class ExportedCall:
    """A program that serves one kind of call."""

    name: str
    kind: tuple[object, ...]
    exported: ExportedProgram
    checks: InputChecks
    result: Result
    activations: Activations
    truth: Callable[[Sequence[torch.Tensor]], tuple[bool, ...]] | None
    """What the values of a call's tensors decide; None where that needs weights."""

    @classmethod
    def of(cls, name: str, model: Built, call: Call) -> ExportedCall:
        """Export a model for a call, and again until the assumptions are what the call decides.

        Raises PassError for what cannot be exported.
        """
        known: tuple[bool, ...] = ()
        for _ in range(_MOST_ANSWERS):
            method = cls._assuming(known, name, model, call)
            known = method.decided(call)
            if known == method.assumed:
                return method
        raise PassError("what its masks hide changes with every answer: call it without masks")

    @classmethod
    def _assuming(cls, known: Sequence[bool], name: str, model: Built, call: Call) -> ExportedCall:
        results: list[Result] = []
        flat = _Flat(model.module, call, known, results.append).eval()
        sizes = [{d: Dim.AUTO for d, n in enumerate(t.shape) if n > 1} for t in call.tensors]
        with empty_caches(model.module):
            exported = with_plain_parts(model.export(([*call.tensors],), (sizes,), module=flat))
        if names := results[-1].remembered:
            raise PassError(
                f"the {type(model.module).__name__} remembers something of a call ({', '.join(names[:3])}), "
                "which a program cannot: it cannot be streamed as it is"
            )
        return cls(
            name,
            call.kind,
            exported,
            InputChecks(leaves_of(exported), guards_of(exported)),
            results[-1],
            Activations.of(exported),
            truth_of(exported, len(results[-1].decisions.answers)),
        )

    @property
    def assumed(self) -> tuple[bool, ...]:
        """The assumptions with which it was exported, in the order of the questions."""
        return tuple(self.result.decisions.answers)

    def decided(self, call: Call) -> tuple[bool, ...]:
        """What a call's tensors decide of them; where weights would be needed, the assumptions themselves."""
        return self.assumed if self.truth is None else self.truth(call.tensors)

    def accepts(self, call: Call) -> bool:
        """Whether the program computes what the model would for this call."""
        if self.kind != call.kind:
            return False
        try:
            self.checks.check(list(call.tensors))
        except StreamError:
            return False
        return self.decided(call) == self.assumed

    def bytes_beside(self, call: Call) -> int:
        """The bytes that a call takes beside weights: its inputs, and the peak of intermediate values."""
        return self.activations.peak(self.checks.check(list(call.tensors))) + call.nbytes

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
        nodes: Any = self.exported.graph_module.graph.output_node().args[0]
        outputs = [_zeros(node.meta["val"], sizes) for node in nodes]
        first = len(outputs) - len(self.assumed)
        return outputs[:first] + [torch.tensor(answer) for answer in self.assumed]

    def returned(self, call: Call, outputs: Sequence[torch.Tensor]) -> Any:
        """The model's return value, made of the program's outputs; the call's states are updated."""
        builder = Builder(outputs, call.tensors, call.states)
        output = builder.give(self.result.output)
        for target, state in zip(call.states, self.result.states, strict=True):
            builder.update(target, state)
        return output


class _Flat(nn.Module):
    """A module as a function of a list of tensors, for one kind of call.

    `record` is given what the module returned, because export drops attributes that a module sets while it
    runs.
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
        decisions = Assumptions(self._known, self._call.full_masks)
        with as_when_called(decisions), watch_memory(self.model) as remembered:
            output = method_of(self.model, self._call.entry)(**arguments)
        collector = Collector(tensors, builder.states)
        tree = collector.take(output)
        states = tuple(collector.state(one) for one in builder.states)
        self._record(Result(tree, states, decisions, remembered))
        return [*collector.tensors, *decisions.tensors]


def _zeros(like: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    shape, strides = ([size_at(n, sizes) for n in of] for of in (like.shape, like.stride()))
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device).zero_()
