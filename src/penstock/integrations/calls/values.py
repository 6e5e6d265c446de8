"""Small tensors of a call that say how large its pictures are, whose values become part of a program.

Models split and order patches by them in Python, so that a program which took them as inputs could not be
exported. A call with other values is exported anew.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from penstock.integrations.calls.arguments import Collected
from penstock.integrations.calls.kinds import Call

Values = tuple[tuple[int, Any], ...]
"""The values of tensors by their index in a call, as nested lists."""

_NAMES = ("grid_thw", "sizes", "shapes", "grids", "num_patches", "num_crops", "lengths")
"""How the names of arguments end that say how large pictures, videos and sounds are."""

_MOST = 256
"""Elements of such a tensor."""

_KNOWN = "torch._subclasses.fake_tensor", "torch.fx.experimental.proxy_tensor"
_LIMIT, _SMALL = "CONSTANT_NUMEL_LIMIT", 1 << 16
"""Where torch says how many elements a tensor has at most whose values a trace knows; and how many here."""

_VISION = "transformers.vision_utils"
"""The module of functions that make indices of the sizes of pictures, without weights."""


def values_of(call: Call) -> Values:
    """The values of the tensors of a call that say how large something else is."""
    arguments: Mapping[str, Any] = pytree.tree_unflatten(call.tree.leaves, call.tree.spec)
    leaves = [leaf for name, leaf in arguments.items() if name.endswith(_NAMES)]
    indices = [leaf.index for leaf in leaves if isinstance(leaf, Collected)]
    tensors = [(index, call.tensors[index]) for index in indices]
    return tuple((k, one.tolist()) for k, one in tensors if one.dtype in _WHOLE and one.numel() <= _MOST)


_WHOLE = (torch.int32, torch.int64)


def has_values(call: Call, values: Values) -> bool:
    """Whether the tensors of a call have these values."""
    return all(call.tensors[index].tolist() == value for index, value in values)


def with_values(tensors: Sequence[torch.Tensor], values: Values) -> list[torch.Tensor]:
    """The tensors, some of which are made of values anew, so that a trace knows them."""
    known = dict(values)
    return [
        torch.tensor(known[k], dtype=one.dtype, device=one.device) if k in known else one
        for k, one in enumerate(tensors)
    ]


@contextmanager
def known_in_trace(model: nn.Module, values: Values) -> Iterator[None]:
    """Let values that a trace knows decide about sizes in it, as they do in Python."""
    with ExitStack() as patches:
        if values:
            for name in _KNOWN:
                patches.enter_context(patch.object(sys.modules[name], _LIMIT, _SMALL))
            for module, name, function in _vision_functions(model):
                patches.enter_context(patch.object(module, name, _computed(function)))
        yield


def _vision_functions(model: nn.Module) -> list[tuple[Any, str, Callable[..., Any]]]:
    modules = {sys.modules[type(one).__module__] for one in model.modules()}
    return [
        (module, name, held)
        for module in modules
        for name, held in list(vars(module).items())
        if getattr(held, "__module__", "") == _VISION and callable(held)
    ]


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is run outside of a trace where the trace knows all tensors that it is given."""

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not tensors or any(getattr(one, "constant", None) is None for one in tensors):
            return function(*args, **kwargs)
        outside = kwargs.get("kwargs")  # which the function takes from
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            given = pytree.tree_map_only(torch.Tensor, lambda one: one.constant, (args, kwargs))
            if outside is not None:
                given[1]["kwargs"] = outside
            made = function(*given[0], **given[1])
        return pytree.tree_map_only(torch.Tensor, torch.ops.aten.lift_fresh_copy.default, made)

    return computed
