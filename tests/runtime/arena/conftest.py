from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.arena.arena_weights import Weights


@pytest.fixture
def weights(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Weights]:
    """Weights whose arenas are Python's, or of the engine that a test is parametrised with."""
    made = Weights(tmp_path, getattr(request, "param", "python"))
    yield made
    made.source.close()
