"""Notices changes to a module after its export, which calls of the exported program would ignore."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.passes.weights.subclasses import plain_tensors
from penstock.schedule.facts.errors import StreamError

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

_OWN = frozenset(vars(nn.Module())) | {"forward", "extra_repr", "__deepcopy__", "__reduce_ex__", "_apply"}
"""Attributes that every module has, or that penstock sets."""

BESIDE = frozenset(
    {
        "generation_config",
        "_compiled_call",
        "_compiled_call_impl",
        "_is_torch_compile",
        "_last_compile_config",
        "_previous_max_cache_length",
        "_diffusers_hook",
        "penstock_applied",
    }
)
"""Attributes that libraries set on a model and that its forward does not read."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_DEPTH = 6
"""How deep attributes are followed: into a processor, or a configuration within a configuration."""


class Watch:
    """A record of a module: its submodules, configuration and adapters, and their attributes, tensors and
    hooks.

    `again` tells a user how to begin again with the changed module.
    """

    def __init__(self, module: nn.Module, again: str) -> None:
        self._module, self._again = module, again
        self._parts = _parts(module)
        self._settings = _settings(module)
        self._adapters = _adapters(module)
        self._facts = _facts(module)

    def check(self) -> None:
        """Raise StreamError, naming what changed, where the program no longer does what the module says."""
        changed, then = "", f"take that back, or {self._again}"
        if self._module.training:
            changed, then = "it is in training mode", "call eval()"
        elif names := different(self._parts, _parts(self._module)):
            changed = f"{self._part(names[0])} (an adapter?)"
        elif _adapters(self._module) != self._adapters:
            changed = "adapters were switched"
        elif _settings(self._module) != self._settings:
            names = different(dict(self._settings), dict(_settings(self._module)))
            changed = f"its configuration changed ({', '.join(names)})"
        elif names := different(self._facts, _facts(self._module)):
            changed = f"{', '.join(names[:3])} changed"
        if changed:
            raise StreamError(
                f"the {type(self._module).__name__} is not what was exported any more: {changed}: {then}"
            )

    def _part(self, name: str) -> str:
        """What happened to a submodule, in words."""
        if name not in _parts(self._module):
            return f"its part {name} was taken out"
        since = "another module than at export" if name in self._parts else "new"
        return f"its part {name} is {since}"


def attributes(module: nn.Module) -> dict[str, object]:
    """The attributes of a module and its submodules besides parameters, buffers and hooks, by path.

    Plain values compare by value, all others by identity.
    """
    found: dict[str, object] = {}
    seen: set[int] = set()
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        for key, value in list(vars(child).items()):
            if key not in _OWN and key not in BESIDE:
                _follow(prefix + key, value, found, seen, _DEPTH)
    return found


def different(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """The names whose values differ, or that only one of the two mappings has."""
    names = dict.fromkeys([*before, *now])
    return [name for name in names if name not in now or before.get(name, names) != now[name]]


class _Same:
    """Equal for the same object only, and for a tensor only until something writes to it."""

    def __init__(self, held: object) -> None:
        self._held = held  # kept, so that no other object gets its id
        self._state: tuple[int, ...] = ()
        if isinstance(held, torch.Tensor):
            version = 0 if held.is_inference() else held._version
            self._state = (version, held.untyped_storage().nbytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held and self._state == other._state

    __hash__ = None  # type: ignore[assignment]


def _follow(path: str, value: Any, found: dict[str, object], seen: set[int], depth: int) -> None:
    if isinstance(value, _PLAIN):
        found[path] = (type(value), repr(value))
        return
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
        found[path] = (type(value), len(value))
    else:
        found[path] = _Same(value)
        if not isinstance(value, nn.Module | torch.Tensor | type):
            inside = getattr(value, "__dict__", {}).items()
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    for key, held in list(inside):
        _follow(f"{path}.{key}", held, found, seen, depth - 1)


def _facts(module: nn.Module) -> dict[str, object]:
    """`attributes`, and the parameters, buffers, hooks and methods `forward` by path.

    The hooks of the module itself are left out, and so is a `forward` that it is given: they are called as
    ever.
    """
    found = attributes(module)
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        for held in (child._parameters, child._buffers):
            found |= {prefix + key: _Same(value) for key, value in held.items()}
            parts = [plain_tensors(prefix + key, value) for key, value in held.items() if value is not None]
            found |= {name: _Same(value) for one in parts for name, value in one.items()}
        for hooks in _HOOKS if name else ():
            found |= {f"{prefix}{hooks}.{key}": _Same(hook) for key, hook in vars(child)[hooks].items()}
        own = vars(child).get("forward") if name else None
        found[f"{prefix}forward"] = _Same(own), _Same(type(child).forward)
    return found


def _parts(module: nn.Module) -> dict[str, object]:
    """The submodules by path."""
    return {name: (type(one), _Same(one)) for name, one in module.named_modules()}


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """The plain values of a transformers configuration, the implementation of attention among them."""
    held = vars(getattr(module, "config", None) or object).items()
    return [(name, value) for name, value in held if isinstance(value, _PLAIN)]


def _adapters(module: nn.Module) -> list[tuple[object, ...]]:
    """The state of peft's layers: active and merged adapters, and the scale of each."""
    layers: list[Any] = [one for one in module.modules() if hasattr(one, "merged_adapters")]
    return [
        (
            tuple(one.active_adapters),
            bool(one.disable_adapters),
            tuple(one.merged_adapters),
            tuple(sorted(getattr(one, "scaling", {}).items())),
        )
        for one in layers
    ]
