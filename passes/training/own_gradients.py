"""Refuses what gives a model gradients of its own, which export drops without a word.

`torch.export` records what an `autograd.Function` computes in its forward, and not its backward; nor does it
record a tensor's hooks. Gradients of the exported program would then be those of the recorded operations: a
rounding with a straight-through gradient would have the gradient zero. An operator of `torch.library` keeps
the gradient that was registered for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

from penstock.schedule.facts.errors import PassError


@contextmanager
def refused_own_gradients() -> Iterator[None]:
    """Has `autograd.Function` and `register_hook` raise PassError where a gradient would go through them."""
    functions: Any = torch.autograd.function
    is_defined = functions._is_setup_context_defined

    def asked(setup_context: Any) -> bool:
        # `Function.apply` asks this first, also where a module holds it as a function of its own.
        own = sys._getframe(1).f_locals.get("cls")
        if own is not None and torch.is_grad_enabled() and not own.__module__.startswith("torch._"):
            raise PassError(
                f"{own.__qualname__} is an autograd.Function, of which torch.export keeps the forward and "
                "drops the backward: make it an operator (torch.library.custom_op, register_autograd), or "
                "use what it does in plain operations"
            )
        return bool(is_defined(setup_context))

    def hooked(tensor: torch.Tensor, hook: object) -> NoReturn:
        raise PassError(
            "the model registers a hook on a tensor in its forward, which torch.export drops: compute what "
            "it does to the gradient outside of the model"
        )

    with (
        mock.patch.object(functions, "_is_setup_context_defined", asked),
        mock.patch.object(torch.Tensor, "register_hook", hooked),
    ):
        yield
