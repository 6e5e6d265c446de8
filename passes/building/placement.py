"""The device that each tensor of a module is meant for, and Python code on fakes of a GPU without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.passes.building.refusals import caller
from penstock.passes.graph.nodes import device_named, indexed, is_accelerator
from penstock.schedule.facts.errors import PassError

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
    """Apply an index to a tensor; return the view, and the tensors of the index by dimension of the view."""
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


Placement: TypeAlias = str | torch.device | Mapping[str, str | torch.device] | None
"""One device, devices by FQN pattern (`*` for all without another match), or None for the constructor's."""

CPU = torch.device("cpu")


class AskedDevices(TorchFunctionMode):
    """Active while a constructor runs: notes the devices that it asks for, and makes all tensors on the CPU.

    A torch built without CUDA could neither make tensors on a GPU nor initialise them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[int, torch.device] = {}
        self._kept: list[torch.UntypedStorage] = []  # kept alive so that no new storage gets the same address

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return self.of(args[0])
        asked = _asked_for(func, args, options)
        if asked is None:
            result = func(*args, **options)
            # A tensor that is made from one meant for another device is meant for that device, too.
            sources = {self.of(a) for a in args if isinstance(a, torch.Tensor)} - {CPU}
            asked = sources.pop() if len(sources) == 1 else None
        else:
            args = tuple(CPU if device_named(a) and func is not torch.tensor else a for a in args)
            if func is torch.Tensor.cuda:
                return self._place(args[0], asked)
            result = func(*args, **{name: CPU if name == "device" else v for name, v in options.items()})
        return self._place(result, asked)

    def of(self, tensor: torch.Tensor) -> torch.device:
        """The device for which the constructor asked for a tensor, by default the CPU."""
        return self._asked.get(tensor.untyped_storage()._cdata, CPU)

    def _place(self, result: Any, asked: torch.device | None) -> Any:
        if asked is not None and isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            self._asked[storage._cdata] = asked
            self._kept.append(storage)
        return result


class OnCpu(TorchFunctionMode):
    """Active while a constructor runs whose exact values are needed; raises PassError for a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        asked = _asked_for(func, args, options)
        if asked is not None and is_accelerator(asked):
            raise PassError(
                f"the constructor asks for {asked}{caller()}, and values that a GPU's generator draws cannot "
                "be promised: build it on the CPU and move what is materialised, or use fake_export"
            )
        return func(*args, **options)


def _asked_for(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    if func is torch.Tensor.cuda:
        index = kwargs.get("device", args[1] if len(args) > 1 else None) or 0
        return indexed(torch.device("cuda", index) if isinstance(index, int) else torch.device(index))
    if kwargs.get("device") is not None:
        return indexed(torch.device(kwargs["device"]))
    if func is torch.Tensor.to:
        devices = [device for device in map(device_named, args[1:]) if device]
        return indexed(devices[0]) if devices else None
    return None


def place(module: nn.Module, asked: AskedDevices, placement: Placement) -> dict[str, torch.device]:
    """The device of each tensor by name. Raises PassError for a pattern without a match, or two for one."""
    tensors = {
        name: tensor
        for named_tensors in (
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named_tensors
    }
    if placement is None:
        return {name: asked.of(tensor) for name, tensor in tensors.items()}
    if isinstance(placement, str | torch.device):
        placement = {"*": placement}
    devices = {pattern: _device(name) for pattern, name in placement.items()}
    chosen: dict[str, torch.device] = {}
    for pattern in devices:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in tensors):
            names = ", ".join(list(tensors)[:3])
            raise PassError(f"the placement pattern {pattern!r} matches nothing; there are {names}, ...")
    for name, tensor in tensors.items():
        matching = [pattern for pattern in devices if pattern != "*" and fnmatchcase(name, pattern)]
        if len(matching) > 1:
            raise PassError(f"the placement patterns {matching} both match {name}: make them apart")
        default = devices.get("*", asked.of(tensor))
        chosen[name] = devices[matching[0]] if matching else default
    return chosen


def home_of(placement: Placement, devices: Mapping[str, torch.device]) -> torch.device:
    """The device that inputs are taken to be on: the default of a placement, or the first parameter's."""
    if isinstance(placement, str | torch.device):
        return _device(placement)
    if placement is not None and "*" in placement:
        return _device(placement["*"])
    return next(iter(devices.values()), CPU)


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PassError(f"there is no device {name!r}: give cpu, cuda or cuda:1") from error
    if device.type != "cpu" and not is_accelerator(device):
        raise PassError(f"a program is not placed on {str(device)!r}: give cpu, cuda or cuda:1")
    return indexed(device)
