"""Answers what a model asks about torch's modes while it is exported as they are answered in its call.

An export runs without gradients, whatever mode its call has. Attention of torch.nn has a fast path besides,
with kernels of its own, which is never exported: where a call takes it, the export is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from penstock.schedule.facts.errors import PassError

_SETS = "torch.autograd.grad_mode"
"""The module whose contexts ask for the grad mode in order to give it back."""

_CHECKPOINTS = "diffusers."
"""A library that asks only whether it is to keep intermediate values for a backward pass."""

_ATTENTION = "torch.nn.modules.activation", "torch.nn.modules.transformer"

_FAST = {
    "_native_multi_head_attention": "torch.nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "torch.nn.TransformerEncoderLayer",
    "_nested_tensor_from_mask": "torch.nn.TransformerEncoder",
}
"""The functions of torch by which the fast path begins, and the modules that call them."""


class FastPathError(PassError):
    """A call takes a path that cannot be exported, whichever sizes are open."""


class GradMode(TorchFunctionMode):
    """The grad mode of a call while its export runs: what the model sets is noted, and nothing is switched.

    `asked` tells whether the model has asked for it. Where the call is `differentiated`, what is computed
    while the model has it off is detached.
    """

    def __init__(self, on: bool, differentiated: bool = False) -> None:
        super().__init__()
        self._on, self._inside, self._differentiated = on, False, differentiated
        self.asked = False

    def ask(self) -> bool | None:
        """What the code that called `torch.is_grad_enabled` is told; None for torch's own code."""
        name = str(sys._getframe(2).f_globals.get("__name__"))
        own = name.startswith("torch.") and not name.startswith("torch.nn.")
        if self._inside or (own and name != _SETS) or name.startswith(_CHECKPOINTS):
            return None
        self.asked |= name != _SETS
        return self._on

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled:
            (self._on,) = args
            return None
        if (
            func is torch.Tensor.requires_grad_
        ):  # trainers ask for it of values, and an export has no gradients
            return args[0]
        self._inside = True  # torch removes this mode meanwhile, and so what is set inside is really set
        try:
            made = func(*args, **(kwargs or {}))
            return made if self._on or not self._differentiated else pytree.tree_map(_detached, made)
        finally:
            self._inside = False


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@contextmanager
def modes_of_call(grad: bool, differentiated: bool = False) -> Iterator[GradMode]:
    """Answer this thread as in a call with this grad mode. Raises FastPathError where it takes that path."""
    mode = GradMode(grad, differentiated)
    attention: Any = torch.nn.modules.activation
    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch, "is_grad_enabled", mode.ask),
        (torch.overrides, "has_torch_function", _overridden),
        (attention, "_is_make_fx_tracing", lambda: False),
        (torch, "_nested_tensor_from_mask_left_aligned", lambda *_: True),
        *((torch, name, _refusal(kind)) for name, kind in _FAST.items()),
    ]
    with ExitStack() as stack:
        for owner, name, instead in answers:
            stack.enter_context(patch.object(owner, name, _here(getattr(owner, name), instead)))
        yield stack.enter_context(mode)


def _here(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `instead` in this thread, unless that returns None, and the original in others."""
    thread = threading.get_ident()

    def answered(*args: Any, **kwargs: Any) -> Any:
        answer = instead(*args, **kwargs) if threading.get_ident() == thread else None
        return original(*args, **kwargs) if answer is None else answer

    return answered


def _overridden(values: Any) -> bool | None:
    """For attention, whether tensors have classes with functions of their own, whatever modes export has."""
    if sys._getframe(2).f_globals.get("__name__") not in _ATTENTION:
        return None
    plain = torch._C._disabled_torch_function_impl
    kinds = {type(one) for one in values if isinstance(one, torch.Tensor)} - {torch.Tensor}
    return any(kind.__torch_function__ is not plain for kind in kinds)


def _refusal(kind: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise FastPathError(
            f"this call of a {kind} takes torch's fast path, whose kernels have other bits and cannot be "
            "exported: switch it off with torch.backends.mha.set_fastpath_enabled(False)"
        )

    return refuse
