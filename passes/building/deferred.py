"""Models whose parameters are initialised only when they are asked for, one part at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from penstock.passes.building.placement import OnCpu
from penstock.passes.building.recording import Recording
from penstock.passes.building.refusals import own_sentence, refuse_scripted, sentence, where
from penstock.schedule.facts.errors import PassError, PenstockError


def deferred_init(build: Callable[[], nn.Module]) -> Deferred:
    """Run a constructor without memory for its tensors, and record how it initialises each of them.

    Values that are materialised later are those that the constructor would have given with the present state
    of torch's default CPU generator; this state does not change. To make the values of one parameter, all
    numbers before them are drawn and forgotten: that takes the time of the whole model, and the memory of
    that parameter.

    Raises PassError, with the line of the model that causes it, if the constructor cannot run without memory,
    or draws from a generator of a GPU or any other than the default one.
    """
    with OnCpu():
        return record(build)


def record(build: Callable[[], nn.Module]) -> Deferred:
    """Does what `deferred_init` does; the caller's function mode handles the devices that are asked for."""
    refuse_scripted(build)
    if isinstance(build, nn.Module):
        raise PassError(
            f"expected a function that builds the model, got a {type(build).__name__} that is built: give "
            "lambda: Model(...), or export the module itself with torch.export.export"
        )
    recording = Recording()
    try:
        with recording, torch.no_grad():
            module = build()
    except PenstockError:
        raise
    except Exception as error:
        raise PassError(
            f"the model cannot be built without memory{where(error)}: {own_sentence(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise PassError(f"expected a function that returns a module, got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule):  # a scripted part of another module can be materialised
        refuse_scripted(module)
    module = _own(module)
    hold_attributes(module)
    return Deferred(module, recording)


def _own(module: nn.Module) -> nn.Module:
    """The module that a function has built, or a copy of the same tensors of one that was there before."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tensors = [tensor for part in parts for tensor in (*part.parameters(False), *part.buffers(False))]
    if all(tensor.is_meta for tensor in tensors):
        return module
    with ExitStack() as entered:
        for kind in (torch.Tensor, nn.Parameter):
            entered.enter_context(patch.object(kind, "__deepcopy__", lambda tensor, _: tensor))
        try:
            return copy.deepcopy(module)
        except Exception as error:
            raise PassError(
                f"the function returns a {type(module).__name__} that is built already and cannot be copied "
                f"({type(error).__name__}: {sentence(error)}): build the model in the function"
            ) from error


class Deferred:
    """A model built without memory: `module` has shapes only, until parts of it are materialised.

    `allocated` has the bytes, and the line of code, of each large tensor that the constructor really made.
    """

    def __init__(self, module: nn.Module, recording: Recording) -> None:
        self.module = module
        self.allocated = recording.allocated
        self._recording = recording
        self._made: dict[int, torch.Tensor] = {}

    def materialize(self, name: str = "") -> nn.Module:
        """Give the submodule `name` (the whole module by default) real parameters and buffers, and return it.

        Parts that were materialised before stay as they are, so parts may be asked for in any order, and
        again. Tied parameters stay tied. Raises PassError if there is no such submodule.
        """
        try:
            part = self.module.get_submodule(name)
        except AttributeError as error:
            raise PassError(f"there is no submodule {name!r}: {error}") from error
        for child in part.modules():
            places: Any
            for places in (child._parameters, child._buffers):
                for key, tensor in places.items():
                    if tensor is not None and tensor.is_meta:
                        places[key] = self._real(tensor)
        return part

    def materialize_slice(self, fqn: str, rows: slice) -> torch.Tensor:
        """Returns some rows of one parameter or buffer, in memory of their own; the module stays as it is.

        Only these rows are made if the constructor fills, scales and converts the parameter as a whole
        (`nn.init.uniform_`, `normal_`, `constant_` and functions built on them). Otherwise the whole
        parameter is in memory for a moment. Raises PassError for a name that is no parameter or buffer.
        """
        owner, _, key = fqn.rpartition(".")
        try:
            tensor = getattr(self.module.get_submodule(owner), key)
        except AttributeError as error:
            raise PassError(f"there is no parameter or buffer {fqn!r}: {error}") from error
        if not isinstance(tensor, torch.Tensor):
            whole = f"; materialize({fqn!r}) gives a whole module" if isinstance(tensor, nn.Module) else ""
            raise PassError(
                f"{fqn!r} is a {type(tensor).__name__}, expected the name of a parameter or buffer{whole}"
            )
        start, stop, step = rows.indices(len(tensor) if tensor.dim() else 0)
        run = self._recording.run_of_rows(tensor, start, max(start, stop)) if step > 0 else None
        return (self.values(tensor)[rows] if run is None else run[::step]).clone()

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the values of a tensor of the module, which stays as it is."""
        return self._recording.values(tensor)

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was made by the constructor."""
        return self._recording.has(tensor)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            values = self.values(tensor)
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = values
        return self._made[id(tensor)]


def join(module: str, key: str) -> str:
    """The FQN of the tensor `key` of the submodule `module`, whose name is empty for the root."""
    return f"{module}.{key}" if module else key


def hold_attributes(module: nn.Module) -> None:
    """Make buffers of the tensors that a module keeps as plain attributes, so that they are found by name."""
    for child in module.modules():
        for key, value in list(vars(child).items()):
            if isinstance(value, torch.Tensor):
                delattr(child, key)
                child.register_buffer(key, value, persistent=False)
