"""What a folder holds: changes show, and it can be put back with the same inodes and times."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

UNFINISHED = re.compile(r"\..+\.tmp-[0-9a-f]+")
"""The names that docs/testing.md allows for what a killed run leaves."""


@dataclass(frozen=True)
class _File:
    data: bytes
    inode: int
    mtime_ns: int
    link: Path


class State:
    """The files of a folder as they are now; `aside` keeps a second name of each."""

    def __init__(self, folder, aside):
        self._folder, self._files = folder, dict[str, _File]()
        self._folders = {name for name, path in _walk(folder) if path.is_dir()}
        aside.mkdir(parents=True)
        for number, (name, path) in enumerate(_walk(folder)):
            if path.is_dir():
                continue
            link = aside / str(number)
            os.link(path, link)
            status = path.stat()
            self._files[name] = _File(path.read_bytes(), status.st_ino, status.st_mtime_ns, link)

    def changes(self):
        """The names of files that are lost, of those with other bytes, and of what is new."""
        found = dict(_walk(self._folder))
        lost = [name for name in self._files if name not in found]
        other = [name for name, one in self._files.items() if name in found and not self._is_same(name, one)]
        return lost, other, [name for name in found if name not in self._files and name not in self._folders]

    def restore(self):
        """Give all files their bytes, inodes and times again, and remove what is new."""
        for name in self.changes()[2]:
            path = self._folder / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for name in sorted(self._folders):
            (self._folder / name).mkdir(exist_ok=True)
        for name, one in self._files.items():
            path = self._folder / name
            if not path.exists() or path.stat().st_ino != one.inode:
                path.unlink(missing_ok=True)
                os.link(one.link, path)
            if not self._is_same(name, one):
                path.write_bytes(one.data)
            os.utime(path, ns=(one.mtime_ns, one.mtime_ns))

    def put_back(self, name):
        """Give one file its bytes, inode and time again, if it was there and was not written again since.

        Beside what was written again the old bytes would be damage: an archive has the time of its writing.
        """
        path = self._folder / name
        one = self._files.get(name)
        if one is not None and path.parent.is_dir() and not (path.exists() and self._is_new(path, one.data)):
            one.link.write_bytes(one.data)
            os.utime(one.link, ns=(one.mtime_ns, one.mtime_ns))
            again = one.link.with_suffix(".again")
            os.link(one.link, again)
            os.replace(again, path)  # a reader may still be at the double's own file
            again.unlink(missing_ok=True)

    def holds(self, name):
        """Whether a file was there."""
        return name in self._files

    @staticmethod
    def _is_new(path, old):
        """Whether a file is neither the old one, nor what the double makes of that."""
        half = len(old) // 2
        return path.read_bytes() not in (old, old[:half], old[:half] + bytes(one ^ 1 for one in old[half:]))

    def _is_same(self, name, one):
        path = self._folder / name
        status = path.stat()
        known = (one.inode, len(one.data), one.mtime_ns)
        return (status.st_ino, status.st_size, status.st_mtime_ns) == known or path.read_bytes() == one.data


def _walk(folder):
    """All that a folder holds, by the path in it; folders come before what they hold."""
    for path in sorted(folder.rglob("*")):
        yield str(path.relative_to(folder)), path
