"""Traces products of groups of rows, which mixtures of experts compute, in the dtypes of their kernels.

torch's fake of `_grouped_mm` takes bfloat16 alone. Its kernel on a CPU takes float32 and float16 as well, and
gives each row of its result a multiple of 16 bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._meta_registrations as meta

_CHECKED = "_meta_grouped_mm_common"
"""The function of torch that checks the operands and makes the result."""

_LOCK = threading.RLock()
"""Held while torch's function is replaced."""

_ROW = 16
"""Bytes of which the length of a row is a multiple."""


@contextmanager
def groups_of_any_dtype() -> Iterator[None]:
    """Within the body, fake products of groups take float32 and float16, too."""
    checked = getattr(meta, _CHECKED, None)  # not in every version of torch
    if checked is None:
        yield
        return

    def lenient(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = left.dtype
        if dtype not in (torch.float32, torch.float16) or right.dtype != dtype:
            product: torch.Tensor = checked(left, right, *args, **kwargs)
            return product
        product = checked(left.to(torch.bfloat16), right.to(torch.bfloat16), *args, **kwargs)
        if dtype == torch.float16:
            return product.to(dtype)
        *outer, rows, length = product.shape
        step = _ROW // dtype.itemsize
        width = (length + step - 1) // step * step
        strides = ([rows * width] if outer else []) + [width, 1]
        return torch.empty_strided(product.shape, strides, dtype=dtype, device=product.device)

    with _LOCK, patch.object(meta, _CHECKED, lenient):
        yield
