"""Calls whose units do not fit into memory together: the operator runs in rounds, each with some of the
units.

Every element of the result is computed as one call computes it: rows of a table are copied, rows of a product
by experts depend on one expert only, and tiles are certified (`runtime/sparse/trust.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from penstock.passes.sparse.contracts import Arguments, Contract
from penstock.schedule.facts.errors import StreamError

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Rounds:
    """The units of each round, ascending within and across rounds, and how to have them in memory.

    A unit is a run of `slices` slices of the weight.
    """

    parts: Sequence[Sequence[int]]
    hold: Callable[[Sequence[int]], AbstractContextManager[None]]
    slices: int = 1


def run_in_rounds(
    contract: Contract, operator: Operator, arguments: Arguments, rounds: Rounds
) -> torch.Tensor:
    """Runs an operator once for each round, while the units of the round are held."""
    if contract.index is None:
        return _by_tiles(operator, arguments, rounds)
    run = _by_ends if contract.ends else _by_numbers
    return run(contract, operator, arguments, rounds)


def _by_tiles(operator: Operator, arguments: Arguments, rounds: Rounds) -> torch.Tensor:
    rows, weight, *biases = arguments
    result = None
    for part in rounds.parts:
        own_rows = slice(part[0] * rounds.slices, (part[-1] + 1) * rounds.slices)
        with rounds.hold(part):
            computed = operator(rows, weight[own_rows], *(None if b is None else b[own_rows] for b in biases))
        if result is None:
            result = computed.new_empty((*computed.shape[:-1], weight.shape[0]))
        result[..., own_rows] = computed
        del computed  # before the next round takes memory
    assert result is not None, "there are two rounds or more"
    return result


def _by_ends(contract: Contract, operator: Operator, arguments: Arguments, rounds: Rounds) -> torch.Tensor:
    weight, ends = contract.operands(arguments)
    rows, result = arguments[contract.rows], None
    at, parts = ends.tolist(), rounds.parts
    if [*at, rows.shape[0]] != sorted([0, *at, rows.shape[0]])[1:]:
        raise StreamError(
            f"the ends of the experts' rows do not ascend from 0 to {rows.shape[0]}: {at[:8]}; such a call "
            "cannot run in rounds: give a budget that holds all experts that a call asks for"
        )
    for k, part in enumerate(parts):
        first = part[0] if k else 0
        stop = part[-1] + 1 if k + 1 < len(parts) else weight.shape[0]
        start = at[first - 1] if first else 0
        end = at[stop - 1] if k + 1 < len(parts) else rows.shape[0]
        narrowed = contract.narrowed(arguments, slice(first, stop), slice(start, end))
        with rounds.hold(part):
            computed = operator(*narrowed)
        if result is None:  # rows may be longer in memory than they are wide
            shape = (rows.shape[0], computed.shape[1])
            result = computed.new_empty_strided(shape, computed.stride())
        result[start:end] = computed
        del computed  # before the next round takes memory
    assert result is not None, "there are two rounds or more"
    return result


def _by_numbers(contract: Contract, operator: Operator, arguments: Arguments, rounds: Rounds) -> torch.Tensor:
    weight, index = contract.operands(arguments)
    flat = index.reshape(-1)
    numbers = torch.where(flat < 0, flat + weight.shape[0], flat) if contract.wraps else flat
    beyond = flat[(numbers < 0) | (numbers >= weight.shape[0])]
    if beyond.numel():
        operator(*contract.replaced(arguments, weight, beyond))  # which refuses them
    result: torch.Tensor = weight.new_empty((flat.numel(), *weight.shape[1:]))
    for part in rounds.parts:
        first, stop = part[0] * rounds.slices, (part[-1] + 1) * rounds.slices
        places = torch.nonzero((numbers >= first) & (numbers < stop)).reshape(-1)
        with rounds.hold(part):
            result[places] = operator(*contract.replaced(arguments, weight, flat[places]))
    return result.reshape(*index.shape, *weight.shape[1:])
