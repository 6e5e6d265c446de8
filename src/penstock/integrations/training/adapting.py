"""Adapters for models that are never in memory: peft makes them, beside weights that are in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from penstock.integrations.emptied.absent import make_absent
from penstock.integrations.emptied.hollow import absent_copy, replace_attribute, save_present
from penstock.integrations.kept import KeptWeights, names_of
from penstock.integrations.libraries import components_of
from penstock.passes.weights.subclasses import has_parts
from penstock.runtime.checkpoint.binding import Names, tensor_names
from penstock.schedule.facts.errors import PassError

_WRAPPED = ".base_layer."
"""In the name of a weight whose layer an adapter has wrapped."""

_SENTENCE = (
    "load makes adapters beside weights that are in files; one that begins with their values (DoRA, PiSSA, "
    "modules_to_save) is made by loading the model with its library, for penstock.integrations.apply"
)


@dataclass(frozen=True)
class Adapting:
    """Makes an adapter on a module whose parameters have no values.

    `adapter` is a configuration of peft, the folder of a saved adapter, or a function of the model that
    returns it with an adapter, which is in the state of torch's generator in which this object was made.
    """

    adapter: Any
    drawn: torch.Tensor

    @classmethod
    def asked(cls, adapter: object, *, train: bool) -> Adapting | None:
        """What `load` was asked for; None to train nothing. Raises PassError for one without the other."""
        if train and adapter is None:
            raise PassError(
                "train=True needs an adapter to train: give adapter= a configuration of peft, the folder of "
                "a saved one, or a function such as lambda model: get_peft_model(model, config)"
            )
        if adapter is not None and not train:
            raise PassError("adapter= is for train=True: give both or none")
        return cls(adapter, torch.get_rng_state()) if train else None

    def put_on(self, module: nn.Module, name: str, device: torch.device) -> Any:
        """The model with its adapter on a device, with the values that the library gives its parameters.

        Raises PassError where a weight that is in files is to be trained, or where what the function returns
        is another model, and StreamError for what needs the values of weights.
        """
        own = {id(value): fqn for fqn, value in module.named_parameters()}
        with _absent(module, device):
            torch.set_rng_state(self.drawn)
            adapted = self._adapted(module)
            if [*components_of(adapted).values()] != [module]:
                raise PassError(f"adapter= made a model of something else than the {name} that it was given")
        for fqn, value in module.named_parameters():
            if value.requires_grad and id(value) in own:
                raise PassError(
                    f"{fqn} requires grad and is in files: load trains what adapter= adds; freeze it "
                    "(requires_grad_(False)), or load the model with its library and use apply"
                )
        return adapted

    def _adapted(self, module: Any) -> Any:
        if callable(self.adapter):
            return self.adapter(module)
        if not hasattr(module, "add_adapter"):
            raise PassError(
                f"a {type(module).__name__} makes no adapters of its own: give adapter= a function of it"
            )
        if isinstance(self.adapter, str | PathLike):
            module.load_adapter(str(self.adapter), is_trainable=True)
        else:
            module.add_adapter(self.adapter)
        return module


@contextmanager
def _absent(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Let parameters without values say that they are on a device, to which adapters go then."""
    names = {id(value): fqn for fqn, value in module.named_parameters()}
    empty: dict[int, torch.UntypedStorage] = {}
    others: dict[int, Any] = {}
    with ExitStack() as undo:
        for one in module.modules():
            # Libraries look at states when they load adapters.
            undo.callback(replace_attribute(one, "_save_to_state_dict", partial(save_present, one)))
            for key, held in one._parameters.items():
                if held is not None and has_parts(held):
                    if id(held) not in others:
                        others[id(held)] = absent_copy(held, names[id(held)], _SENTENCE, device)
                    undo.callback(one._parameters.__setitem__, key, held)
                    one._parameters[key] = others[id(held)]
        for value in [value for value in module.parameters() if not has_parts(value)]:
            data = value.data
            new = torch.empty(0, device=device).untyped_storage()
            storage = empty.setdefault(data.untyped_storage()._cdata, new)
            undo.callback(make_absent(value, names[id(value)], _SENTENCE, storage), data)
        yield


def under_new_names(module: nn.Module, kept: Sequence[KeptWeights]) -> Callable[[], list[KeptWeights]]:
    """Returns what says where the weights of a module are, by the names that they have by then.

    An adapter puts layers into layers, and so their weights have other names than when it was called.
    """
    before = _tensors(module)

    def renamed() -> list[KeptWeights]:
        known = names_of(kept)
        old: dict[int, list[str]] = {}
        for fqn, value in before.items():
            old.setdefault(id(value), []).append(fqn)
        moved = {new: _former(new, old[id(one)]) for new, one in _tensors(module).items() if id(one) in old}
        return [_renamed(one, moved, known, first=one is kept[0]) for one in kept]

    return renamed


def _renamed(
    kept: KeptWeights, moved: Mapping[str, str], known: Mapping[str, Names], *, first: bool
) -> KeptWeights:
    """What files call weights, which are `moved` from other names; the first have those that none names."""
    names = {
        new: tensor_names(old, known)
        for new, old in moved.items()
        if old in kept.names or (first and old not in known)
    }
    return replace(kept, names={new: found for new, found in names.items() if found != (new,)})


def _former(new: str, old: Sequence[str]) -> str:
    """The name that a weight had in its place; tied ones have several, of which files may have any."""
    own = new.replace(_WRAPPED, ".")
    return next((name for name in (new, own) if name in old), old[0])


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)
