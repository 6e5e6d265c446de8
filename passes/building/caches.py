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
    own_names = {name for name in names if not name.startswith("torch.")}
    modules = [sys.modules[name] for name in own_names if name in sys.modules]
    modules += [value for module in modules for value in vars(module).values() if _is_of(own_names, value)]
    holders = [kind for kind in kinds if kind.__module__ in own_names] + modules
    for holder in holders:
        for value in list(vars(holder).values()):
            cells = getattr(value, "__closure__", None) or ()
            for candidate in (value, *(_content(cell) for cell in cells)):
                if isinstance(candidate, _CACHE):
                    yield candidate


def _is_of(names: set[str], value: object) -> bool:
    """Whether a value is a module of one of these libraries."""
    libraries = {name.partition(".")[0] for name in names}
    return type(value) is ModuleType and value.__name__.partition(".")[0] in libraries


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never bound
        return None
