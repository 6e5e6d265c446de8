"""Delegates the weights of a program to penstock in ExecuTorch's own export, to `.pte` and `.ptd` files."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.backends.executorch.backend import PenstockBackend
    from penstock.backends.executorch.files import Exported, read, save
    from penstock.backends.executorch.partitioner import PenstockPartitioner

__all__ = ["Exported", "PenstockBackend", "PenstockPartitioner", "read", "save"]

_HOMES = {
    "Exported": "files",
    "PenstockBackend": "backend",
    "PenstockPartitioner": "partitioner",
    "read": "files",
    "save": "files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("PenstockBackend", "PenstockPartitioner"):
        from penstock._extras import require

        require("executorch", purpose=f"{__name__}.{name}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
