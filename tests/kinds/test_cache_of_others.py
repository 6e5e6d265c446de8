"""The cache is made for its user alone, and it is found out who else could change or exchange a folder."""

import errno
import os
import stat
import struct
import tempfile
from pathlib import Path

import pytest

from penstock.runtime.cache import Cache, remember
from penstock.runtime.system.atomic import write_artifact
from penstock.runtime.system.ownership import can_others_change

OTHER, GROUP = 65534, 12345
ROOT = os.geteuid() == 0
NAME = f"{0:032x}"

needs_root = pytest.mark.skipif(not ROOT, reason="only root can give files to another user")


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


def loosen(path, mode):
    path.chmod(mode)
    if ROOT:
        os.chown(path, 0, GROUP)


def test_the_folders_of_an_earlier_version_are_taken_back(base):
    """It made them as the umask said."""
    cache = Cache(base / "cache")
    make_entry(cache)
    cache.weights.chmod(0o777)
    cache.keep(cache.weights / f"{1:032x}", "another", (cache.weights / f"{1:032x}").mkdir).close()
    assert stat.S_IMODE(cache.weights.stat().st_mode) == 0o700


def test_a_group_of_ones_own_may_write(base):
    """As systems make them that let groups write by default: umask 002, and a group for each user."""
    if not ROOT:
        pytest.skip("only of root it is known that no other user is in its group")
    base.chmod(0o775)
    assert not can_others_change(base)


@needs_root
def test_a_folder_of_another_user(base):
    os.chown(base, OTHER, OTHER)
    assert can_others_change(base)


WAYS = {
    "its own": (lambda parent: None, True),
    "that everybody writes": (lambda parent: parent.chmod(0o777), False),
    "that is sticky": (lambda parent: parent.chmod(0o1777), True),
    "that its group writes": (lambda parent: loosen(parent, 0o2775), False),
    "that a user writes by an access list": (lambda parent: grant(parent, 2, OTHER), False),
    "that a group writes by an access list": (lambda parent: grant(parent, 8, GROUP), False),
    "with a default list for new files": (lambda parent: grant(parent, 2, OTHER, "default"), True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("there", [True, False])
def test_the_parent_of_a_folder(base, way, there):
    """Whoever may write to a parent can exchange the folder for another, unless it is like /tmp."""
    parent, (change, own) = base / "parent", WAYS[way]
    parent.mkdir()
    if there:
        (parent / "cache").mkdir(0o700)
    if way == "that its group writes" and not ROOT:
        pytest.skip("the group of this user may be its own")
    change(parent)
    assert can_others_change(parent / "cache") is not own


def test_links_to_a_folder(base):
    """A link is followed, and the folders on both ways count."""
    (base / "disk").mkdir()
    (base / "home").mkdir()
    cache = base / "home" / "cache"
    cache.symlink_to("../disk/cache")
    assert not can_others_change(cache)
    (base / "disk" / "cache").mkdir()
    assert not can_others_change(cache)
    for folder in ("disk", "home"):
        (base / folder).chmod(0o777)
        assert can_others_change(cache)
        (base / folder).chmod(0o755)
    assert not can_others_change(cache)
    (base / "home" / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        can_others_change(base / "home" / "loop")


@needs_root
def test_a_link_of_another_user(base):
    (base / "disk").mkdir()
    (base / "tmp").mkdir()
    (base / "tmp").chmod(0o1777)
    (base / "tmp" / "cache").symlink_to(base / "disk")
    assert not can_others_change(base / "tmp" / "cache")
    os.chown(base / "tmp" / "cache", OTHER, OTHER, follow_symlinks=False)
    assert can_others_change(base / "tmp" / "cache")


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
