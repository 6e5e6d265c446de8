"""Spares torch.export what it does for each node or each pass, and nobody asks for.

Two things took a fifth of the time of an export of thousands of nodes. Each pass writes the graph's Python
code anew and compiles it, though only the last graph is ever called. And each node notes the stack that made
it, for which torch looks up every line of the whole stack again. Both come out as they would have.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from unittest.mock import patch

import torch
from torch.fx._lazy_graph_module import _use_lazy_graph_module


@contextmanager
def quick() -> Iterator[None]:
    """Let exports inside compile graphs only when they are called, and look up each line once."""
    with _use_lazy_graph_module(True), patch.object(torch.fx.proxy, "CapturedTraceback", _Stack):
        yield


_Place = tuple[str, int, str]
"""A file, a line in it, and the function that it is in."""


class _Stack:
    """The frames of a call, from the innermost out; stands in for torch's `CapturedTraceback`."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places

    @classmethod
    def extract(cls) -> _Stack:
        """The frames that call this."""
        places = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            places.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return cls(places)

    def summary(self) -> traceback.StackSummary:
        """The frames, from the outermost in."""
        return traceback.StackSummary(_summary(*place) for place in reversed(self._places))


_summary = cache(traceback.FrameSummary)
