"""The parameters of a model that are trained: they stay its own, and are inputs of its programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.integrations.calls.kinds import Call
from penstock.integrations.emptied.absent import AbsentTensor
from penstock.integrations.emptied.watch import BACKWARD_HOOKS, SETTINGS, name_of
from penstock.passes.training.facts import COPIES, Keeping
from penstock.passes.weights.subclasses import has_parts
from penstock.schedule.facts.errors import PassError, StreamError

_CHECKPOINTING = "gradient_checkpointing"

_ROUNDING = "act_quant_kwargs", "activation_quantization"
"""What weights of torchao call the rounding of what they are multiplied with; None where there is none."""


@dataclass(frozen=True)
class Trained:
    """The trained parameters of a module. `names[k]` are all the names that parameter k has in it."""

    module: nn.Module
    names: tuple[tuple[str, ...], ...]
    parameters: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, module: nn.Module, name: str, device: torch.device) -> Trained:
        """The parameters that require grad now.

        Raises PassError where there is none, and for one that cannot be trained beside weights that stream.
        """
        aliases: dict[int, list[str]] = {}
        for fqn, value in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(value), []).append(fqn)
        found = [value for value in module.parameters() if value.requires_grad]
        if not found:
            raise PassError(
                f"{name} has no parameter that requires grad, so that there is nothing to train: give it an "
                "adapter (get_peft_model of peft), or leave train=True out"
            )
        made = cls(module, tuple(tuple(aliases[id(value)]) for value in found), tuple(found))
        made._refuse_hooks(name)
        made._refuse_shared()
        made._refuse_rounding()
        for names, value in zip(made.names, found, strict=True):
            if has_parts(value) or value.device != device:
                kind = type(value).__name__ if has_parts(value) else f"on {value.device}"
                raise PassError(
                    f"{names[0]} requires grad and is {kind}: train plain parameters on {device}, or freeze "
                    "it (requires_grad_(False))"
                )
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, their gradients, and the optimiser's state, which is assumed AdamW's."""
        return COPIES * sum(one.nbytes for one in self.parameters)

    def frozen(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a module, by FQN, that are not trained."""
        own = {id(one) for one in self.parameters}
        return {fqn: value for fqn, value in tensors.items() if id(value) not in own}

    def take_out(self, blank: nn.Module) -> None:
        """Take the parameters out of a blank copy of the module; each call is given them (`given`)."""
        for owner, key in _places(blank, self.names):
            del owner._parameters[key]

    def joined(self, call: Call) -> Call:
        """The call with the parameters as its last tensors, in the modes in which the parts are now.

        It is one that is trained where grad mode is on, and a parameter belongs to the part called. Raises
        StreamError for a weight that streams, and requires grad now.
        """
        if torch.is_grad_enabled():
            self._refuse_others()
        owner = call.entry.rpartition(".")[0]
        inside = any(name.startswith(f"{owner}." if owner else "") for names in self.names for name in names)
        wanting = torch.is_grad_enabled() and inside
        parts = [*self.module.modules()]
        modes = tuple(part.training for part in parts)
        checkpointed = any(part.training and getattr(part, _CHECKPOINTING, False) for part in parts)
        keeps: Keeping = "layers" if checkpointed else "keep"
        held = vars(getattr(self.module, "config", None) or object)
        words = f"{call.text}, {'training' if modes[0] else 'eval'}"
        if wanting:
            words += ", with gradients, checkpointed" if checkpointed else ", with gradients"
        return replace(
            call,
            tensors=(*call.tensors, *self.parameters),
            trained=self.names,
            modes=() if not any(modes) else modes,
            settings=tuple((name, held[name]) for name in SETTINGS if name in held),
            keeps=keeps if wanting else None,
            text=words,
            title=f"{call.entry} of {words}",
        )

    def _refuse_hooks(self, name: str) -> None:
        """Raise PassError for a hook on the gradients of a part, which no backward of a program calls."""
        for fqn, part in self.module.named_modules():
            for hook in (one for kind in BACKWARD_HOOKS for one in vars(part)[kind].values() if fqn):
                raise PassError(
                    f"{name}.{fqn} has a hook on its gradients ({name_of(hook)}), which would not be called: "
                    "remove it (remove() of what registered it), and hook the whole model or its trained "
                    "parameters"
                )

    def _refuse_shared(self) -> None:
        """Raise PassError for a trained parameter in the memory of something that is frozen."""
        own = {id(value): names[0] for names, value in zip(self.names, self.parameters, strict=True)}
        places = {
            value.untyped_storage()._cdata: own[id(value)]
            for value in self.parameters
            if not has_parts(value)
        }
        held = [*self.module.named_parameters(), *self.module.named_buffers()]
        for fqn, value in held:
            if id(value) not in own and not has_parts(value) and not isinstance(value, AbsentTensor):
                other = places.get(value.untyped_storage()._cdata)
                if other is not None:
                    raise PassError(
                        f"{other} requires grad and shares its memory with {fqn}, which is frozen and would "
                        f"stream: freeze {other}, or give it a copy of its own"
                    )

    def _refuse_rounding(self) -> None:
        """Raise PassError for a weight that has activations rounded, where autograd silently ends."""
        for fqn, value in self.module.named_parameters():
            if has_parts(value) and any(getattr(value, key, None) is not None for key in _ROUNDING):
                raise PassError(
                    f"{fqn} is a {type(value).__name__} whose products round activations as well, through "
                    "which torch has no gradient: quantise the weights only (Int8WeightOnlyConfig of torchao)"
                )

    def _refuse_others(self) -> None:
        own = {id(one) for one in self.parameters}
        for fqn, value in self.module.named_parameters():
            if id(value) not in own and value.requires_grad:
                raise StreamError(
                    f"{fqn} requires grad now, and it streams since penstock was applied: freeze it, or "
                    "restore() and apply penstock again"
                )


@contextmanager
def given(model: nn.Module, names: Sequence[Sequence[str]], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give a blank copy values for the parameters that were taken out of it."""
    places = [
        (one, value) for name, value in zip(names, values, strict=True) for one in _places(model, [name])
    ]
    for (owner, key), value in places:
        owner.__dict__[key] = value
    try:
        yield
    finally:
        for (owner, key), _ in places:
            owner.__dict__.pop(key, None)


@contextmanager
def in_modes(
    model: nn.Module, modes: Sequence[bool], settings: Sequence[tuple[str, object]]
) -> Iterator[None]:
    """Let the parts of a module be in training mode or not, and none of them recompute what it saves.

    Its configuration has some `settings` meanwhile.
    """
    config: Any = vars(model.config) if settings else {}
    own = {name: config[name] for name, _ in settings}
    parts = [*model.modules()] if modes else []
    before = [
        {key: vars(one)[key] for key in ("training", _CHECKPOINTING) if key in vars(one)} for one in parts
    ]
    try:
        config.update(settings)
        for part, held, mode in zip(parts, before, modes, strict=True):
            vars(part).update(held | {"training": mode} | ({_CHECKPOINTING: False} if len(held) > 1 else {}))
        yield
    finally:
        config.update(own)
        for part, held in zip(parts, before, strict=True):
            vars(part).update(held)


def _places(module: nn.Module, names: Sequence[Sequence[str]]) -> Iterator[tuple[nn.Module, str]]:
    for name in (one for each in names for one in each):
        owner, _, key = name.rpartition(".")
        yield module.get_submodule(owner), key
