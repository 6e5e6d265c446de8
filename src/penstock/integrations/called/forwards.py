"""The methods of a module and its parts that are wrapped while it is called: parts may come, go and move."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from penstock.integrations.called.measuring import run_uncounted
from penstock.integrations.called.readers import COMPILED, is_compiled
from penstock.integrations.emptied.hollow import copy_part, replace_attribute

Run = Callable[["Wrapped", Sequence[Any], Mapping[str, Any]], Any]
"""Runs a call of a wrapped method."""


@dataclass(eq=False)
class Wrapped:
    """A wrapped method.

    Attributes:
        path: The present path of its module.
        method: The name of the method.
        own: The method as it was.
        called: What stands in its place.
    """

    path: str
    method: str
    own: Callable[..., Any]
    called: Callable[..., Any]

    @property
    def is_forward(self) -> bool:
        """Tell whether this is what a call of the module runs."""
        return self.method in ("forward", COMPILED)

    @property
    def entry(self) -> str:
        """The path, and behind it the method if that is not `forward`."""
        return self.path if self.is_forward else f"{self.path}.{self.method}".removeprefix(".")


class Forwards:
    """The wrapped methods of a module and of all modules in it.

    Args:
        module: The module.
        entries: Methods other than `forward` that libraries call, with the paths of their modules.
        run: What runs the calls.

    Attributes:
        modules: The modules, by path.
    """

    modules: Mapping[str, nn.Module]

    def __init__(self, module: nn.Module, entries: Sequence[str], run: Run) -> None:
        self._module, self._run = module, run
        self._wrapped: dict[int, list[tuple[Wrapped, Callable[[], None]]]] = {}
        self._copied: dict[int, Callable[[], None]] = {}
        self._children: list[tuple[nn.Module, list[nn.Module | None], object]] = []
        self.find()
        for method_path in entries:
            path, _, method = method_path.rpartition(".")
            self._wrap(path, self.modules[path], method)

    @property
    def have_changed(self) -> bool:
        """Tell whether modules have come, gone or moved since `find`, or were compiled."""
        return any(
            list(module._modules.values()) != children or module._compiled_call_impl is not call
            for module, children, call in self._children
        )

    def find(self) -> None:
        """Wrap the forwards of new modules, and let go of modules that are no parts any more."""
        self.modules = dict(self._module.named_modules())
        compiled = {path for path, module in self.modules.items() if is_compiled(module)}
        inside = tuple(f"{path}." if path else "" for path in compiled)
        modules = {
            path: module
            for path, module in self.modules.items()
            if path in compiled or not path.startswith(inside)
        }
        present = {id(module) for module in modules.values()}
        for gone in [key for key in self._wrapped if key not in present]:
            self._unwrap(gone)
        for path, module in modules.items():
            method = COMPILED if path in compiled and module._compiled_call_impl is not None else "forward"
            wraps = self._wrapped.get(id(module), [])
            if wraps and wraps[0][0].method != method:
                wraps.pop(0)[1]()
            for wrapped, _ in wraps:
                wrapped.path = path
            if not wraps or wraps[0][0].method != method:
                self._wrap(path, module, method)
        self._children = [
            (module, list(module._modules.values()), module._compiled_call_impl)
            for module in self.modules.values()
        ]

    def let_go(self) -> None:
        """Give all modules their own methods again."""
        for known in list(self._wrapped):
            self._unwrap(known)
        self._children.clear()

    def _unwrap(self, known: int) -> None:
        for _, undo in reversed(self._wrapped.pop(known)):
            undo()
        if known in self._copied:
            self._copied.pop(known)()

    def _wrap(self, path: str, module: nn.Module, method: str) -> None:
        original, run = getattr(module, method), self._run
        if is_compiled(module):
            original = functools.update_wrapper(partial(run_uncounted, original), original)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return run(wrapped, args, kwargs)

        wrapped = Wrapped(path, method, original, called)
        undo = replace_attribute(module, method, called)
        if "__deepcopy__" not in vars(module):
            self._copied[id(module)] = replace_attribute(module, "__deepcopy__", partial(copy_part, module))
        wraps = self._wrapped.setdefault(id(module), [])
        wraps.insert(0 if wrapped.is_forward else len(wraps), (wrapped, undo))
