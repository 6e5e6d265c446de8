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
from penstock.passes.calls.checks import Dimension
from penstock.passes.calls.inputs import dimension_of, user_placeholders
from penstock.passes.calls.signature import output_names, signature_of
from penstock.passes.graph.nodes import tensors_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.lowering.method_code import MethodCode, method_code
from penstock.passes.training.facts import Training
from penstock.passes.training.halves import divide
from penstock.schedule.facts.errors import PassError

Size = int | Dimension

_LOSSES = "loss", "logits", "last_hidden_state"
"""What a model returns that gradients come from: the first of these that it has."""


@dataclass(frozen=True)
class Backward:
    """The backward of an exported call: its method, and what joins it to the forward.

    `kept` are the bytes of what the forward keeps for it, and `activations` those that it takes itself, for
    the sizes of the forward's call.
    """

    name: str
    training: Training
    code: MethodCode
    kept: tuple[Size, ...]
    activations: Activations
    annotated: Callable[[], Annotated]

    def peak(self, sizes: Mapping[str, int]) -> int:
        """The most bytes beside weights while it runs."""
        return sum(_at(one, sizes) for one in self.kept) + self.activations.peak(sizes)


def differentiate(
    exported: ExportedProgram, name: str, trained: int, output: Tree
) -> tuple[ExportedProgram, Backward]:
    """The forward of a program, and its backward, for the gradients of the last `trained` of its inputs.

    Raises PassError where the model writes to a buffer, or autograd cannot trace the program.
    """
    inputs = [node.name for node in user_placeholders(exported)][-trained:]
    halves = divide(exported, (), _losses(exported, output), inputs=inputs)
    written = [spec.target for spec in halves.forward.graph_signature.output_specs if spec.target is not None]
    if written:
        raise PassError(
            f"in training mode the model writes to its buffer {written[0]}, which only its program would "
            "see: put that part into eval mode"
        )
    returned: Any = halves.forward.graph.output_node().args[0]
    kept = returned[len(halves.training.results) :]
    storages = {s: one for node in kept for one in tensors_of(node.meta["val"]) for s in storages_of(one)}
    sizes: list[Any] = [one.untyped_storage().nbytes() for one in storages.values()]
    (backward,) = halves.backwards
    (facts,) = halves.training.backwards
    own = f"{name}_backward"
    return halves.forward, Backward(
        own,
        replace(halves.training, backwards=(replace(facts, method=own),)),
        method_code(backward),
        tuple(size if isinstance(size, int) else dimension_of(halves.forward, size) for size in sizes),
        Activations.of(halves.forward, backward.graph_module),
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


def _at(size: Size, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    value = size.value(sizes)
    return size.example if value is None else int(value)
