"""Gives torch back as it was before a graph or a model was followed, however that ended.

To follow a graph is to call its operators, and some of them change torch itself: `vmap` and `jvp` push levels
that every later operator of the process goes through. Where the run fails in between, or Ctrl-C ends it,
nothing else takes them away.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey, _functorch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


@contextmanager
def kept_torch_state() -> Iterator[None]:
    """After the body torch has the levels, modes, defaults and generators that it had before.

    These are functorch's levels and that of forward gradients, modes of dispatch and of functions, the grad
    mode, the default dtype and device, and the generators of random numbers of torch (of the CPU), Python and
    numpy.
    """
    depth, dual = _functorch.get_dynamic_layer_stack_depth(), _has_dual_level()
    dispatch, early = _get_current_dispatch_mode_stack(), _before_dispatch()
    functions = _functions()
    grad, dtype = torch._C.is_grad_enabled(), torch.get_default_dtype()
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    draws = generator_states()
    try:
        yield
    finally:
        if _functorch.get_dynamic_layer_stack_depth() > depth:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if not dual and _has_dual_level():
            torch._C._exit_dual_level(level=0)
        while _before_dispatch() > early:
            _pop_mode(DispatchKey.PreDispatch)
        _restack(dispatch, _get_current_dispatch_mode_stack(), _pop_mode, _push_mode)
        _restack(functions, _functions(), _pop_function_mode, _push_function_mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = device
        torch._C._set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        _set_generators(draws)


def generator_states() -> dict[str, Any]:
    """Return the states of the generators that draw random numbers where none is named, by their owner."""
    with _disable_current_modes():
        states: dict[str, Any] = {"torch": torch.default_generator.get_state().numpy()}
    states["Python"] = random.getstate()
    if numpy := sys.modules.get("numpy.random"):
        states["numpy"] = numpy.get_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    with _disable_current_modes():
        torch.default_generator.set_state(torch.from_numpy(states["torch"]))
    random.setstate(states["Python"])
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])


def _before_dispatch() -> int:
    return int(_len_torch_dispatch_stack_pre_dispatch())  # type: ignore[no-untyped-call]


def _functions() -> list[Any]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _has_dual_level() -> bool:
    """Tell whether torch is within the one level of forward gradients that it can have."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


def _restack(
    before: Sequence[Any], now: Sequence[Any], pop: Callable[[], Any], push: Callable[[Any], None]
) -> None:
    same = 0
    while same < min(len(before), len(now)) and before[same] is now[same]:
        same += 1
    for _ in now[same:]:
        pop()
    for mode in before[same:]:
        push(mode)
