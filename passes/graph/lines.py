"""Which line of a user's model is at fault, and what an error says."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary

import torch


def sentence(error: Exception) -> str:
    """What an error says first."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def where(error: BaseException) -> str:
    """The innermost line of a traceback that is not torch's, Python's or this package's, or nothing."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def caller() -> str:
    """The line that is being run now, of neither torch nor this package."""
    return _innermost(traceback.extract_stack())


def _innermost(frames: Iterable[FrameSummary]) -> str:
    package = Path(__file__).parents[2]
    own = tuple(str(path.resolve()) for path in (Path(torch.__file__).parent, package, *package.iterdir()))
    python = sysconfig.get_path("stdlib")
    outside = [
        frame
        for frame in frames
        if not str(Path(frame.filename).resolve()).startswith(own)
        and not frame.filename.startswith("<")
        and (not frame.filename.startswith(python) or "-packages" in frame.filename)
    ]
    if not outside:
        return ""
    return f" at {outside[-1].filename}:{outside[-1].lineno}, in {outside[-1].name}: {outside[-1].line}"
