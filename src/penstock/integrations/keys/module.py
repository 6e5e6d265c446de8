"""The key of a module: equal for two modules, in any two processes, only where their calls export alike."""

from __future__ import annotations

import hashlib
import logging
import platform
import types
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import penstock.passes
from penstock._version import __version__
from penstock.integrations.emptied.watch import BESIDE, MEMORY
from penstock.integrations.keys.code import Code, package_of
from penstock.integrations.keys.values import Found, Words
from penstock.schedule.facts.errors import PassError

_log = logging.getLogger(__name__)

_Said = TypeVar("_Said")

_TORCH = frozenset(vars(nn.Module()))

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class ModuleKey:
    """The key of a module for a device, which says all that an export of it depends on besides the call.

    What the module holds is said once, before its parameters lose their memory: of each submodule its class,
    attributes and hooks, its parameters but their values, and its buffers, with the values of those that no
    checkpoint has. The hooks of the module itself are left out: they are called as ever. What lies outside
    of the module may change at any time, so it is said whenever the key is asked for (`now`): the code that
    the methods `entries` can reach with all that it names, the versions of the libraries that it comes from,
    of torch, Python and penstock, and torch's settings.

    Raises PassError, which names the attribute, where something is held of which that cannot be said.
    """

    def __init__(self, module: nn.Module, entries: Iterable[str], device: torch.device) -> None:
        kinds = {kind for one in module.modules() for kind in type(one).__mro__}
        self._packages = frozenset(package_of(kind) or "" for kind in kinds) - {"torch"}
        self._called = {"forward", *(entry.rpartition(".")[2] for entry in entries)}
        self._parts = [*module.modules(), *module.parameters(), *module.buffers()]
        words = Held(self._parts)
        words.say(str(device))
        for path, one in module.named_modules(remove_duplicate=False):
            words.say("module", path)
            words.value(type(one), Found(path))
            _say_tensors(words, one, f"{path}." if path else "")
            held = {n: v for n, v in vars(one).items() if n not in _TORCH | BESIDE | MEMORY}
            held |= {name: list(vars(one)[name].values()) for name in _HOOKS if path}
            for name, value in held.items():
                words.say("attribute", name)
                words.value(value, Found(f"{path}.{name}" if path else name))
        self._held, self._code = words.hexdigest(), words.code

    def now(self) -> str:
        """The key, as a hash. Raises PassError as above, for what code holds."""
        words = Code(self._packages, self._called, self._parts)
        words.say("penstock", __version__, _own_code(), torch.__version__, platform.python_version())
        words.say(self._held)
        words.value(_settings(), Found("a setting of torch"))
        _say_replaced(words)
        for one in self._code:
            words.say(words.found(one))
        words.follow()
        return words.hexdigest()


class Held(Words):
    """Says what a module holds, and collects the functions and classes among it in `code`."""

    def __init__(self, parts: Iterable[object]) -> None:
        super().__init__(parts)
        self.code: list[Any] = []

    def found(self, code: Any) -> object:
        self.code.append(code)
        return super().found(code)


def _say_tensors(words: Words, module: nn.Module, prefix: str) -> None:
    for name, value in module._parameters.items():
        words.say("parameter", name)
        if value is not None:
            words.say(value.requires_grad)
            words.tensor(value, prefix + name, values=False)
    for name, buffer in module._buffers.items():
        computed = name in module._non_persistent_buffers_set
        words.say("buffer", name, computed)
        if buffer is not None:
            words.tensor(buffer, prefix + name, values=computed)


def _settings() -> list[object]:
    """Settings of torch that models and torch itself ask for while they are traced."""
    backends = torch.backends
    hooks = torch.nn.modules.module
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_device(),
        backends.mha.get_fastpath_enabled(),
        *(getattr(backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "math", "mem_efficient")),
        backends.mkldnn.enabled,
        torch.get_device_module("cuda").get_device_properties(0).name if torch.cuda.is_available() else "",
        *(list(vars(hooks)[f"_global_forward_{name}"].values()) for name in ("pre_hooks", "hooks")),
    ]


def _say_replaced(words: Code) -> None:
    """Say which functions of torch are not torch's own."""
    for owner in (torch, torch.nn.functional, torch.Tensor):
        for name, held in list(vars(owner).items()):
            if isinstance(held, types.FunctionType) and package_of(held) not in ("torch", None):
                words.say("replaced", owner.__name__, name)
                words.value(held, Found(f"torch's {name}"))


@cache
def _own_code() -> str:
    """A hash of penstock's code that exports: between two versions it may change, too."""
    digest = hashlib.sha256()
    folders = [*map(Path, penstock.passes.__path__), Path(__file__).parent.parent]
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def unless_unknown(kind: str, said: Callable[[], _Said]) -> _Said | None:
    """What is said of a module of a class; None, which is logged, where it holds something unknown."""
    try:
        return said()
    except Exception as error:  # a module may hold anything; without a key it is exported anew, no worse
        what = f"{type(error).__name__}: " if not isinstance(error, PassError) else ""
        _log.info("what is exported of the %s is not kept for other processes: %s%s", kind, what, error)
        return None
