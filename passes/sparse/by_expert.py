"""A product by experts whose weights are computed from others: one expert at a time, from its own slices.

A quantised stack of experts is multiplied as a stack of floating-point numbers that operators compute of it.
Each slice of that depends on one slice of the quantised stack, so that an expert can be computed, multiplied
with its rows and forgotten before the next one.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor

from penstock.schedule.facts.errors import StreamError

FIRST = 2
"""The number of the operator's argument that is the first input of its body."""


class ByExpert(HigherOrderOperator):
    """Runs a body once for each expert that has rows, and puts the results together.

    The body takes `rows`, `weight`, `ends` and `others`, computes a stack from `weight`, and multiplies each
    run of rows, which ends at `ends[k]`, with slice k of that stack. The first `sliced` of the others have a
    slice for each of the weight's. For an expert the body is given its rows, and single slices.

    Devices other than a CPU, whose products have not been tried on single experts, run the body once, on all.
    """

    def __init__(self) -> None:
        super().__init__("penstock_by_expert")  # type: ignore[no-untyped-call]

    def __call__(
        self,
        body: fx.GraphModule,
        sliced: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        *operands: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(rows, FakeTensor) or rows.device.type != "cpu":
            whole: torch.Tensor = body.forward(rows, weight, ends, *operands)
            return whole
        at = [0, *ends.tolist()]
        if at != sorted(at) or at[-1] > rows.shape[0]:
            raise StreamError(
                f"the ends of the experts' rows do not ascend from 0 to {rows.shape[0]}: {at[1:9]}; experts "
                "that are computed one after another need the runs of their rows in order"
            )

        def run(k: int, own_rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            expert, shared = slice(k, k + 1), operands[sliced:]
            end = torch.full_like(ends[expert], own_rows.shape[0])
            computed: torch.Tensor = body.forward(
                own_rows, of, end, *(x[expert] for x in operands[:sliced]), *shared
            )
            return computed

        result: torch.Tensor | None = None
        for k, (start, end) in enumerate(pairwise(at)):
            if start < end:
                product = run(k, rows[start:end], weight[k : k + 1])
                if result is None:
                    result = _like(product, rows.shape[0])
                result[start:end] = product
                del product  # before the next expert takes memory
        if result is None:  # no expert has rows, and of none a byte may be read
            nothing = weight.new_zeros(()).expand_as(weight[:1])
            result = _like(run(0, rows[:0], nothing), rows.shape[0])
        result[at[-1] :] = 0
        return result


def _like(product: torch.Tensor, count: int) -> torch.Tensor:
    """Memory for `count` rows, which may be longer there than they are wide, as those that were made."""
    return product.new_empty_strided((count, product.shape[1]), product.stride())


def _register() -> None:
    """Declares the operator once a process, however often this module is imported."""
    if not hasattr(torch.ops.higher_order, "penstock_by_expert"):
        ByExpert()


_register()

BY_EXPERT = torch.ops.higher_order.penstock_by_expert
