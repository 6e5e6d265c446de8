import pytest

from penstock.runtime.files.source import Source
from tests.runtime.files.weight_files import NBYTES, pattern, write_tensor


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return folder, write_tensor(folder / "w.safetensors", pattern(NBYTES))


@pytest.fixture(scope="module", params=["direct", "buffered"])
def source(request, file):
    with Source([file[1]], file[0], mode=request.param) as opened:
        yield opened
