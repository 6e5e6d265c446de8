"""Finds out whether others could change what a path leads to, and makes folders of this user alone."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = 0
_MOST_LINKS = 40
"""The number of links that Linux follows in one path."""

_ACL, _ACL_HEAD, _ACL_ENTRY = "system.posix_acl_access", struct.Struct("<I"), struct.Struct("<HHI")
_ACL_VERSION = 2
_USER, _OWN_GROUP, _GROUP, _MASK = 0x02, 0x04, 0x08, 0x10
_WRITE, _ALL = 2, 7
_NO_ACL = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS)


def can_others_change(path: Path) -> bool:
    """Whether anybody besides this user and root could change what a path leads to.

    Each folder and each link on the way counts; what is at the path has to belong to this user. Of what does
    not exist, only the way counts. Raises OSError where the system does not say.
    """
    try:
        for place, state, leads_on in _way_to(path):
            # Whoever may write to a sticky folder (/tmp) can exchange only what is theirs.
            if _is_open(place, state, sticky=leads_on and bool(state.st_mode & stat.S_ISVTX)):
                return True
    except FileNotFoundError:
        return False
    return state.st_uid != os.geteuid()


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


def _way_to(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield each folder and link on the way to a path, its status, and whether the way leads on from it."""
    first, *names = path.absolute().parts
    left, place, followed = names[::-1], Path(first), 0
    yield place, place.lstat(), bool(left)
    while left:
        name = left.pop()
        if name == os.pardir:
            place = place.parent
            continue
        state = (place / name).lstat()
        yield place / name, state, bool(left)
        if not stat.S_ISLNK(state.st_mode):
            place /= name
            continue
        followed += 1
        if followed > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = (place / name).readlink()
        place = Path(target.anchor) if target.anchor else place
        left += [part for part in target.parts if part != target.anchor][::-1]


def _is_open(place: Path, state: os.stat_result, *, sticky: bool) -> bool:
    """Whether anybody besides this user and root owns a path or may write to it."""
    owners = (os.geteuid(), _ROOT)
    if state.st_uid not in owners:
        return True
    if stat.S_ISLNK(state.st_mode) or sticky:
        return False
    if state.st_mode & stat.S_IWOTH:
        return True
    entries = _access_list(place)
    mask = next((rights for tag, rights, _ in entries if tag == _MASK), _ALL)
    if not entries and state.st_mode & stat.S_IWGRP:
        entries = [(_OWN_GROUP, _WRITE, 0)]
    for tag, rights, number in entries:
        group = state.st_gid if tag == _OWN_GROUP else number
        if not rights & mask & _WRITE:
            continue
        if (tag == _USER and number not in owners) or (
            tag in (_OWN_GROUP, _GROUP) and not _is_private(group)
        ):
            return True
    return False


def _access_list(place: Path) -> list[tuple[int, int, int]]:
    """Return the tag, the rights and the number of each entry of a POSIX access list, if there is one."""
    if not hasattr(os, "getxattr"):
        return []
    try:
        data = os.getxattr(place, _ACL)
    except OSError as error:
        if error.errno in _NO_ACL:
            return []
        raise
    if len(data) % _ACL_ENTRY.size != _ACL_HEAD.size or _ACL_HEAD.unpack_from(data)[0] != _ACL_VERSION:
        raise OSError(errno.EINVAL, "it has an access list of an unknown form", os.fspath(place))
    return list(_ACL_ENTRY.iter_unpack(data[_ACL_HEAD.size :]))


def _is_private(group: int) -> bool:
    """Whether a group is that of this user alone, as systems make them that let groups write by default."""
    with suppress(KeyError):
        own_group, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
        return own_group.gr_name == user and set(own_group.gr_mem) <= {user}
    return False
