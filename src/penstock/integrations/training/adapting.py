"""Adapters for models that are never in memory: peft makes them, beside weights that are in files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn

from penstock.integrations.called.facts import ModuleFacts
from penstock.integrations.called.places import Places
from penstock.integrations.libraries import components_of
from penstock.schedule.facts.errors import PassError, StreamError

_SENTENCE = (
    "load makes adapters beside weights that are in files; one that begins with their values (DoRA, PiSSA, "
    "modules_to_save) is made by loading the model with its library, for penstock.integrations.apply"
)


@dataclass(frozen=True)
class Adapting:
    """Makes an adapter on a module whose parameters are absent.

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

    def put_on(self, module: nn.Module, name: str, facts: ModuleFacts) -> tuple[Any, ModuleFacts]:
        """Return the model with its adapter, and the facts under the names that weights have then.

        Raises PassError where a weight that is in files is to be trained, or where what the function returns
        is another model, and StreamError for what needs the values of weights.
        """
        own_ids, places = {id(value) for value in module.parameters()}, Places(module, facts.parts)
        torch.set_rng_state(self.drawn)
        try:
            adapted = self._adapted(module)
        except StreamError as error:
            sentence, _, _ = str(error).partition(": ")
            raise StreamError(f"{sentence}: {_SENTENCE}") from error
        if [*components_of(adapted).values()] != [module]:
            raise PassError(f"adapter= made a model of something else than the {name} that it was given")
        for fqn, value in module.named_parameters():
            if value.requires_grad and id(value) in own_ids:
                raise PassError(
                    f"{fqn} requires grad and is in files: load trains what adapter= adds; freeze it "
                    "(requires_grad_(False)), or load the model with its library and use apply"
                )
        now = Places(module, (), places.twins).all_names()
        return adapted, facts.renamed(places.twins, places.names, now)

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
