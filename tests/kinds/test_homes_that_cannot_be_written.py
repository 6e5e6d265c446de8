"""The cache where nothing can be written or a disk is full; it is made for its user alone."""

import errno
import os
import stat
import struct
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.runtime import cache
from penstock.runtime.cache import Cache, remember, user_cache
from penstock.runtime.system.atomic import can_others_write, write_artifact


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


OTHER, GROUP = 65534, 12345
ROOT = os.geteuid() == 0
NAME = f"{0:032x}"


@pytest.fixture
def base():
    """A folder whose way others may go, as those of pytest are not."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def umask():
    before = os.umask(0o002)
    yield
    os.umask(before)


def fill(folder):
    (folder / "payload.json").write_text("{}")
    (folder / "inner").mkdir()
    (folder / "inner" / "code.so").write_text("mine")


def make_entry(cache):
    path = cache.weights / NAME
    cache.keep(path, "a model", lambda: write_artifact(path, force=False, build=fill)).close()
    return path


def grant(path, tag, number, kind="access"):
    """Lets a user (tag 2) or a group (tag 8) write, by an access list of the system's own form."""
    entries = [(1, 7, -1), (2, 5, 1), (tag, 7, number), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
    entries = sorted(entries, key=lambda one: one[0])
    data = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", one, rights, number & 0xFFFFFFFF) for one, rights, number in entries
    )
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", data)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            pytest.skip(f"{path} is on a file system without access lists")
        raise


def test_what_is_made_is_for_this_user_alone(base, umask, monkeypatch):
    """Whatever the umask, a parent's group, or its default access list."""
    parent = base / "project"
    parent.mkdir()
    parent.chmod(0o2775)
    grant(parent, 2, OTHER, "default")
    monkeypatch.setenv("XDG_CACHE_HOME", str(parent / "new" / "cache"))
    cache = Cache.at(None)
    make_entry(cache)
    remember(cache.folder / "plans" / "a.json", b"{}")
    made = [parent / "new", *(parent / "new").rglob("*")]
    assert len(made) > 8
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("umask_of_all", [0o777, 0o277, 0o000])
def test_any_umask(base, umask_of_all):
    before = os.umask(umask_of_all)
    try:
        cache = Cache(base / "a" / "cache")
        path = make_entry(cache)
    finally:
        os.umask(before)
    for folder in (base / "a", cache.folder, cache.weights, path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_folders_of_an_earlier_version_are_taken_back(base):
    """It made them as the umask said."""
    cache = Cache(base / "cache")
    make_entry(cache)
    cache.weights.chmod(0o777)
    cache.keep(cache.weights / f"{1:032x}", "another", (cache.weights / f"{1:032x}").mkdir).close()
    assert stat.S_IMODE(cache.weights.stat().st_mode) == 0o700


CHANGES = {
    "its own": (lambda folder: folder.chmod(0o755), False),
    "that everybody writes": (lambda folder: folder.chmod(0o702), True),
    "that its group writes": (lambda folder: folder.chmod(0o720), True),
    "that a user writes by an access list": (lambda folder: grant(folder, 2, OTHER), True),
    "that a group writes by an access list": (lambda folder: grant(folder, 8, GROUP), True),
    "of another user": (lambda folder: os.chown(folder, OTHER, OTHER), True),
    "that is a link": (lambda folder: folder.rename(folder.with_name("b")) and folder.symlink_to("b"), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whether_others_may_write_to_a_folder(base, change):
    if change == "of another user" and not ROOT:
        pytest.skip("only root can give files to another user")
    (base / "a").mkdir(0o700)
    apply, others = CHANGES[change]
    apply(base / "a")
    assert can_others_write(base / "a") is others


@pytest.mark.parametrize("way", ["through a link", "in a folder that others write to"])
def test_rights_are_not_changed_where_others_could_lead(base, way):
    cache, mine = Cache(base / "cache"), base / "mine"
    make_entry(cache)
    if way == "through a link":
        cache.weights.rename(mine)
        cache.weights.symlink_to(mine)
    else:
        mine = cache.weights
        cache.folder.chmod(0o777)
    mine.chmod(0o777)
    cache.keep(cache.weights / f"{1:032x}", "another", (cache.weights / f"{1:032x}").mkdir).close()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o777


def test_a_record_that_is_a_link_leaves_its_file_alone(base):
    """An entry's record is locked and gets a new time with each use."""
    cache = Cache(base / "cache")
    path = cache.weights / f"{0:032x}"
    cache.keep(path, "a model", lambda: write_artifact(path, force=False, build=fill)).close()
    other = base / "other"
    other.touch()
    os.utime(other, (1, 1))
    (path / "entry.json").unlink()
    (path / "entry.json").symlink_to(other)
    cache.keep(path, "a model", lambda: None).close()
    assert other.stat().st_mtime == 1
