"""Traces batch norms with the strides that their kernels on a CPU give results.

torch's fakes lay a result out as the operand lies. The kernels make it contiguous, in channels-last order
where the operand is, and the operators that follow choose their own kernels by that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_OPERANDS = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten._native_batch_norm_legit_no_training.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}
"""The operators whose first result lies as the kernel has it, and the position of its operand."""


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Within the body, fake batch norms have the strides of the kernels on a CPU."""
    right = {
        operator: _with_strides(decomposition_table[operator], position)
        for operator, position in _OPERANDS.items()
        if operator in decomposition_table
    }
    with patch.dict(decomposition_table, right):
        _forget()
        try:
            yield
        finally:
            _forget()


def _with_strides(fake: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(fake)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        first, *results = fake(*args, **kwargs)
        operand: torch.Tensor = args[position]
        if first is not None and operand.device.type == "cpu":
            first = first.contiguous(memory_format=suggest_memory_format(operand))
        return (first, *results)

    return laid_out


def _forget() -> None:
    """Drop what torch remembers of these fakes."""
    for key in [key for key in FakeTensorMode.cache if key.key[0] in _OPERANDS]:
        del FakeTensorMode.cache[key]
