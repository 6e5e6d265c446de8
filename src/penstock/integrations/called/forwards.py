"""The methods of a module and its parts that are wrapped while it is called: parts may come, go and move."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.integrations.emptied.hollow import replace_attribute

Run = Callable[["Wrapped", Sequence[Any], Mapping[str, Any]], Any]
"""Runs a call of a wrapped method."""


@dataclass(eq=False)
class Wrapped:
    """A wrapped method.

    Attributes:
        path: The present path of its module.
        entry: The path, and behind it the method if that is not `forward`.
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
        """Tell whether this is the module's forward."""
        return self.method == "forward"

    @functools.cached_property
    def entry(self) -> str:
        """The name of the method from the model on."""
        return self.path if self.is_forward else f"{self.path}.{self.method}".removeprefix(".")

    def move(self, path: str) -> None:
        """Note that the module has another path."""
        self.path = path
        self.__dict__.pop("entry", None)


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
        self._children: list[tuple[nn.Module, list[nn.Module | None]]] = []
        self.find()
        for entry in entries:
            path, _, method = entry.rpartition(".")
            self._wrap(path, self.modules[path], method)

    @property
    def have_changed(self) -> bool:
        """Tell whether modules have come, gone or moved since `find`."""
        return any(list(one._modules.values()) != children for one, children in self._children)

    def find(self) -> None:
        """Wrap the forwards of new modules, and let go of modules that are no parts any more."""
        self.modules = dict(self._module.named_modules())
        self._children = [(one, list(one._modules.values())) for one in self.modules.values()]
        there = {id(one) for one in self.modules.values()}
        for gone in [key for key in self._wrapped if key not in there]:
            for _, undo in self._wrapped.pop(gone):
                undo()
        for path, one in self.modules.items():
            for wrapped, _ in self._wrapped.get(id(one), ()):
                wrapped.move(path)
            if id(one) not in self._wrapped:
                self._wrap(path, one, "forward")

    def let_go(self) -> None:
        """Give all modules their own methods again."""
        for wraps in self._wrapped.values():
            for _, undo in reversed(wraps):
                undo()
        self._wrapped.clear()
        self._children.clear()

    def _wrap(self, path: str, module: nn.Module, method: str) -> None:
        own, run = getattr(module, method), self._run

        @functools.wraps(own)
        def called(*args: Any, **kwargs: Any) -> Any:
            return run(wrapped, args, kwargs)

        wrapped = Wrapped(path, method, own, called)
        undo = replace_attribute(module, method, called)
        self._wrapped.setdefault(id(module), []).append((wrapped, undo))
