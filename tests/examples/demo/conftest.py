"""The decoder at 8 MiB, made once."""

import pytest

from examples.demo.cap import prepare
from tests.examples.demo.screens import CONSOLE


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The job that runs the plain model; its weights and its artifact lie in a temporary folder."""
    return prepare(CONSOLE, tmp_path_factory.mktemp("decoder"), 8 << 20)
