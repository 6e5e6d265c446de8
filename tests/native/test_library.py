"""The native engine's library: there where it can be built, and what is said where it is not."""

from pathlib import Path

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.native import library as binding
from penstock.native.library import library
from penstock.schedule.facts.errors import StreamError


def test_it_is_built_where_a_compiler_is(request):
    """This test alone says that it is missing: those over both engines then take Python's alone."""
    if not list(Path(binding.__file__).parent.glob("_engine*.so")):
        request.getfixturevalue("compiler")
    assert library() is not None, "install penstock again where g++ and nlohmann-json3-dev are: make"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder where the library is looked for, in place of its own."""
    monkeypatch.setattr(binding, "__file__", str(tmp_path / "library.py"))
    library.cache_clear()
    yield tmp_path
    library.cache_clear()


@pytest.mark.parametrize("built", [False, True])
def test_without_the_library_pythons_streamer_runs_and_one_line_says_so(built, elsewhere, caplog):
    if built:  # for another machine, as it were
        (elsewhere / "_engine.so").write_bytes(b"\x7fELF")
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]).eval()
    x = torch.randn(3, 128)
    program = penstock.compile(torch.export.export(model, (x,)), elsewhere / "m.penstock")
    for _ in range(2):
        with program.load(budget="80%", options=LoadOptions(arena="contiguous")) as module, torch.no_grad():
            assert torch.equal(module(x), model(x))
    (said,) = (one.getMessage() for one in caplog.records if one.name == "penstock.native.library")
    assert said.startswith("there is no native engine (")
    assert ("_engine.so" in said) == built
    assert said.endswith("Python's streamer runs every plan on a CPU")
    with pytest.raises(StreamError, match="is not installed: install penstock from a wheel"):
        program.load(budget="80%", options=LoadOptions(arena="contiguous", engine="native"))
