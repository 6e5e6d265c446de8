"""The parameters of a model that are trained: they stay in memory, and in the model's own places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from penstock.integrations.emptied.absent import AbsentTensor
from penstock.passes.training.facts import COPIES
from penstock.passes.weights.subclasses import has_parts
from penstock.schedule.facts.errors import PassError, StreamError


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of a module that required grad when this was made.

    Attributes:
        module: The module.
        parameters: The parameters, each once.
    """

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, module: nn.Module, name: str, model: nn.Module) -> TrainedParameters:
        """Return the parameters of the user's `model` that require grad now.

        The model is the module, or holds it, beside prompts that are trained, for example. `name` is the
        module's in messages.

        Raises PassError if there is none, and for one that cannot be trained beside weights that stream.
        """
        named = [*model.named_parameters(), *module.named_parameters()]
        names = {id(value): fqn for fqn, value in named if value.requires_grad}
        parameters = tuple(value for value in model.parameters() if value.requires_grad)
        if not parameters:
            raise PassError(
                f"{name} has no parameter that requires grad, so that there is nothing to train: give it an "
                "adapter (get_peft_model of peft), or leave train=True out"
            )
        for value in parameters:
            if has_parts(value) or value.device.type != "cpu":
                kind = type(value).__name__ if has_parts(value) else f"on {value.device}"
                raise PassError(
                    f"{names[id(value)]} requires grad and is {kind}: train plain parameters on the CPU, or "
                    "freeze it (requires_grad_(False))"
                )
        memory = {value.untyped_storage()._cdata: names[id(value)] for value in parameters}
        for fqn, other in [*module.named_parameters(), *module.named_buffers()]:
            if id(other) in names or has_parts(other) or isinstance(other, AbsentTensor):
                continue
            trained = memory.get(other.untyped_storage()._cdata)
            if trained is not None:
                raise PassError(
                    f"{trained} requires grad and shares its memory with {fqn}, which is frozen and would "
                    f"stream: freeze {trained}, or give it a copy of its own"
                )
        return cls(module, parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, their gradients, and the optimiser's state, which is assumed AdamW's."""
        return COPIES * sum(value.nbytes for value in self.parameters)

    def without(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a module, by FQN, that are not trained."""
        trained_ids = {id(value) for value in self.parameters}
        return {fqn: value for fqn, value in tensors.items() if id(value) not in trained_ids}

    def refuse_others(self) -> None:
        """Raise StreamError for a weight that streams, and requires grad now."""
        for fqn, value in self.module.named_parameters():
            if isinstance(value, AbsentTensor) and value.requires_grad:
                raise StreamError(
                    f"{fqn} requires grad now, and it streams since penstock was applied: freeze it, or "
                    "restore() and apply penstock again"
                )
