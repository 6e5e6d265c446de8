"""The backward of an exported call, and the program of its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.integrations.calls.arguments import Collected, Tree
from penstock.passes.activations import Activations
from penstock.passes.annotate import Annotated, annotate_with_values
from penstock.passes.calls.inputs import user_placeholders
from penstock.passes.calls.signature import output_names, signature_of
from penstock.passes.lowering.method_code import MethodCode, method_code
from penstock.passes.training.facts import Keeping, Training
from penstock.passes.training.halves import divide
from penstock.schedule.facts.errors import PassError

_LOSSES = "loss", "logits", "last_hidden_state"
"""What a model returns that gradients come from: the first of these that it has."""


@dataclass(frozen=True)
class Backward:
    """The backward of an exported call: its method, and what joins it to the forward.

    `activations` are the bytes of what it takes, and of what the forward keeps for it, for the sizes of the
    forward's call.
    """

    name: str
    training: Training
    code: MethodCode
    activations: Activations
    annotated: Callable[[], Annotated]


def differentiate(
    exported: ExportedProgram, name: str, trained: int, output: Tree, keeps: Keeping
) -> tuple[ExportedProgram, Backward]:
    """The forward of a program, and its backward, for the gradients of the last `trained` of its inputs.

    `keeps` says what the forward keeps for the backward. Raises PassError where the model writes to a buffer,
    or autograd cannot trace the program.
    """
    inputs = [node.name for node in user_placeholders(exported)][-trained:]
    halves = divide(exported, (), _losses(exported, output), inputs, (keeps,))
    written = [spec.target for spec in halves.forward.graph_signature.output_specs if spec.target is not None]
    if written:
        raise PassError(
            f"in training mode the model writes to its buffer {written[0]}, which only its program would "
            "see: put that part into eval mode"
        )
    (backward,), own, (rung,) = halves.backwards, f"{name}_backward", halves.training.rungs
    (facts,) = rung.backwards
    rung = replace(rung, forward=name, backwards=(replace(facts, method=own),))
    training = replace(halves.training, rungs=(rung,))
    return halves.forward, Backward(
        own,
        training,
        method_code(backward),
        Activations.of(backward, backward.graph_module, training.made(own)),
        lambda: annotate_with_values({own: backward}),
    )


def _losses(exported: ExportedProgram, output: Tree) -> Sequence[str] | None:
    """The names of the results that gradients come from; None to leave that to the program."""
    names = output_names(signature_of(exported))
    made = torch.utils._pytree.tree_unflatten(list(output.leaves), output.spec)
    held: Mapping[str, Any] = made if isinstance(made, Mapping) else {}
    for name in _LOSSES:
        if isinstance(leaf := held.get(name), Collected):
            return [names[leaf.index]]
    return None
