"""Where penstock keeps what it can make again: rates, plans, and the weights of applied models."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """The folder in the user's cache, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
