"""Adapters for models that are never in memory: peft makes them, beside weights that are in files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.integrations.called.facts import ModuleFacts
from penstock.integrations.called.places import Places
from penstock.integrations.libraries import components_of
from penstock.schedule.facts.errors import PassError, PenstockError, SourceError, StreamError

_SENTENCE = (
    "load makes adapters beside weights that are in files; one that begins with their values (DoRA, PiSSA, "
    "modules_to_save) is made by loading the model with its library, for penstock.integrations.apply"
)

_LONGEST = 300
"""Characters of an error of peft that are repeated: it may list every weight of a model."""


@contextmanager
def refusing(action: str) -> Iterator[None]:
    """Raise SourceError for whatever peft raises in the body."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_LONGEST] or type(error).__name__
        raise SourceError(f"{action} ({reason}): is it whole, and for this model?") from error


def refuse_folder_without(adapter: Path, *patterns: str) -> None:
    """Raise SourceError for a folder that holds no adapter of peft."""
    for pattern in patterns:
        if not any(adapter.glob(pattern)):
            raise SourceError(
                f"{adapter} has no {pattern}: give the folder that save_pretrained of a model of peft wrote"
            )


def refuse_other_model(adapter: object, model: object, loaded: Any) -> None:
    """Raise SourceError where an adapter and a model have not each other's weights, by what was loaded."""
    for words, keys in (("has no place for", "unexpected_keys"), ("also needs", "missing_keys")):
        names = getattr(loaded, keys, ())  # transformers 4 returns nothing
        for name in sorted(names)[:1]:
            raise SourceError(
                f"{adapter} is for another model than {model}, which {words} {name} ({len(names)} in all): "
                "give the model that it was made on"
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
            raise PassError("adapter= is for train=True: give both, or add the adapter to what load returns")
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
        if not isinstance(adapted, nn.Module) or [*components_of(adapted).values()] != [module]:
            raise PassError(
                f"adapter= returned a {type(adapted).__name__} and not the {name} with an adapter: "
                "have it adapt and return the model that it is given"
            )
        for fqn, value in module.named_parameters():
            if value.requires_grad and id(value) in own_ids:
                raise PassError(
                    f"{fqn} requires grad and is in files: load trains what adapter= adds; freeze it "
                    "(requires_grad_(False)), or load the model with its library and use apply"
                )
        return adapted, Places(module, (), places.twins).renamed(facts, places.names)

    def _adapted(self, module: Any) -> Any:
        adapter, kind = self.adapter, f"the {type(module).__name__}"
        if callable(adapter):
            return adapter(module)
        is_folder = isinstance(adapter, str | PathLike)
        if not hasattr(module, "load_adapter" if is_folder else "add_adapter"):
            raise PassError(f"{kind} makes no such adapters of its own: give adapter= a function of it")
        if is_folder:
            refuse_folder_without(Path(adapter), "adapter_config.json", "adapter_model.*")
        with refusing(f"{adapter if is_folder else 'adapter='} cannot be put on {kind}"):
            if not is_folder:
                module.add_adapter(adapter)
                return module
            loaded = module.load_adapter(str(adapter), is_trainable=True)
        refuse_other_model(adapter, kind, loaded)
        return module
