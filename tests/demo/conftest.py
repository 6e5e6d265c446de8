"""The decoder at 8 MiB, made once."""

from __future__ import annotations

import pytest

from penstock.demo.cap import prepare
from penstock.demo.child import Job
from tests.demo.screens import CONSOLE


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job that runs the plain model; its weights and its artifact lie in a temporary folder."""
    return prepare(CONSOLE, tmp_path_factory.mktemp("decoder"), 8 << 20)
