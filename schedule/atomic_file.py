"""Writes files atomically: a path holds the old file or the complete new one, whatever happens.

Everything is built under a temporary name beside its target, `.NAME.tmp-` and eight hexadecimal digits,
flushed to the disk and put in its place. The writer holds a lock on the temporary, so that a later writer can
tell one left by a killed process from one in use, and remove it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from penstock.schedule.facts.errors import SourceError

_AT_FDCWD = -100
_NOREPLACE = 1

_DIGITS = "[0-9a-f]{8}"
"""What the names of temporaries end in, as a pattern."""

_WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)
"""What file systems say that have no locks."""


PRIVATE: ContextVar[bool] = ContextVar("PRIVATE", default=False)
"""Whether what is written is for this user alone, and not for those whom umask and access lists admit."""


@contextmanager
def writing_privately() -> Iterator[None]:
    """Write files and folders for this user alone while the context lasts."""
    before = PRIVATE.set(True)
    try:
        yield
    finally:
        PRIVATE.reset(before)


@contextmanager
def replace_file(path: Path, *, force: bool) -> Iterator[int]:
    """Yield a descriptor of what becomes `path` at the end. Raises SourceError if it exists: see `force`."""
    with reporting(path):
        refuse_existing(path, force=force)
        with temporary(path, create_file) as (unfinished, fd):
            yield fd
            os.fsync(fd)
            publish(unfinished, path, force=force)
            settle(path)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a descriptor: the system may take fewer at once. Raises OSError where it refuses."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


def is_unfinished(path: Path) -> bool:
    """Tells whether a path has the name of what is being written, or of what a killed writer left."""
    return re.fullmatch(rf"\..+\.tmp-{_DIGITS}", path.name, re.DOTALL) is not None


def remove_stale(path: Path, *, dry_run: bool = False) -> bool:
    """Remove what a killed writer left, and return True; return False where a live writer is still at work.

    A dry run removes nothing and returns the same. What the system refuses to remove stays, for which False
    is returned, and so does what no writer makes: a link, or a pipe, which would be waited for.
    """
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(fd).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not dry_run:
                remove(path)
            return True
        finally:
            os.close(fd)
    return False


@contextmanager
def reporting(target: Path) -> Iterator[None]:
    """Raise SourceError for what the system refuses while `target` is written under another name."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            if not target.parent.is_dir():
                raise SourceError(
                    f"{target} could not be written: there is no folder {target.parent}"
                ) from error
        raise SourceError(
            f"{target} could not be written ({error}); what was there before is unchanged: "
            "check the space left and the permissions, then try again"
        ) from error


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise SourceError if there is something at `path` and `force` is not given."""
    if os.path.lexists(path) and not force:
        raise SourceError(
            f"{path} exists; choose another output, or overwrite it with --force (force=True)"
        ) from FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))


@contextmanager
def temporary(target: Path, create: Callable[[Path], int | None]) -> Iterator[tuple[Path, int]]:
    """Yields a locked temporary file or folder beside `target`, which is removed at the end.

    `create` makes it and returns a descriptor, or None where another writer took it for stale at once. What
    killed writers of the same target left is removed first.
    """
    for stale in siblings(target, "tmp"):
        remove_stale(stale)
    unfinished, fd = _create_locked(target, create)
    try:
        yield unfinished, fd
    finally:
        _abandon(unfinished, fd)


def create_file(path: Path) -> int:
    """A descriptor of a new file, to write to and to read from."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if PRIVATE.get() else 0o666)


def publish(unfinished: Path, path: Path, *, force: bool) -> None:
    """Give a file its name. Raises SourceError if that is taken and `force` is not given."""
    if force:
        os.replace(unfinished, path)
        return
    try:
        if not rename_by_rule(unfinished, path, _NOREPLACE):
            refuse_existing(path, force=False)  # the name may be taken before the next call
            os.replace(unfinished, path)
    except FileExistsError:
        refuse_existing(path, force=False)
        raise


def settle(path: Path) -> None:
    """Flush the name of what has just got its place. Raises SourceError where the disk may not have it."""
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise SourceError(
            f"{path} is written, and the system does not say that the disk has it ({error}): check the disk, "
            "then write it again with --force (force=True)"
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync(path: Path, flags: int) -> None:
    """Flush what a path holds to the disk, opened with `flags`."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sibling(target: Path, purpose: str) -> Path:
    """A new hidden name beside a target, which says what it is for."""
    return target.with_name(f".{target.name}.{purpose}-{secrets.token_hex(4)}")


def siblings(target: Path, purpose: str) -> list[Path]:
    """What there is under such names, and under no others: `.NAME.tmp-notes` is a user's."""
    name = re.compile(rf"{re.escape(f'.{target.name}.{purpose}-')}{_DIGITS}")
    return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]


def remove(path: Path) -> None:
    """Remove a file, or a folder and all that is in it, also while others do. Raises OSError."""
    with suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    while path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def _create_locked(target: Path, create: Callable[[Path], int | None]) -> tuple[Path, int]:
    while True:
        path = sibling(target, "tmp")
        fd = create(path)
        if fd is None:
            continue
        try:
            _lock(fd)
            # Another writer may have taken the file for stale between its creation and its lock.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return path, fd
        except BaseException:
            _abandon(path, fd)
            raise
        os.close(fd)


def _lock(fd: int) -> None:
    """Lock a file. One on a file system without locks will do: nobody can then take it for stale."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise


def _abandon(path: Path, fd: int) -> None:
    """Remove a temporary, and let go of it; what the system refuses to remove, the next writer removes."""
    with suppress(OSError):
        remove(path)
    with suppress(OSError):  # what it holds is flushed, or not wanted
        os.close(fd)


def rename_by_rule(first: Path, second: Path, rule: int) -> bool:
    """Rename a path in one step by a rule of renameat2(2); return False where the system cannot do that.

    Only Linux can, and not every file system there. Raises OSError where it fails otherwise.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), rule) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(first), None, os.fspath(second))
