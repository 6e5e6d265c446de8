import pytest

from tests.runtime.arena.arena_weights import Weights


@pytest.fixture
def weights(tmp_path, request):
    """Weights whose arenas are Python's, or of the engine that a test is parametrised with."""
    made = Weights(tmp_path, getattr(request, "param", "python"))
    yield made
    made.source.close()
