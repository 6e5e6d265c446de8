"""What every test shares: hypothesis runs the same examples each time, with no deadline."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
from hypothesis import settings

settings.register_profile("penstock", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("penstock")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """What penstock remembers of a machine stays out of the user's folders, in child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            base = tmp_path_factory.getbasetemp()
            base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of all workers
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(base / "inductor"))
        yield


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Returns what penstock has logged, from info on, since it was last asked."""
    caplog.set_level("INFO", logger="penstock")

    def take() -> str:
        text = "\n".join(caplog.messages)
        caplog.clear()
        return text

    return take


def pytest_collection_finish() -> None:
    """What has been imported stays: the collector need not look through all of it again and again."""
    gc.collect()
    gc.freeze()
