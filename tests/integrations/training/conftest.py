"""What tests of training share: a cache of exported calls, and a budget that lets tiny weights stream."""

from __future__ import annotations

import pytest

from penstock.integrations.streamed import Component


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Each kind of call is exported once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def half_streams():
    """The values that a tiny model saves are larger than its weights, which would all stay in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Component, "_budget", lambda self, program, room, beside: program.weight_bytes // 2)
        yield
