"""Parameters whose values are not in memory, and which say so where torch would end the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from penstock.schedule.errors import StreamError

_FACTS = frozenset(
    {
        *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "names", "nbytes"),
        *("itemsize", "grad", "grad_fn", "_version", "_backward_hooks", "is_meta", "is_cpu", "is_cuda"),
        *("is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "output_nr"),
        *("size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "__len__"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_shared", "is_pinned"),
        *("untyped_storage", "data_ptr", "get_device", "requires_grad_", "retains_grad", "is_sparse_csr"),
    }
)
"""What a parameter can be asked without its values."""

_SETTABLE = ("requires_grad", "grad")


class AbsentParameter(nn.Parameter):
    """A parameter of a shape and no memory. StreamError for whatever would read or write its values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):
            asked, name = name, func.__self__.__name__
            name = "" if asked == "__set__" and name not in _SETTABLE else name
        if name not in _FACTS:
            absent = next(one for one in _flat(args, kwargs or {}) if isinstance(one, cls))
            raise StreamError(absent.__dict__["penstock_says"])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"a parameter of shape {tuple(self.shape)} that is not in memory"

    def __deepcopy__(self, memo: Any) -> Any:
        raise StreamError(self.__dict__["penstock_says"])


def make_absent(parameter: nn.Parameter, name: str, sentence: str) -> Callable[[], None]:
    """Let a parameter that gave its memory back say so; returns what undoes it."""
    parameter.__dict__["penstock_says"] = f"the parameter {name} is not in memory: {sentence}"
    parameter.__class__ = AbsentParameter

    def undo() -> None:
        parameter.__class__ = nn.Parameter
        parameter.__dict__.pop("penstock_says", None)

    return undo


def _flat(args: Any, kwargs: Mapping[str, Any]) -> Any:
    for one in (*args, *kwargs.values()):
        yield from _flat(one, {}) if isinstance(one, list | tuple) else (one,)
