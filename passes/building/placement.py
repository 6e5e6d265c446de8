"""The device that each tensor of a module is meant for, by its constructor or by patterns of FQNs."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.passes.building.refusals import caller
from penstock.passes.graph.retarget import device_named, indexed, is_accelerator
from penstock.schedule.facts.errors import PassError

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
    """The device of every parameter and buffer, by each of its names.

    Raises PassError for a pattern that matches nothing, or a name that two patterns match.
    """
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
