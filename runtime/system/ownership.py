"""Makes folders of this user alone, and tells whether others may write to one."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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
