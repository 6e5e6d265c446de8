"""Writes folders, and several files at once, atomically: a path has the old or all of the new content.

Everything is built under a temporary name beside its target, as `schedule/atomic_file.py` does for a file,
and flushed to the disk before it gets its place. Also makes folders of this user alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from penstock.schedule.atomic_file import (
    PRIVATE,
    create_file,
    publish,
    refuse_existing,
    remove,
    remove_stale,
    rename_by_rule,
    reporting,
    settle,
    sibling,
    siblings,
    sync,
    sync_folder,
    temporary,
)
from penstock.schedule.facts.errors import SourceError

_EXCHANGE = 2


def write_artifact(
    folder: Path, *, force: bool, build: Callable[[Path], None], marker: str = "payload.json"
) -> None:
    """Make `folder` from what `build` writes into the empty folder it is given.

    An existing output is refused unless `force`, and even then unless it is empty or holds
    `marker`, so that a mistyped path costs nobody a home directory. Raises SourceError where the
    output is refused or the system fails; whatever `build` raises passes through.
    """
    folder = Path(os.path.realpath(folder))
    with reporting(folder):
        _recover(folder)
        refuse_existing(folder, force=force)
        if force:
            _refuse_foreign(folder, marker)
        with temporary(folder, _create_folder) as (unfinished, _):
            build(unfinished)
            _sync_tree(unfinished)
            if force and folder.exists():
                _exchange(unfinished, folder)
            else:
                # Fails if somebody else has made the folder meanwhile.
                os.rename(unfinished, folder)
            settle(folder)


@contextmanager
def replace_files(paths: Sequence[Path], *, force: bool) -> Iterator[list[int]]:
    """Yields a descriptor to write to for each path of a folder; at the end all are replaced, in order.

    What fails leaves every file as it was. A kill between two replacements leaves the first ones new. Raises
    SourceError if one exists and `force` is not given, if one is a folder, or where the system refuses.
    """
    with ExitStack() as opened, ExitStack() as undo:
        written: list[tuple[Path, Path, int]] = []
        for path in paths:
            with reporting(path):
                _recover(path)
                refuse_existing(path, force=force)
                _refuse_folder(path)
                written.append((path, *opened.enter_context(temporary(path, create_file))))
        yield [fd for *_, fd in written]
        for path, _, fd in written:
            with reporting(path):
                os.fsync(fd)
        for path, unfinished, fd in written:
            with reporting(path):
                _refuse_folder(path)
                if force and os.path.lexists(path):
                    opened.enter_context(_kept(path))
                    undo.callback(_put_back, path, fd, unfinished)
                    _exchange(unfinished, path)
                else:
                    undo.callback(_put_back, path, fd, None)
                    publish(unfinished, path, force=False)
        undo.pop_all()
        settle(paths[-1])


def _refuse_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        raise SourceError(f"{path} is a folder and will not be overwritten; choose another output")


@contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Lock a file that is about to be exchanged, so that nobody takes it for stale under its new name."""
    fd = -1
    try:
        with suppress(OSError):  # what may not be opened, or is a link to nowhere
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        if fd >= 0:
            with suppress(OSError):  # nothing was written by it
                os.close(fd)


def _put_back(path: Path, fd: int, old: Path | None) -> None:
    """Give a path what it held before, which `old` has, if it holds the file of a descriptor by now."""
    with reporting(path):
        if os.path.lexists(path) and os.path.samestat(os.lstat(path), os.fstat(fd)):
            if old is None:
                os.unlink(path)
            else:
                _exchange(old, path)


def check_output(path: Path, *, force: bool, marker: str | None = None) -> None:
    """Raise SourceError where `replace_file` (with a `marker`: `write_artifact`) would, before any work."""
    path = path if marker is None else Path(os.path.realpath(path))
    with reporting(path):
        refuse_existing(path, force=force)
        if marker is not None:
            _refuse_foreign(path, marker)
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise SourceError(f"{path.parent} is no folder that can be written to; choose another output")


def remove_folder(folder: Path) -> None:
    """Remove a folder in one step, so that nobody finds a part of it. Raises OSError where that fails."""
    aside = sibling(folder, "tmp")
    os.rename(folder, aside)
    remove(aside)


def _refuse_foreign(folder: Path, marker: str) -> None:
    if not folder.exists() or (folder / marker).exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise SourceError(f"{folder} is not an artifact and will not be overwritten; choose another output")


def _create_folder(path: Path) -> int | None:
    """A descriptor of the new folder; None where another writer took it for stale at once."""
    path.mkdir(0o700 if PRIVATE.get() else 0o777)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except BaseException:
        path.rmdir()
        raise


def _exchange(new: Path, old: Path) -> None:
    """Swap a temporary and what it replaces, which then has the temporary's name and is removed with it."""
    if exchange_paths(new, old):
        return
    aside = sibling(old, "old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        os.rename(aside, old)
        raise
    os.rename(aside, new)


def _recover(path: Path) -> None:
    """Put back what a process killed between the first two renames of `_exchange` left aside."""
    if not path.parent.is_dir():
        raise SourceError(f"{path.parent} is not a folder that exists; create it, or choose another output")
    for aside in siblings(path, "old"):
        if path.exists():
            remove_stale(aside)
        else:
            os.rename(aside, path)


def exchange_paths(first: Path, second: Path) -> bool:
    """Swap two paths in one step; False where the system cannot. Raises OSError where it fails."""
    return rename_by_rule(first, second, _EXCHANGE)


def _sync_tree(folder: Path) -> None:
    def refuse(error: OSError) -> None:  # which os.walk leaves out without a word
        raise error

    for root, _, names in os.walk(folder, topdown=False, onerror=refuse):
        if PRIVATE.get():
            os.chmod(root, 0o700)
        for name in names:
            if PRIVATE.get():
                os.chmod(Path(root, name), 0o600)
            sync(Path(root, name), os.O_RDONLY)
        sync_folder(Path(root))


def can_others_write(folder: Path) -> bool:
    """Whether a folder is a link or another user's, or others may write to it. Raises OSError.

    Whom an access list lets write shows in the bits of the group, which are then the mask of the list.
    """
    state = folder.lstat()
    mine = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
    return not mine or bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def make_private(folder: Path) -> None:
    """Make a folder, and the way to it, for this user alone, whatever the umask. Raises OSError."""
    if folder.is_dir():
        return
    if not folder.parent.exists():
        make_private(folder.parent)
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    folder.chmod(0o700)
