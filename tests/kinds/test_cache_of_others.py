"""What runs from the cache is what this user has made, and what nobody else could change or exchange."""

import errno
import logging
import os
import stat
import struct
import tempfile
from pathlib import Path

import pytest

import penstock
from penstock.runtime.cache import Cache, remember
from penstock.runtime.system.atomic import write_artifact

OTHER, GROUP = 65534, 12345
ROOT = os.geteuid() == 0
NAME = f"{0:032x}.penstock"

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
    path = cache.programs / NAME
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
    assert cache.trusts(path)
    for folder in (base / "a", cache.folder, cache.programs, path):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def loosen(path, mode):
    path.chmod(mode)
    if ROOT:
        os.chown(path, 0, GROUP)


def exchange(path):
    """Puts a link to it in its place."""
    aside = path.rename(path.with_name("aside"))
    path.symlink_to(aside)


CHANGES = {
    "a file that its group writes": lambda path: loosen(path / "payload.json", 0o664),
    "a file that everybody writes": lambda path: loosen(path / "inner" / "code.so", 0o602),
    "a folder that its group writes": lambda path: loosen(path / "inner", 0o770),
    "an entry that everybody writes": lambda path: loosen(path, 0o777),
    "a sticky entry": lambda path: loosen(path, 0o1777),
    "an access list of a file": lambda path: grant(path / "inner" / "code.so", 2, OTHER),
    "an access list of a folder": lambda path: grant(path / "inner", 8, GROUP),
    "an access list of the entry": lambda path: grant(path, 2, OTHER),
    "an access list of all programs": lambda path: grant(path.parent, 2, OTHER),
    "programs that everybody writes": lambda path: loosen(path.parent, 0o777),
    "a link in it": lambda path: exchange(path / "payload.json"),
    "a pipe in it": lambda path: os.mkfifo(path / "pipe"),
    "a link in its place": exchange,
}

GIVEN = {
    "an entry of another user": lambda path: os.chown(path, OTHER, OTHER),
    "a file of another user": lambda path: os.chown(path / "inner" / "code.so", OTHER, OTHER),
    "programs of another user": lambda path: os.chown(path.parent, OTHER, OTHER),
}


@pytest.mark.parametrize(
    "change",
    [*CHANGES, *(pytest.param(one, marks=needs_root) for one in GIVEN if one != "programs of another user")],
)
def test_an_entry_that_others_could_change_is_written_again(base, change, caplog):
    cache = Cache(base / "cache")
    path = make_entry(cache)
    (path / "inner" / "code.so").write_text("another's")
    (CHANGES | GIVEN)[change](path)
    with caplog.at_level(logging.WARNING):
        make_entry(cache)
    assert (path / "inner" / "code.so").read_text() == "mine"
    assert [one.getMessage().split(" as ")[0] for one in caplog.records] == [f"{path} is not trusted,"]
    assert cache.trusts(path)


@needs_root
def test_programs_of_another_user_run_nothing(base):
    """What cannot be taken back stays, is not trusted, and no folder of others is changed through a link."""
    cache = Cache(base / "cache")
    path = make_entry(cache)
    GIVEN["programs of another user"](path)
    make_entry(cache)
    assert not cache.trusts(path)


def test_an_entry_of_this_user_alone_is_used_again(base, caplog):
    cache = Cache(base / "cache")
    inode = make_entry(cache).stat().st_ino
    with caplog.at_level(logging.WARNING):
        assert make_entry(cache).stat().st_ino == inode
    assert not caplog.records


def test_a_group_of_ones_own_may_write(base):
    """As systems make them that let groups write by default: umask 002, and a group for each user."""
    if not ROOT:
        pytest.skip("only of root it is known that no other user is in its group")
    cache = Cache(base / "cache")
    path = make_entry(cache)
    for one in (cache.folder, path, path / "payload.json"):
        one.chmod(0o775)
    assert cache.trusts(path)


WAYS = {
    "its own": (lambda parent: None, True),
    "that everybody writes": (lambda parent: parent.chmod(0o777), False),
    "that is sticky": (lambda parent: parent.chmod(0o1777), True),
    "that its group writes": (lambda parent: loosen(parent, 0o2775), not ROOT),
    "that a user writes by an access list": (lambda parent: grant(parent, 2, OTHER), False),
    "that a group writes by an access list": (lambda parent: grant(parent, 8, GROUP), False),
    "with a default list for new files": (lambda parent: grant(parent, 2, OTHER, "default"), True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("there", [True, False])
def test_the_parent_of_a_cache(base, way, there):
    """Whoever may write to a parent can exchange the cache for another, unless it is like /tmp."""
    parent, (change, own) = base / "parent", WAYS[way]
    parent.mkdir()
    cache = Cache(parent / "cache")
    if there:
        make_entry(cache)
    change(parent)
    if way == "that its group writes" and not ROOT:
        pytest.skip("the group of this user may be its own")
    assert cache.own is own
    if own:
        assert cache.trusts(make_entry(cache))


def test_links_to_a_cache(base):
    """A link is followed, and the folders on both ways count."""
    (base / "disk").mkdir()
    (base / "home").mkdir()
    (base / "home" / "cache").symlink_to("../disk/cache")
    cache = Cache(base / "home" / "cache")
    assert cache.own
    (base / "disk" / "cache").mkdir()
    assert cache.trusts(make_entry(cache))
    for folder in ("disk", "home"):
        (base / folder).chmod(0o777)
        assert not cache.own
        (base / folder).chmod(0o755)
    assert cache.own
    (base / "home" / "loop").symlink_to("loop")
    with pytest.raises(penstock.SourceError, match="loop cannot be read"):
        _ = Cache(base / "home" / "loop").own


@needs_root
def test_a_link_of_another_user(base):
    (base / "disk").mkdir()
    (base / "tmp").mkdir()
    (base / "tmp").chmod(0o1777)
    (base / "tmp" / "cache").symlink_to(base / "disk")
    assert Cache(base / "tmp" / "cache").own
    os.chown(base / "tmp" / "cache", OTHER, OTHER, follow_symlinks=False)
    assert not Cache(base / "tmp" / "cache").own


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
