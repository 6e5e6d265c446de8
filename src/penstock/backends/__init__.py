"""For compilers that hand over a graph: what they call to have their programs' weights stream."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["executorch", "fx", "onnx"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
