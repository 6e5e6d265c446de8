"""The kind: nothing can be written where penstock remembers things, or a disk is full."""

import errno
import os
import stat
import tempfile
import warnings

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.runtime import cache
from penstock.runtime.cache import Cache, user_cache


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home in which nothing can be made, whoever asks, and a folder for temporary files."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    (home / ".cache").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    cache._temporary_cache.cache_clear()
    yield home
    cache._temporary_cache.cache_clear()


def own_name():
    return f"penstock-{os.geteuid()}"


def test_a_temporary_folder_is_used_and_one_warning_says_so(home, tmp_path):
    with pytest.warns(RuntimeWarning, match=rf"cannot write to {home}.*{own_name()}.*XDG_CACHE_HOME"):
        folder = user_cache()
    assert folder == tmp_path / "temporary" / own_name()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert user_cache() == folder


def test_a_model_streams_from_there(home, tmp_path):
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).eval(), torch.ones(1, 64)
    expected = model(x)
    with pytest.warns(RuntimeWarning, match="keeps what it remembers in"):
        applied = apply(model, "1MB")
    with applied:
        for _ in range(3):
            assert torch.equal(model(x), expected)
        assert list((tmp_path / "temporary" / own_name() / "weights").iterdir())


def test_a_folder_of_somebody_else_is_not_used(home, tmp_path):
    taken = tmp_path / "temporary" / own_name()
    taken.mkdir()
    taken.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="keeps what it remembers in"):
        folder = user_cache()
    assert folder != taken
    assert folder.parent == taken.parent


def test_a_user_without_a_home_has_one_too(home, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where no user has this number
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.warns(RuntimeWarning, match="cannot write to /.cache/penstock"):
        user_cache()


def test_weights_that_the_home_has_are_used_where_they_are(home, monkeypatch, tmp_path):
    """An image may be built with the weights, and run with a home that is read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "baked"))
    model, x = nn.Linear(256, 256).eval(), torch.ones(1, 256)
    with apply(model, "1MB"):
        model(x)
    before = set((tmp_path / "baked").rglob("*.safetensors"))
    assert before
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "baked" not in str(path) and allowed(path, mode))
    with pytest.warns(RuntimeWarning, match="cannot write to"):
        applied = apply(model, "1MB")
    with applied:
        (component,) = applied.components.values()
        assert set(component.weights) == before


def test_with_a_full_disk_a_model_runs_whose_weights_are_in_files(monkeypatch, tmp_path):
    """What penstock only remembers is left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).eval(), torch.ones(1, 64)
    expected = model(x)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with apply(model, "1MB", cache=tmp_path / "weights"):
        monkeypatch.setattr(os, "write", refuse)
        for _ in range(3):
            assert torch.equal(model(x), expected)
        monkeypatch.undo()
    assert not list((tmp_path / "first").rglob("*.json"))


def test_with_a_full_disk_a_model_that_must_be_written_is_as_it_was(monkeypatch, tmp_path):
    model, x = nn.Linear(64, 64).eval(), torch.ones(1, 64)
    expected = model(x)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        for name in ("pwrite", "write", "pwritev", "writev", "posix_fallocate"):
            full.setattr(os, name, refuse)
        with pytest.raises(cache.SourceError, match=r"the disk of .* is full: .*free some"):
            apply(model, "1MB", cache=tmp_path)
    assert torch.equal(model(x), expected)
    assert Cache.at(tmp_path).folder == tmp_path
