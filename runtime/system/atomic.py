"""Writes files and folders atomically: a path holds the old one or the complete new one, whatever happens.

Everything is built under a temporary name beside its target, flushed to the disk and renamed. The
writer holds a lock on the temporary, so that a later writer can tell one left by a killed process
from one in use, and remove it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.schedule.facts.errors import SourceError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replace_file(path: Path, *, force: bool) -> Iterator[int]:
    """Yields a descriptor to write to; the file replaces `path` when the block ends without an error.

    Raises SourceError if `path` exists and `force` is not given, or where the system refuses.
    """
    with _reporting(path):
        _refuse_existing(path, force=force)
        with _temporary(path, _create_file) as (temporary, fd):
            yield fd
            os.fsync(fd)
            _refuse_existing(path, force=force)
            os.replace(temporary, path)
            _sync_folder(path.parent)


def write_artifact(
    folder: Path, *, force: bool, build: Callable[[Path], None], marker: str = "payload.json"
) -> None:
    """Make `folder` from what `build` writes into the empty folder it is given.

    An existing output is refused unless `force`, and even then unless it is empty or holds
    `marker`, so that a mistyped path costs nobody a home directory. Raises SourceError where the
    output is refused or the system fails; whatever `build` raises passes through.
    """
    folder = Path(os.path.realpath(folder))
    with _reporting(folder):
        _recover(folder)
        _refuse_existing(folder, force=force)
        if force:
            _refuse_foreign(folder, marker)
        with _temporary(folder, _create_folder) as (temporary, _):
            build(temporary)
            _sync_tree(temporary)
            if force and folder.exists():
                _exchange(temporary, folder)
            else:
                # Fails if somebody else has made the folder meanwhile.
                os.rename(temporary, folder)
            _sync_folder(folder.parent)


def check_output(path: Path, *, force: bool, marker: str | None = None) -> None:
    """Raise SourceError, before any work is done, where `replace_file` would raise it.

    With a `marker`, it is raised where `write_artifact` would raise it.
    """
    path = path if marker is None else Path(os.path.realpath(path))
    _refuse_existing(path, force=force)
    if marker is not None:
        _refuse_foreign(path, marker)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise SourceError(f"{path.parent} is no folder that can be written to; choose another output")


def remove_folder(folder: Path) -> None:
    """Remove a folder in one step, so that nobody finds a part of it. Raises OSError where that fails."""
    aside = _sibling(folder, "tmp")
    os.rename(folder, aside)
    _remove(aside)


def is_unfinished(path: Path) -> bool:
    """Tells whether a path has the name of what is being written, or of what a killed writer left."""
    return path.name.startswith(".") and ".tmp-" in path.name


def remove_stale(path: Path, *, dry_run: bool = False) -> bool:
    """Remove what a killed writer left, and return True; return False where a live writer is still at work.

    A dry run removes nothing and returns the same.
    """
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not dry_run:
                _remove(path)
            return True
        finally:
            os.close(fd)
    return False


@contextmanager
def _reporting(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not target.parent.is_dir():
            raise SourceError(f"{target} could not be written: there is no folder {target.parent}") from error
        raise SourceError(
            f"{target} could not be written ({error}); what was there before is unchanged: "
            "check the space left and the permissions, then try again"
        ) from error


def _refuse_existing(path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        raise SourceError(
            f"{path} exists; choose another output, or overwrite it with --force (force=True)"
        ) from FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))


def _refuse_foreign(folder: Path, marker: str) -> None:
    if not folder.exists() or (folder / marker).exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise SourceError(f"{folder} is not an artifact and will not be overwritten; choose another output")


@contextmanager
def _temporary(target: Path, create: Callable[[Path], int | None]) -> Iterator[tuple[Path, int]]:
    """Yields a locked temporary file or folder beside `target`, which is removed at the end."""
    for stale in _siblings(target, "tmp"):
        remove_stale(stale)
    temporary, fd = _create_locked(target, create)
    try:
        yield temporary, fd
    finally:
        _remove(temporary)
        os.close(fd)


def _create_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _create_folder(path: Path) -> int | None:
    """A descriptor of the new folder; None where another writer took it for stale at once."""
    path.mkdir()
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _create_locked(target: Path, create: Callable[[Path], int | None]) -> tuple[Path, int]:
    while True:
        path = _sibling(target, "tmp")
        fd = create(path)
        if fd is None:
            continue
        # A file system without locks will do, but then nobody removes what a killed writer left.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        # Another writer may have taken the file for stale between its creation and its lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return path, fd
        os.close(fd)


def _sibling(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{purpose}-{secrets.token_hex(4)}")


def _siblings(target: Path, purpose: str) -> list[Path]:
    prefix = f".{target.name}.{purpose}-"
    return [path for path in target.parent.iterdir() if path.name.startswith(prefix)]


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _exchange(new: Path, old: Path) -> None:
    """Put `new` in the place of `old`, and remove `old`."""
    if exchange_paths(new, old):
        return  # The old folder now has the temporary's name, and is removed with it.
    aside = _sibling(old, "old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except BaseException:
        os.rename(aside, old)
        raise
    _remove(aside)


def _recover(folder: Path) -> None:
    """Put back an artifact that a process killed between the two renames of `_exchange` left aside."""
    if not folder.parent.is_dir():
        raise SourceError(f"{folder.parent} is not a folder that exists; create it, or choose another output")
    for aside in _siblings(folder, "old"):
        if folder.exists():
            remove_stale(aside)
        else:
            os.rename(aside, folder)


def exchange_paths(first: Path, second: Path) -> bool:
    """Swap two paths in one step, and return True; return False where the system cannot do that.

    Only Linux can, and not every file system there. Raises OSError where it fails otherwise.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(first), None, os.fspath(second))


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(root, name), os.O_RDONLY)
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
