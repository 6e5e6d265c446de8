"""Files that take their place whole, where the system takes little at once or refuses."""

import errno
import fcntl
import os

import pytest

from penstock.schedule import atomic_file
from penstock.schedule.atomic_file import is_unfinished, remove_stale, replace_file, write_all
from penstock.schedule.facts.errors import SourceError


def refusing(real, number, when):
    """A call of the system that fails with an errno where `when` is true of its arguments."""

    def call(*given):
        if when(*given):
            raise OSError(number, os.strerror(number))
        return real(*given)

    return call


def write(path, data, *, force=True):
    with replace_file(path, force=force) as fd:
        write_all(fd, data)


def test_all_is_written_where_the_system_takes_little_at_once(tmp_path, monkeypatch):
    real, calls = os.write, []

    def few(fd, data):
        calls.append(len(data))
        return real(fd, data[:3])

    monkeypatch.setattr(os, "write", few)
    write(tmp_path / "file", b"ten bytes.")
    assert (tmp_path / "file").read_bytes() == b"ten bytes."
    assert calls == [10, 7, 4, 1]


@pytest.mark.parametrize("one_way", [False, True])
def test_a_name_that_is_taken_meanwhile_is_kept(tmp_path, monkeypatch, one_way):
    if one_way:
        monkeypatch.setattr(atomic_file, "rename_by_rule", lambda *_: False)
    path, real = tmp_path / "file", os.fsync

    def meanwhile(fd):
        path.write_bytes(b"somebody else's")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", meanwhile)
        with pytest.raises(SourceError, match="file exists"):
            write(path, b"mine", force=False)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"somebody else's")]
    path.unlink()
    write(path, b"mine", force=False)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"mine")]


def test_a_name_that_the_disk_may_not_have_is_told_from_a_file_that_was_not_written(tmp_path, monkeypatch):
    path, real = tmp_path / "file", os.fsync
    path.write_bytes(b"old")
    folder = (lambda fd: os.path.isdir(f"/proc/self/fd/{fd}"), b"new", "is written, and the system does not")
    file = (lambda fd: not folder[0](fd), b"old", "what was there before is unchanged")
    for when, expected, said in (file, folder):
        monkeypatch.setattr(os, "fsync", refusing(real, errno.EIO, when))
        with pytest.raises(SourceError, match=said):
            write(path, b"new")
        assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", expected)]


@pytest.mark.parametrize(("number", "written"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_without_a_lock_a_file_is_written_only_where_there_are_none(tmp_path, monkeypatch, number, written):
    monkeypatch.setattr(fcntl, "flock", refusing(fcntl.flock, number, lambda *_: True))
    opened = len(os.listdir("/proc/self/fd"))
    if written:
        write(tmp_path / "file", b"new")
    else:
        with pytest.raises(SourceError, match="Input/output error"):
            write(tmp_path / "file", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"] * written
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_file_that_cannot_be_removed_hides_no_error_and_goes_next_time(tmp_path, monkeypatch):
    opened = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing(os.unlink, errno.EIO, lambda *_: True))
        with pytest.raises(TypeError, match="memoryview"):
            write(tmp_path / "file", None)  # type: ignore[arg-type]
        (left,) = tmp_path.iterdir()
        assert not remove_stale(left)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert remove_stale(left, dry_run=True)
    write(tmp_path / "file", b"new")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_what_only_looks_like_a_temporary_is_left(tmp_path):
    own = {name: tmp_path / f".file.tmp-{name}" for name in ("notes", "123", "0123456789", "0000000g")}
    for path in own.values():
        path.write_bytes(b"a user's")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    (tmp_path / ".file.tmp-00000001").symlink_to(tmp_path / "folder")
    stale = tmp_path / ".file.tmp-00000002"
    stale.touch()
    before = {*os.listdir(tmp_path)}
    write(tmp_path / "file", b"new")
    assert {*os.listdir(tmp_path)} == before - {stale.name} | {"file"}
    assert os.listdir(tmp_path / "folder") == ["kept"]
    assert [is_unfinished(path) for path in (stale, *own.values())] == [True] + [False] * len(own)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".file.tmp-00000000")
    write(tmp_path / "file", b"new")
    assert sorted(os.listdir(tmp_path)) == [".file.tmp-00000000", "file"]
