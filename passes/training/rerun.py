"""The operators of a backward by segments: the state of random numbers, and a segment's gradients.

A segment's gradients are autograd's: the segment is computed again from what entered it, with gradients on,
and `torch.autograd.grad` goes back through it. A graph keeps the segment as a body, like a branch of control
flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

STATE_BYTES = torch.Generator().get_state().numel()


class SegmentGradients(HigherOrderOperator):
    """The gradients of a segment's inputs, given those of its outputs.

    `wanted` are the numbers of inputs whose gradients are returned, and `reached` those of outputs that have
    one. Later segments have contributed to the gradients of the inputs `begun`. Behind these stand, in
    this order, the state of random numbers if the segment is `random`, the gradients of outputs, those begun,
    and the inputs of the body. A gradient is None where autograd has none.
    """

    is_recorded = True
    """The body runs again, and autograd holds all that it computes."""

    def __init__(self) -> None:
        super().__init__("penstock_segment_gradients")  # type: ignore[no-untyped-call]

    def __call__(
        self,
        body: fx.GraphModule,
        wanted: Sequence[int],
        reached: Sequence[int],
        begun: Sequence[int],
        random: bool,
        *operands: Any,
    ) -> tuple[Any, ...]:
        split = [int(random), len(reached), len(begun)]
        ends = [sum(split[: k + 1]) for k in range(3)]
        state, tangents, sums = operands[: ends[0]], operands[ends[0] : ends[1]], operands[ends[1] : ends[2]]
        inputs = list(operands[ends[2] :])
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(inputs)):
            return tuple(torch.empty_like(inputs[k]) for k in wanted)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        for k in wanted:
            inputs[k] = inputs[k].detach().requires_grad_()
        with torch.enable_grad(), _drawing_from(*state):
            outputs = body.forward(*inputs)
        values = [outputs[k] for k in reached] + [inputs[k] for k in begun]
        # An input's own gradient enters first, as autograd adds what its last reader gives before the others.
        pairs = [
            (value, tangent)
            for value, tangent in zip(values, (*tangents, *sums), strict=True)
            if tangent is not None and value.requires_grad
        ]
        if not pairs:
            return (None,) * len(wanted)
        gradients = torch.autograd.grad(
            [value for value, _ in pairs],
            [inputs[k] for k in wanted],
            [tangent for _, tangent in pairs],
            allow_unused=True,
        )
        return tuple(_own(gradient, tensors) for gradient in gradients)


def _own(gradient: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A gradient that is no view of what the segment was given, such as a weight that is about to leave."""
    if gradient is None:
        return None
    memory = gradient.untyped_storage().data_ptr()
    shared = any(tensor.untyped_storage().data_ptr() == memory for tensor in inputs)
    return gradient.clone() if shared else gradient


@contextmanager
def _drawing_from(*states: torch.Tensor) -> Iterator[None]:
    """Has random numbers drawn from a state of the CPU's generator, which is put back afterwards."""
    if not states:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(states[0])
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def _like_a_state() -> torch.Tensor:
    return torch.empty(STATE_BYTES, dtype=torch.uint8)


def _register() -> Any:
    """Declares the operators once a process, however often this module is imported."""
    if hasattr(torch.ops.penstock, "random_state"):
        return None
    library: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("random_state() -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("random_state", torch.default_generator.get_state, "CompositeExplicitAutograd")
    torch.library.register_fake("penstock::random_state", _like_a_state, lib=library)
    SegmentGradients()
    return library


_LIBRARY = _register() or globals().get("_LIBRARY")

RANDOM_STATE = torch.ops.penstock.random_state.default
SEGMENT_GRADIENTS = torch.ops.higher_order.penstock_segment_gradients
