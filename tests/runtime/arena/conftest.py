from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.arena.arena_weights import Weights


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    made = Weights(tmp_path)
    yield made
    made.source.close()
