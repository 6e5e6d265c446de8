"""What tests of integrations share: the memory of a process of so many tests counts against no cap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.integrations import cap


@pytest.fixture(scope="session", autouse=True)
def uncounted() -> Iterator[None]:
    """What other tests leave in the process counts like an export: `test_caps.py` sets what it counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cap, "anonymous_bytes", lambda: 0)
        yield
