"""Lets Python code use fake tensors of a GPU where torch has no CUDA.

Some methods of tensors first ask the driver for the device, in C++: indexing, `contiguous` and a few more.
The operators that they call do not, so these are called instead. A device without an index means the first
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from penstock.passes.graph.retarget import device_named, indexed, is_accelerator

_aten = torch.ops.aten


class Guardless(TorchFunctionMode):
    """Active while a model of fake tensors is exported; `stand_in` maps a tensor to the one used instead."""

    def __init__(self, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = {name: self._given(value) for name, value in (kwargs or {}).items()}
        args = tuple(self._given(value) for value in args)
        if func is torch.Tensor.cuda:
            device = (args[1] if len(args) > 1 else options.get("device")) or 0
            return args[0].to(
                torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            )
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()  # export recognises this as a tensor of the parameter
        instead = _INSTEAD.get(func)
        if instead is not None and args[0].device.type != "cpu":
            return instead(*args, **options)
        return func(*args, **options)

    def _given(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._given, value))
        return _with_index(value)


@contextmanager
def capable() -> Iterator[None]:
    """Where torch has no GPU, models that ask for a GPU's capability get that of a recent one."""
    if torch.cuda.is_available():
        yield
        return
    with patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        yield


def _with_index(value: Any) -> Any:
    device = device_named(value)
    return indexed(device) if device and is_accelerator(device) else value


def get_item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`, computed by the operators that Python's indexing calls."""
    viewed, tensors = _view(tensor, index)
    return _aten.index.Tensor(viewed, tensors) if tensors else viewed


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = value`, computed by the operators that Python's indexing calls."""
    viewed, tensors = _view(tensor, index)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if tensors:
        _aten.index_put_.default(viewed, tensors, value)
    else:
        _aten.copy_.default(viewed, value)


def _view(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Apply the numbers, slices and None of an index to a tensor.

    Returns the resulting view, and the tensors of the index, at the positions of their dimensions in it.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    items = [
        torch.tensor(index_item, device=tensor.device) if isinstance(index_item, list) else index_item
        for index_item in items
    ]
    filled = tensor.dim() - sum(map(_dimensions, items))  # the dimensions that an ellipsis stands for
    tensors: list[torch.Tensor | None] = []
    dimension = 0
    for index_item in items:
        if index_item is Ellipsis:
            dimension += filled
        elif index_item is None:
            tensor, dimension = _aten.unsqueeze.default(tensor, dimension), dimension + 1
        elif isinstance(index_item, slice):
            if index_item != slice(None):
                tensor = _aten.slice.Tensor(
                    tensor, dimension, index_item.start, index_item.stop, index_item.step or 1
                )
            dimension += 1
        elif isinstance(index_item, torch.Tensor):
            tensors += [None] * (dimension - len(tensors)) + [index_item]
            dimension += _dimensions(index_item)
        else:
            tensor = _aten.select.int(tensor, dimension, index_item)
    return tensor, tensors


def _dimensions(index_item: Any) -> int:
    """The number of a tensor's dimensions that an item of its index takes."""
    if index_item is None or index_item is Ellipsis:
        return 0
    if isinstance(index_item, torch.Tensor) and index_item.dtype in (torch.bool, torch.uint8):
        return index_item.dim()
    return 1


def _contiguous(tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return _aten.contiguous.default(tensor, memory_format=memory_format)


_INSTEAD: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__getitem__: get_item,
    torch.Tensor.__setitem__: set_item,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.copy_: _aten.copy_.default,
    torch.Tensor.__invert__: _aten.bitwise_not.default,
}
