"""Notices that a module was changed after its program was exported, which would otherwise go unheard."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.schedule.errors import StreamError

_PLAIN = (bool, int, float, str, type(None))


class Watch:
    """What a module was made of: the classes of its submodules, its configuration, its adapters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = _parts(module)
        self._settings = _settings(module)
        self._adapters = _adapters(module)

    def check(self) -> None:
        """Raise StreamError, naming what changed, where calls would no longer do what the module says."""
        changed = ""
        if self._module.training:
            changed = "it is in training mode: call eval()"
        elif _parts(self._module) != self._parts:
            changed = "submodules were replaced or added (an adapter?): restore it, and apply penstock again"
        elif _adapters(self._module) != self._adapters:
            changed = "adapters were switched: restore it, switch them, and apply penstock again"
        elif _settings(self._module) != self._settings:
            now = dict(_settings(self._module))
            names = [name for name, value in self._settings if now.get(name) != value]
            changed = f"its configuration changed ({', '.join(names)}): restore it, and apply penstock again"
        if changed:
            raise StreamError(
                f"the {type(self._module).__name__} is not what was exported any more: {changed}"
            )


def _parts(module: nn.Module) -> list[type]:
    return [type(one) for one in module.modules()]


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """The plain values of a configuration of transformers, and which attention it uses."""
    held = vars(getattr(module, "config", None) or object).items()
    return [(name, value) for name, value in held if isinstance(value, _PLAIN)]


def _adapters(module: nn.Module) -> list[tuple[object, ...]]:
    """What the layers of peft do: which adapters they use, have merged, and how much each counts."""
    layers: list[Any] = [one for one in module.modules() if hasattr(one, "merged_adapters")]
    return [
        (
            tuple(one.active_adapters),
            bool(one.disable_adapters),
            tuple(one.merged_adapters),
            tuple(sorted(one.scaling.items())),
        )
        for one in layers
    ]
