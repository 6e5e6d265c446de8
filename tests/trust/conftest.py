"""What tests of artifacts from strangers share."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(artifact, tmp_path):
    """A copy of the module's artifact that a test may change."""
    return Path(shutil.copytree(artifact, tmp_path / "model.penstock"))
