"""What the tests of integrations share: the memory of a process of thousands of tests counts against no cap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.integrations import cap


@pytest.fixture(scope="session", autouse=True)
def uncounted() -> Iterator[None]:
    """What other tests leave in the process is not told from what an export leaves: `test_caps.py` sets both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cap, "anonymous_bytes", lambda: 0)
        yield
