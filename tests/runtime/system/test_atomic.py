import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.runtime.system import atomic
from penstock.runtime.system.atomic import exchange_paths, replace_files, write_artifact
from penstock.schedule import atomic_file
from penstock.schedule.atomic_file import replace_file
from penstock.schedule.facts.errors import SourceError

OLD = {"first": b"old", "last": b"old"}

NAMES = ("payload.json", "program/code.txt", "weights.bin")


def build(generation):
    def write(folder):
        (folder / "program").mkdir()
        for name in NAMES:
            (folder / name).write_text(generation)

    return write


def generations(folder):
    """What the files of a whole artifact hold; a file that is missing raises."""
    return {(folder / name).read_text() for name in NAMES}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "model.penstock"


@pytest.fixture(params=["exchange", "two renames"])
def renaming(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "exchange_paths", lambda first, second: False)


@pytest.mark.usefixtures("renaming")
def test_writes_and_replaces(output):
    write_artifact(output, force=False, build=build("old"))
    assert generations(output) == {"old"}
    with pytest.raises(SourceError, match=r"model.penstock exists; .*--force"):
        write_artifact(output, force=False, build=build("new"))
    assert generations(output) == {"old"}
    write_artifact(output, force=True, build=build("new"))
    assert generations(output) == {"new"}
    assert os.listdir(output.parent) == [output.name]


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError(28, "No space left on device")])
def test_failure_leaves_what_was_there(output, error):
    def fail(folder):
        build("new")(folder)
        raise error

    expected = SourceError if isinstance(error, OSError) else error
    assert isinstance(expected, type)
    with pytest.raises(expected):
        write_artifact(output, force=False, build=fail)
    assert os.listdir(output.parent) == []
    write_artifact(output, force=False, build=build("old"))
    with pytest.raises(expected):
        write_artifact(output, force=True, build=fail)
    assert generations(output) == {"old"}
    assert os.listdir(output.parent) == [output.name]


def test_a_folder_that_cannot_be_listed_is_not_taken_for_flushed(output, monkeypatch):
    real = os.scandir

    def refuse(path):
        if str(path).endswith("program"):
            raise OSError(5, "Input/output error")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(SourceError, match="Input/output error"):
            write_artifact(output, force=False, build=build("new"))
    write_artifact(output, force=False, build=build("new"))
    assert os.listdir(output.parent) == [output.name]


def test_failed_second_rename_puts_the_old_one_back(output, monkeypatch):
    write_artifact(output, force=False, build=build("old"))
    monkeypatch.setattr(atomic, "exchange_paths", lambda first, second: False)
    real = os.rename

    def fail(first, second):
        if ".tmp-" in first.name:
            raise OSError(5, "Input/output error")
        real(first, second)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(SourceError, match="could not be written"):
        write_artifact(output, force=True, build=build("new"))
    assert generations(output) == {"old"}
    assert os.listdir(output.parent) == [output.name]


def test_a_folder_that_only_looks_left_aside_is_no_artifact(output):
    notes = output.with_name(f".{output.name}.old-notes")
    notes.mkdir()
    write_artifact(output, force=False, build=build("new"))
    assert generations(output) == {"new"}
    assert notes.is_dir()


def test_force_replaces_only_artifacts(output):
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    with pytest.raises(SourceError, match="is not an artifact and will not be overwritten"):
        write_artifact(output, force=True, build=build("new"))
    assert os.listdir(output) == ["thesis.txt"]
    (output / "thesis.txt").unlink()
    write_artifact(output, force=True, build=build("new"))
    assert generations(output) == {"new"}


def test_force_refuses_a_file(output):
    output.write_text("a file")
    with pytest.raises(SourceError, match="is not an artifact"):
        write_artifact(output, force=True, build=build("new"))
    assert output.read_text() == "a file"


def test_a_link_keeps_pointing_at_the_artifact(output):
    write_artifact(output, force=False, build=build("old"))
    link = output.with_name("link")
    link.symlink_to(output)
    write_artifact(link, force=True, build=build("new"))
    assert link.is_symlink()
    assert generations(output) == {"new"}


def test_no_parent(output):
    with pytest.raises(SourceError, match="not a folder that exists"):
        write_artifact(output / "deeper", force=False, build=build("new"))


def test_system_that_refuses(output, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SourceError, match=r"could not be written .*Permission denied"):
        write_artifact(output, force=False, build=build("new"))


@pytest.fixture
def disk(output, monkeypatch):
    disk = Disk(output)
    monkeypatch.setattr(os, "fsync", disk.flushing(os.fsync))
    published = (atomic_file, "rename_by_rule")
    for where, name in ((os, "rename"), (os, "replace"), (atomic, "exchange_paths"), published):
        monkeypatch.setattr(where, name, disk.naming(getattr(where, name)))
    return disk


class Disk:
    """Notes what was flushed by the time that something takes the name of the output, and what was not."""

    def __init__(self, output):
        self.output = output
        self.flushed = set()
        self.early = []
        self.named = 0

    def flushing(self, flush):
        def noted(fd):
            flush(fd)
            self.flushed.add(os.fstat(fd).st_ino)

        return noted

    def naming(self, rename):
        def noted(new, old, *rule):
            if old == self.output:
                every = (new, *new.rglob("*"))
                self.early += [one.name for one in every if one.stat().st_ino not in self.flushed]
            renamed = rename(new, old, *rule)
            if old == self.output and renamed is not False:
                self.flushed.clear()
                self.named += 1
            return renamed

        return noted

    def check(self):
        assert self.named
        assert self.early == []
        assert self.output.parent.stat().st_ino in self.flushed, "the name may be lost"


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_is_on_the_disk_before_it_has_its_name(output, disk, force):
    if force:
        write_artifact(output, force=False, build=build("old"))
        disk.flushed.clear()
    write_artifact(output, force=force, build=build("new"))
    disk.check()
    assert generations(output) == {"new"}


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_on_the_disk_before_it_has_its_name(output, disk, force):
    for content in (b"old", b"new") if force else (b"new",):
        with replace_file(output, force=force) as fd:
            os.write(fd, content)
    disk.check()
    assert output.read_bytes() == b"new"


def write_both(paths, content):
    with replace_files(paths, force=True) as fds:
        for fd in fds:
            os.write(fd, content)


@pytest.mark.usefixtures("renaming")
@pytest.mark.parametrize("there", [(), ("first",), ("first", "last")])
def test_of_several_files_all_are_replaced_or_none(there, tmp_path, monkeypatch):
    paths = [tmp_path / "first", tmp_path / "last"]
    for name in there:
        (tmp_path / name).write_bytes(b"old")
    refused = []

    def refusing(call):
        def refuse(new, old, *rule):
            if ".tmp-" in str(new) and str(old).endswith("last"):
                refused.append(call.__name__)
                raise OSError(5, "Input/output error")
            return call(new, old, *rule)

        return refuse

    calls = (os, "rename"), (os, "replace"), (atomic, "exchange_paths"), (atomic_file, "rename_by_rule")
    with monkeypatch.context() as patch:
        for where, name in calls:
            patch.setattr(where, name, refusing(getattr(where, name)))
        with pytest.raises(SourceError, match=r"last could not be written .* is unchanged"):
            write_both(paths, b"new")
    assert len(refused) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(there, b"old")
    write_both(paths, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"first": b"new", "last": b"new"}


@pytest.fixture
def two(tmp_path):
    """Two files that are there."""
    paths = [tmp_path / name for name in OLD]
    for path in paths:
        path.write_bytes(b"old")
    return paths


@pytest.mark.usefixtures("renaming")
def test_an_interrupt_between_two_replacements_leaves_all_as_they_were(two, tmp_path, monkeypatch):
    exchange = atomic._exchange

    def interrupted(new, old):
        exchange(new, old)
        if ".tmp-" in new.name and old.read_bytes() == b"new":
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_both(two, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == OLD


def test_what_is_to_be_put_back_is_not_stale_for_another_writer(two, tmp_path, monkeypatch):
    exchange = atomic._exchange

    def refusing(new, old):
        if old.name == "last":
            removed = [atomic_file.remove_stale(one) for one in atomic_file.siblings(two[0], "tmp")]
            assert removed == [False]
            raise OSError(5, "Input/output error")
        exchange(new, old)

    monkeypatch.setattr(atomic, "_exchange", refusing)
    with pytest.raises(SourceError, match="last could not be written"):
        write_both(two, b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == OLD


@pytest.mark.parametrize("name", ["first", "last"])
def test_a_folder_in_the_place_of_one_of_several_files_is_kept(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis").write_bytes(b"mine")
    with pytest.raises(SourceError, match=f"{name} is a folder and will not be overwritten"):
        write_both([tmp_path / "first", tmp_path / "last"], b"new")
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [b"mine"]


def test_several_files_are_on_the_disk_before_one_of_them_has_its_name(output, disk):
    write_both([output, output.with_name("last")], b"new")
    disk.check()


def test_none_of_several_files_is_replaced_unasked(tmp_path):
    (tmp_path / "last").write_bytes(b"old")
    refused = pytest.raises(SourceError, match="last exists")
    with refused, replace_files([tmp_path / "first", tmp_path / "last"], force=False):
        pytest.fail("nothing is to be written")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"last": b"old"}


def test_stale_temporaries_are_removed_and_live_ones_kept(output):
    stale = output.with_name(f".{output.name}.tmp-00000000")
    other = output.with_name(".other.penstock.tmp-00000000")
    for folder in (stale, other):
        folder.mkdir()
        (folder / "file").touch()

    def build_inside(folder):
        # Another writer of the same output, while this one is at work.
        write_artifact(output, force=False, build=build("first"))
        assert folder.exists()
        build("second")(folder)

    with pytest.raises(SourceError, match="could not be written"):
        write_artifact(output, force=False, build=build_inside)
    assert generations(output) == {"first"}
    assert sorted(os.listdir(output.parent)) == sorted([output.name, other.name])


def test_what_a_kill_between_two_renames_left_aside_is_put_back(output):
    write_artifact(output, force=False, build=build("old"))
    os.rename(output, output.with_name(f".{output.name}.old-00000000"))
    with pytest.raises(SourceError, match="exists"):
        write_artifact(output, force=False, build=build("new"))
    assert generations(output) == {"old"}


def test_exchange_paths(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.write_text("file")
    if exchange_paths(first, second):
        assert first.read_text() == "file"
        assert second.is_dir()
    else:
        assert first.is_dir()
    with pytest.raises(OSError, match="No such file"):
        exchange_paths(first, tmp_path / "gone")


WRITER = """
import itertools, sys
from pathlib import Path
from test_atomic import build
from penstock.runtime.system import atomic
if sys.argv[2] == "two renames":
    atomic.exchange_paths = lambda first, second: False
print("ready", flush=True)
for generation in itertools.count():
    atomic.write_artifact(Path(sys.argv[1]), force=True, build=build(str(generation)))
"""


@pytest.mark.parametrize("renames", ["exchange", "two renames"])
def test_killed_at_any_time(output, renames):
    random.seed(7)
    write_artifact(output, force=False, build=build("old"))
    path = os.pathsep.join([str(Path(atomic.__file__).parents[3]), str(Path(__file__).parent)])
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(output), renames],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(random.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        if renames == "exchange" or output.exists():
            assert len(generations(output)) == 1
    write_artifact(output, force=True, build=build("last"))
    assert generations(output) == {"last"}
    assert os.listdir(output.parent) == [output.name]


def test_what_was_there_is_replaced_though_the_system_complains_when_it_is_closed(tmp_path, monkeypatch):
    path, real, complained = tmp_path / "out", os.close, []
    path.write_bytes(b"old")

    def close(fd):
        name = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        if name.startswith(f"{tmp_path}/.out.tmp-"):  # which the old file is called by then
            complained.append(name)
            raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with replace_files([path], force=True) as (fd,):
            os.write(fd, b"new")
    assert len(complained) == 1
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("out", b"new")]
