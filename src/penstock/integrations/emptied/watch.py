"""Notices changes to a module after its export, which calls of the exported program would ignore."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from penstock.integrations.emptied.absent import AbsentTensor
from penstock.integrations.emptied.definitions import Definitions
from penstock.passes.weights.subclasses import flattened, has_parts, plain_tensors
from penstock.schedule.facts.errors import StreamError

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

_TRAINING = "training"

_OWN = (frozenset(vars(nn.Module())) - {_TRAINING}) | {
    "forward",
    "extra_repr",
    "__deepcopy__",
    "__reduce_ex__",
    "_apply",
}
"""Attributes that every module has, or that penstock sets. Whether a part is in training mode is watched."""

BESIDE = frozenset(
    {
        "generation_config",
        "model_tags",
        "_compiled_call",
        "_compiled_call_impl",
        "_is_torch_compile",
        "_last_compile_config",
        "_previous_max_cache_length",
        "_diffusers_hook",
        "penstock_applied",
        "_encoder_finished",
        "_last_negative_compile_config",
        "_negative_compiled_call",
        "_step_durations",
        "_streaming_num_lookahead_tokens",
        "_symbols_at_frame",
        "_uses_cfg",
    }
)
"""Attributes that libraries set on a model and that its forward does not read."""

MEMORY = frozenset({"rope_deltas", "_cached_decode_position_ids", "_prefill_len"})
"""Attributes in which models keep something of a call for the next one, and which `generate` sets and gives
to `forward` as positions. A forward that reads one is refused when it is exported (calls/isolation.py)."""

_LEFT_OUT = _OWN | BESIDE | MEMORY

SETTINGS = ("use_cache", "pad_token_id", "bos_token_id", "eos_token_id")
"""Settings that trainers change in a configuration; calls of a trained model are exported with them."""

_TRAINERS = frozenset(
    {
        _TRAINING,
        *SETTINGS,
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "_require_grads_hook",
        "_require_grads_hooks",
    }
)
"""Attributes that change while a model is trained; training/parameters.py gives calls those that count."""

_WANTS_GRAD = "make_inputs_require_grad"
"""In the name of a hook of transformers and peft, by which values require grad that no gradient comes to."""

_EVAL = "call eval() of the model"

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
"""What a module calls its hooks on gradients, which are watched where it is trained."""

_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
)

REMOVE_GLOBAL_HOOK = "remove it (remove() of what registered it), and hook the whole model"

_DEPTH = 6
"""How deep attributes are followed: into a processor, or a configuration within a configuration."""


class Watch:
    """A record of a module: its submodules, configuration and adapters, and their attributes, tensors and
    hooks.

    `again` tells a user how to begin again with the changed module. A check comes before each call: where the
    module holds the very objects that it held, which `_Glance` sees, nothing is walked. Values of parameters
    in `trained` may change, and then modes too.
    """

    def __init__(self, module: nn.Module, again: str, trained: Collection[nn.Parameter] = ()) -> None:
        self._module, self._again = module, again
        self._changing = frozenset(map(id, trained))
        parts = list(module.named_modules())
        self._parts = _parts(parts)
        self._settings = self._settings_now()
        self._adapters = _adapters(parts)
        self._definitions = Definitions(one for _, one in parts)
        walk = _facts(parts, self._changing)
        self._facts, self._glance = walk.found, _Glance(module, parts, walk)

    def _settings_now(self) -> list[tuple[str, Any]]:
        """The plain values of a transformers configuration, the implementation of attention among them."""
        held = vars(getattr(self._module, "config", None) or object).items()
        beside = _TRAINERS if self._changing else frozenset()
        return [(name, value) for name, value in held if isinstance(value, _PLAIN) and name not in beside]

    def check(self) -> None:
        """Raise StreamError, naming what changed, where the program no longer does what the module says."""
        self._refuse_global_hook()
        replaced = self._definitions.changed()
        training = self._module.training and not self._changing
        if not replaced and not training and self._glance.is_same():
            return
        changed, then = "", f"take that back, or {self._again}"
        parts = list(self._module.named_modules())
        walk = _facts(parts, self._changing)
        if training:
            changed, then = "it is in training mode", _EVAL
        elif names := different(self._parts, now := _parts(parts)):
            changed = f"{self._part(names[0], now)} (an adapter?)"
        elif _adapters(parts) != self._adapters:
            changed = "adapters were switched"
        elif self._settings_now() != self._settings:
            names = different(dict(self._settings), dict(self._settings_now()))
            changed = f"its configuration changed ({', '.join(names)})"
        elif names := different(self._facts, walk.found):
            changed = f"{', '.join(names[:3])} changed"
            part, _, attribute = names[0].rpartition(".")
            if attribute == _TRAINING and self._module.get_submodule(part).training:
                changed, then = f"its part {part} is in training mode", _EVAL
        elif replaced:
            changed = f"{', '.join(replaced[:3])} changed"
        if changed:
            raise StreamError(
                f"the {type(self._module).__name__} is not what was exported any more: {changed}: {then}"
            )
        self._glance = _Glance(self._module, parts, walk)

    def _refuse_global_hook(self) -> None:
        if hook := global_hook():
            raise StreamError(
                f"{hook} is a hook on all modules, and the {type(self._module).__name__} streams, so that it "
                f"would not be called for parts: {REMOVE_GLOBAL_HOOK}"
            )

    def _part(self, name: str, now: Mapping[str, object]) -> str:
        """What happened to a submodule, in words."""
        if name not in now:
            return f"its part {name} was taken out"
        since = "another module than at export" if name in self._parts else "new"
        return f"its part {name} is {since}"


def global_hook() -> str:
    """The name of a hook on all modules, such as `register_module_forward_hook` registers; empty without."""
    for hooks in _GLOBAL_HOOKS:
        for hook in hooks.values():
            return name_of(hook)
    return ""


def name_of(hook: Any) -> str:
    """The name of a hook for people: of its function, or of its class."""
    made = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(made, "__qualname__", type(made).__qualname__))


def attributes(module: nn.Module) -> dict[str, object]:
    """The attributes of a module and its submodules besides parameters, buffers and hooks, by path.

    Plain values compare by value, all others by identity.
    """
    return _attributes(list(module.named_modules())).found


@dataclass
class _Walk:
    """What was found by path, and what was read: attributes of `owners`, and containers (`inside`).

    `changing` are the ids of tensors whose values may change.
    """

    changing: frozenset[int] = frozenset()

    found: dict[str, object] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    owners: list[Any] = field(default_factory=list)
    inside: list[Any] = field(default_factory=list)


def _attributes(parts: Sequence[tuple[str, nn.Module]], changing: frozenset[int] = frozenset()) -> _Walk:
    walk = _Walk(changing)
    left_out = _LEFT_OUT | _TRAINERS if changing else _LEFT_OUT
    for name, child in parts:
        prefix = f"{name}." if name else ""
        walk.owners.append(child)
        for key, value in list(vars(child).items()):
            if key not in left_out:
                _follow(prefix + key, value, walk, _DEPTH)
    return walk


def different(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """The names whose values differ, or that only one of the two mappings has."""
    names = dict.fromkeys([*before, *now])
    return [name for name in names if name not in now or before.get(name, names) != now[name]]


class _Same:
    """Equal for the same object only, and for a tensor only until something writes to it."""

    def __init__(self, held: object, changing: frozenset[int] = frozenset()) -> None:
        self._held = held  # kept, so that no other object gets its id
        self._changing = changing
        self._state = self._state_now()

    def _state_now(self) -> tuple[int, ...]:
        return () if id(self._held) in self._changing else _state(self._held)

    @property
    def is_tensor(self) -> bool:
        """Whether it is of a tensor that has values."""
        return bool(self._state)

    def is_same(self) -> bool:
        return self._state == self._state_now()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held and self._state == other._state

    __hash__ = None  # type: ignore[assignment]


def _state(held: object) -> tuple[int, ...]:
    """What writing to a tensor changes; nothing for an absent one: filling it changes its class."""
    if not isinstance(held, torch.Tensor) or isinstance(held, AbsentTensor):
        return ()
    return (0 if held.is_inference() else held._version, held.untyped_storage().nbytes())


def _follow(path: str, value: Any, walk: _Walk, depth: int) -> None:
    if isinstance(value, _PLAIN):
        walk.found[path] = (type(value), repr(value))
        return
    inside: Any = ()
    if isinstance(value, dict | list | tuple):
        walk.inside.append(value)
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
        walk.found[path] = (type(value), len(value))
    else:
        walk.found[path] = _Same(value, walk.changing)
        if not isinstance(value, nn.Module | torch.Tensor | type):
            inside = getattr(value, "__dict__", {}).items()
            walk.owners.append(value)
    if depth == 0 or id(value) in walk.seen:
        return
    walk.seen.add(id(value))
    for key, held in list(inside):
        if not walk.changing or key not in _TRAINERS:
            _follow(f"{path}.{key}", held, walk, depth - 1)


def _facts(parts: Sequence[tuple[str, nn.Module]], changing: frozenset[int] = frozenset()) -> _Walk:
    """`attributes`, and the parameters, buffers, hooks and methods `forward` by path.

    The hooks of the module itself are left out, and so is a `forward` that it is given: they are called as
    ever.
    """
    walk = _attributes(parts, changing)
    found = walk.found
    for name, child in parts:
        prefix = f"{name}." if name else ""
        for held in (child._parameters, child._buffers):
            found |= {prefix + key: _Same(value, changing) for key, value in held.items()}
            quantised: list[tuple[str, Any]] = [one for one in held.items() if has_parts(one[1])]
            for key, value in quantised:
                found |= {at: _Same(part) for at, part in plain_tensors(prefix + key, value).items()}
        kinds = (*_HOOKS, *BACKWARD_HOOKS) if changing else _HOOKS
        hooks = [vars(child)[one] for one in kinds] if name else []
        for kind, registered in zip(kinds, hooks, strict=False):  # none of the module itself
            hooked = {
                k: one for k, one in registered.items() if not changing or _WANTS_GRAD not in name_of(one)
            }
            found |= {f"{prefix}{kind}.{key}": _Same(hook) for key, hook in hooked.items()}
        own = vars(child).get("forward") if name else None
        found[f"{prefix}forward"] = _Same(own), _Same(type(child).forward)
        walk.inside += [child._modules, child._parameters, child._buffers, *hooks]
    return walk


class _Glance:
    """The objects that a module and all that it holds consist of, as a walk read them.

    Where each is the same one still, and no tensor was written, another walk would find what that one found:
    plain values cannot change. Looking takes a sixth of the time of walking. Where one is another, the walk
    decides whether that is a change.
    """

    def __init__(self, module: nn.Module, parts: Sequence[tuple[str, nn.Module]], walk: _Walk) -> None:
        self._module, self._config = module, getattr(module, "config", None)
        owners = {id(one): one for one in (*walk.owners, self._config) if hasattr(one, "__dict__")}
        self._owners, self._owned = [*owners.values()], [one.__dict__ for one in owners.values()]
        read = [*{id(one): one for one in (*self._owned, *walk.inside)}.values()]
        self._dicts = [one for one in read if isinstance(one, dict)]
        self._sequences = [one for one in read if not isinstance(one, dict)]
        self._sizes, self._held = self._counted(), [*self._holding()]
        self._tensors = [one for one in walk.found.values() if isinstance(one, _Same) and one.is_tensor]
        held: list[Any] = [
            one for _, part in parts for one in (*part._parameters.values(), *part._buffers.values())
        ]
        self._quantised = [(one, [part for _, part in flattened(one)]) for one in held if has_parts(one)]
        kept = [one for _, one in parts] + [one for one in held if isinstance(one, AbsentTensor)]
        self._typed, self._types = kept, [type(one) for one in kept]
        self._forwards = [(kind, kind.forward) for kind in {type(one) for _, one in parts}]
        self._adapted = [(name, one) for name, one in parts if hasattr(one, "merged_adapters")]
        self._adapters = _adapters(self._adapted)

    def is_same(self) -> bool:
        return (
            getattr(self._module, "config", None) is self._config
            and _are(map(type, self._typed), self._types)
            and all(kind.forward is forward for kind, forward in self._forwards)
            and _are(map(_ATTRIBUTES, self._owners), self._owned)
            and self._counted() == self._sizes
            and _are(self._holding(), self._held)
            and all(one.is_same() for one in self._tensors)
            and all(_are((part for _, part in flattened(one)), parts) for one, parts in self._quantised)
            and (not self._adapted or _adapters(self._adapted) == self._adapters)
        )

    def _counted(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._sequences)]

    def _holding(self) -> Iterator[object]:
        """All keys, values and elements in one row. No function of Python is called for any of them."""
        keys, values = chain.from_iterable(self._dicts), chain.from_iterable(map(dict.values, self._dicts))
        return chain(keys, values, chain.from_iterable(self._sequences))


_ATTRIBUTES = attrgetter("__dict__")


def _are(now: Iterable[object], before: Iterable[object]) -> bool:
    return all(map(is_, now, before))


def _parts(parts: Sequence[tuple[str, nn.Module]]) -> dict[str, object]:
    """The submodules by path. The module itself, which is always the same one, is left out."""
    return {name: (type(one), _Same(one)) for name, one in parts if name}


def _adapters(parts: Sequence[tuple[str, nn.Module]]) -> list[tuple[object, ...]]:
    """The state of peft's layers: active and merged adapters, and the scale of each."""
    layers: list[Any] = [one for _, one in parts if hasattr(one, "merged_adapters")]
    return [
        (
            tuple(one.active_adapters),
            bool(one.disable_adapters),
            tuple(one.merged_adapters),
            tuple(sorted(getattr(one, "scaling", {}).items())),
        )
        for one in layers
    ]
