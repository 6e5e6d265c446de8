"""The cache is made for its user alone, and others' rights in it are taken back."""

import errno
import os
import stat
import struct
import tempfile
from pathlib import Path

import pytest

from penstock.runtime.cache import Cache, remember
from penstock.runtime.system.atomic import write_artifact
from penstock.runtime.system.ownership import can_others_write

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
