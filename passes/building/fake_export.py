"""Exports a model that is never built: without memory for weights, initialisation or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from penstock.passes.building.deferred import Deferred, join, record
from penstock.passes.building.followed import export_as_called, in_eval
from penstock.passes.building.placement import AskedDevices, Guardless, Placement, capable, home_of, place
from penstock.passes.building.refusals import caller, check_inputs
from penstock.passes.graph.nodes import is_accelerator
from penstock.passes.graph.propagation import groups_of_any_dtype
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.pipeline import declare
from penstock.passes.weights.lifted import with_values
from penstock.passes.weights.subclasses import each_part, has_parts
from penstock.schedule.facts.errors import PassError

_lazy = partial(_use_lazy_graph_module, True)
"""Exports compile inner graphs only when they are called, which spares a quarter of a Llama's export."""

BUFFERS = "penstock.buffers"
"""The key in `graph_module.meta` under which fake_export keeps values of non-persistent buffers, by FQN."""


def fake_export(
    build: Callable[[], nn.Module],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    placement: Placement = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export the module that `build()` would return, without building it.

    Args:
        build: A function that returns the module.
        example_inputs: Positional arguments, or keyword arguments as a mapping. Only shapes and dtypes of
            tensors count; the tensors are taken to be on the device of the first parameter.
        placement: A device for all tensors, devices by FQN pattern (`{"*": "cuda:0", "head.*": "cuda:1"}`),
            or None for the devices that the constructor asks for.
        dynamic_shapes: As for `torch.export.export`.

    Returns:
        A program whose weights are fake. `bind` them to a checkpoint, or give `compile` the checkpoint.

    Raises:
        PassError: The model cannot be exported unbuilt; the message names the line of the model.

    Example:
        >>> exported = penstock.fake_export(lambda: torch.nn.Linear(64, 64), (torch.empty(2, 64),))
        >>> penstock.annotate(exported).storage_names()
        ('weight', 'bias')
    """
    with unset_fake_temporarily():  # a fake tensor mode of the caller would mix with the modes used here
        return Built.by(build, placement).export(example_inputs, dynamic_shapes)


@declare(ensures=("computed buffers",))
def with_computed_buffers(exported: ExportedProgram) -> ExportedProgram:
    """The program with the values of the buffers that its module computes, if fake_export has kept them."""
    computed = exported.graph_module.meta.get(BUFFERS)
    if not computed:
        return exported
    return with_values(exported, computed.get)


def computed_buffers(programs: Iterable[ExportedProgram]) -> set[str]:
    """The FQNs of the buffers that the programs' modules compute: torch neither saves nor loads them."""
    return {name for exported in programs for name in exported.graph_module.meta.get(BUFFERS) or ()}


class Built:
    """A module of fake tensors, the device of each, and the values of buffers that no checkpoint has."""

    def __init__(
        self,
        module: nn.Module,
        buffers: dict[str, torch.Tensor],
        devices: Mapping[str, torch.device],
        home: torch.device,
        deferred: Deferred,
    ) -> None:
        self.module, self.buffers, self.devices = module, buffers, devices
        self.allocated = deferred.allocated
        self._home, self._deferred = home, deferred
        self._mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._fakes: dict[int, torch.Tensor] = {}
        self._places: dict[int, tuple[torch.Tensor, dict[str, Any], str]] = {}
        self._storages: dict[int, torch.Tensor] = {}
        for name, child in self.module.named_modules(remove_duplicate=False):
            for places in (child._parameters, child._buffers):
                for key, tensor in places.items():
                    if tensor is not None:
                        self._places[id(tensor)] = tensor, places, key
                        places[key] = self._fake(tensor, self.devices[join(name, key)])

    @classmethod
    def by(cls, build: Callable[[], nn.Module], placement: Placement = None) -> Built:
        """Run a constructor without memory; raise PassError if it cannot run so."""
        asked = AskedDevices()
        with kept_torch_state(), asked, capable():
            deferred = record(build)
        module = deferred.module
        buffers = _computed(module, deferred.values)
        devices = place(module, asked, placement)
        return cls(module, buffers, devices, home_of(placement, devices), deferred)

    def export(
        self, example_inputs: Sequence[Any] | Mapping[str, Any], dynamic_shapes: Any = None
    ) -> ExportedProgram:
        """Export this module. Raises PassError if the export fails."""
        check_inputs(self.module, example_inputs)
        by_name = isinstance(example_inputs, Mapping)
        inputs: Any = ((), dict(example_inputs)) if by_name else (tuple(example_inputs), {})
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._input, inputs)

        def make() -> ExportedProgram:
            with Guardless(self._stand_in), capable(), _lazy(), groups_of_any_dtype(), torch.no_grad():
                return torch.export.export(
                    self.module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
                )

        with in_eval(self.module):
            exported = export_as_called(self.module, make)
        exported.graph_module.meta[BUFFERS] = dict(self.buffers)
        return exported

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Make a fake tensor for a tensor, in a fake storage for its storage, so that ties and views stay."""
        if has_parts(tensor):
            joined = each_part(tensor, lambda part: self._fake(part, device))
            return self._fakes.setdefault(id(tensor), joined)
        storage = tensor.untyped_storage()
        with self._mode:
            flat = self._storages.get(storage._cdata)
            if flat is None:
                elements = storage.nbytes() // tensor.itemsize
                flat = torch.empty(elements, dtype=tensor.dtype, device=device)
                self._storages[storage._cdata] = flat
            if flat.device != device:
                raise PassError(
                    f"one storage is meant for {flat.device} and for {device}: place tied weights together"
                )
            if id(tensor) in self._fakes:
                return self._fakes[id(tensor)]
            whole = flat if flat.dtype == tensor.dtype else flat.view(tensor.dtype)
            fake = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        self._fakes[id(tensor)] = fake
        return fake

    def _stand_in(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor to use in place of one that the constructor made and keeps outside of its attributes.

        For a parameter or a buffer it is the fake tensor in its place, and for any other tensor its values.
        Raises PassError for a view of a parameter, which the exported program could not follow.
        """
        if isinstance(value, FakeTensor) or not value.is_meta:  # to ask a fake tensor takes a dispatch
            return value
        if id(value) in self._places:
            _, places, key = self._places[id(value)]
            fake: torch.Tensor = places[key]
            return fake
        if value.untyped_storage()._cdata in self._storages:
            raise PassError(
                f"the model uses a part or a view, {list(value.shape)}, of a parameter that its constructor "
                f"made and keeps outside of its attributes{caller()}: make the view in forward"
            )
        return self._deferred.values(value) if self._deferred.has(value) else value

    def _input(self, value: torch.Tensor) -> torch.Tensor:
        """The fake tensor for an example input, on the first parameter's device or its own accelerator."""
        device = value.device if is_accelerator(value.device) else self._home
        with self._mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _computed(module: nn.Module, values: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of the buffers that no checkpoint has, by name; names of one buffer share a tensor."""
    fakes: dict[int, torch.Tensor] = {}
    fakes_of = {}
    for name, buffer in _lost_buffers(module):
        if id(buffer) not in fakes:
            fakes[id(buffer)] = values(buffer)
        fakes_of[name] = fakes[id(buffer)]
    return fakes_of


def _lost_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the buffers that no checkpoint has, neither by name nor as views of its tensors."""
    saved = {
        tensor.untyped_storage()._cdata
        for tensor in module.state_dict(keep_vars=True).values()
        if isinstance(tensor, torch.Tensor)
    }
    return [
        (join(name, key), tensor)
        for name, child in module.named_modules(remove_duplicate=False)
        for key, tensor in child._buffers.items()
        if key in child._non_persistent_buffers_set
        and tensor is not None
        and tensor.untyped_storage()._cdata not in saved
    ]
