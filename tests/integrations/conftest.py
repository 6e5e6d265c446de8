"""What tests of integrations share: the memory of a process of so many tests counts against no cap."""

import pytest
import torch

from penstock.integrations import cap


@pytest.fixture(scope="session", autouse=True)
def uncounted():
    """What other tests leave in the process counts like an export: `test_caps.py` sets what it counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cap, "anonymous_bytes", lambda: 0)
        yield


@pytest.fixture
def one_thread():
    """Products in several threads may be added up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
