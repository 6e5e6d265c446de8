"""Empties the caches of a model's code, in which an export would leave its fake tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

_CACHE = type(functools.lru_cache(len))


@contextmanager
def empty_caches(model: nn.Module) -> Iterator[None]:
    """Empty the caches (`functools.lru_cache`) in and beside a model's classes, before and after."""
    caches = list(_caches(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def _caches(model: nn.Module) -> Iterator[Any]:
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    names = {kind.__module__ for kind in kinds} - {"builtins"}
    own = {name for name in names if not name.startswith("torch.")}
    modules = [sys.modules[name] for name in own if name in sys.modules]
    modules += [one for module in modules for one in vars(module).values() if _is_of(own, one)]
    holders = [kind for kind in kinds if kind.__module__ in own] + modules
    for holder in holders:
        for value in list(vars(holder).values()):
            cells = getattr(value, "__closure__", None) or ()
            for one in (value, *(_content(cell) for cell in cells)):
                if isinstance(one, _CACHE):
                    yield one


def _is_of(own: set[str], value: object) -> bool:
    """Whether a value is a module of one of these libraries."""
    libraries = {name.partition(".")[0] for name in own}
    return type(value) is ModuleType and value.__name__.partition(".")[0] in libraries


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never bound
        return None
