"""The user's cache folder: its entries, the processes that use them, and the removal of old entries.

    weights/NAME/             weights of applied models; NAME is a hash of their bytes
    plans/NAME.json           plans; NAME is a hash of the request
    hardware.json             measured rates of this machine
    programs/, calls/         what earlier versions kept; only listed and removed

Each entry that is a folder has a record, `entry.json`, which says for which model it was made. The record's
modification time is the time of the entry's last use. A process that uses an entry holds a shared lock on its
record, which the system releases when the process ends in any way. Every entry can be made again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import tempfile
import warnings
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from penstock._version import __version__
from penstock.runtime.files.artifact_files import artifact_digest
from penstock.runtime.files.safetensors_file import close_read, reading
from penstock.runtime.system.atomic import can_others_write, make_private, remove_folder
from penstock.schedule.atomic_file import (
    is_unfinished,
    remove_stale,
    replace_file,
    write_all,
    writing_privately,
)
from penstock.schedule.bounded_file import open_regular, read_bounded
from penstock.schedule.facts.errors import PenstockError, SourceError
from penstock.schedule.facts.problem import Problem
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size
from penstock.schedule.payload.codec import Payload, plan_from_json
from penstock.schedule.plan import Plan
from penstock.schedule.planner import with_figures
from penstock.schedule.verify.proof import verify_plan

_log = logging.getLogger(__name__)

Kind = Literal["weights", "program", "call", "plan", "rates", "leftover"]

LIMIT = "PENSTOCK_CACHE_LIMIT"
"""The environment variable with the bytes that a cache may hold, such as `20GB`. Not set: no limit."""

WEIGHTS, PLANS = "weights", "plans"

_KINDS: dict[str, Kind] = {WEIGHTS: "weights", "programs": "program", "calls": "call", PLANS: "plan"}

RECORD, MADE_FOR = "entry.json", "made_for"

MOST_PLANS = 64
"""The number of plans that are kept; the least recently used ones are removed first."""

NEARNESS = 1.01
"""How much further from the bound, as a factor, decisions may be under other figures without a new search."""

_OWN = re.compile(r"[0-9a-f]{32}(\.\w+)?")
"""The names that penstock gives to entries. Files of other names are neither listed nor removed."""

_ATTEMPTS = 50
"""How often an entry is written again if other processes remove it before it can be held."""


def user_cache() -> Path:
    """The folder for machine rates, plans, and the weights of applied models. It may not exist yet.

    Where nothing can be written, as in a container with a read-only home or without one, it is a temporary
    folder, of which a warning tells.
    """
    folder = _lasting_cache()
    return folder if _can_write(folder) else _temporary_cache(folder)


def _lasting_cache() -> Path:
    home = os.path.expanduser("~")  # a tilde for a user without a home
    place = os.environ.get("XDG_CACHE_HOME") or Path(home if os.path.isabs(home) else "/", ".cache")
    return Path(place, "penstock").absolute()


def _can_write(folder: Path) -> bool:
    place = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


@lru_cache(maxsize=1)
def _temporary_cache(instead_of: Path) -> Path:
    """Return a folder of this user alone among the temporary files, and warn that it is used."""
    try:
        folder = Path(tempfile.gettempdir(), f"penstock-{os.geteuid()}")
        make_private(folder)
        if can_others_write(folder):  # somebody else has made it
            folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    except OSError:  # nothing can be written anywhere, which is an error only where something must be
        return instead_of
    warnings.warn(
        f"penstock cannot write to {instead_of}, and keeps what it remembers in {folder}: set XDG_CACHE_HOME "
        "to a folder that stays",
        RuntimeWarning,
        stacklevel=3,
    )
    return folder


def remember(path: Path, data: bytes) -> None:
    """Write a file in the user's cache. A failure is ignored, since the file can be made again."""
    with suppress(OSError, PenstockError):
        make_private(path.parent)
        with writing_privately(), replace_file(path, force=True) as fd:
            write_all(fd, data)


@dataclass(frozen=True)
class Entry:
    """An entry of the cache: its path, kind and bytes, and the time of its last use in seconds since 1970.

    `made_for` names what the entry was made for, and is empty if that is not known.
    """

    path: Path
    kind: Kind
    made_for: str
    nbytes: int
    used: float

    @property
    def in_use(self) -> bool:
        """True if a running process uses the entry or writes it."""
        with ExitStack() as locks:
            return not _locked(self, locks, make=False)


class Hold:
    """Keeps an entry in use until `close` is called or this object is garbage-collected."""

    def __init__(self, path: Path, record: int | None) -> None:
        self.path = path
        self._end = weakref.finalize(self, _let_go, record)

    def close(self) -> None:
        """Release the entry. Further calls do nothing."""
        self._end()


class Cache:
    """A cache folder to which entries are written. It may hold `limit` bytes; None stands for no limit.

    What the folder `first` has is used where it is, and nothing is written there.
    """

    def __init__(self, folder: Path, limit: int | None = None, *, first: Path | None = None) -> None:
        self.folder, self.limit, self._first = folder, limit, first or folder
        self._warned = False

    @classmethod
    def at(cls, folder: str | os.PathLike[str] | None) -> Cache:
        """The cache in a folder (None: the user's). Raises BudgetError if the limit is no size."""
        asked = os.environ.get(LIMIT)
        limit = parse_size(asked, name=LIMIT) if asked else None
        return cls(Path(folder), limit) if folder else cls(user_cache(), limit, first=_lasting_cache())

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    def place_of(self, name: str) -> Path:
        """Return the path of an entry of weights: where it is, or where it can be written."""
        there = self._first / WEIGHTS / name
        return there if there.is_dir() else self.weights / name

    def keep(
        self,
        path: Path,
        made_for: str,
        write: Callable[[], object],
        nbytes: int = 0,
        *,
        whole: Callable[[], bool] = lambda: True,
    ) -> Hold:
        """Hold the entry at `path`, which `write` makes if it does not exist.

        `whole` is asked about an entry that exists: if it is not what was written, it is removed and written
        again. If `nbytes`, the size of the entry, is given, room is made before it is written, and otherwise
        afterwards. If another process writes the entry first, that one is used, as it is equal. Raises
        SourceError if the entry cannot be written, or if it is damaged while a process uses it.
        """
        with reading(path), writing_privately():
            for _ in range(_ATTEMPTS):
                if (lock := _hold(path, made_for)) is not None:
                    if whole():
                        return lock
                    lock.close()
                    self._discard(path)
                self._write(path, write, nbytes)
                if (lock := _hold(path, made_for)) is not None:
                    self.make_room(0)
                    return lock
        raise SourceError(f"{path} was removed whenever it had been written: let nobody empty the cache now")

    def _write(self, path: Path, write: Callable[[], object], nbytes: int) -> None:
        if nbytes:
            self.make_room(nbytes)
        try:
            self.make_folder(path.parent)
        except OSError as error:
            raise SourceError(
                f"{path.parent} cannot be made ({error.strerror}): choose another cache"
            ) from error
        try:
            write()
        except SourceError as error:  # another process may have written the entry, and a third removed it
            if getattr(error.__cause__, "errno", None) not in (errno.EEXIST, errno.ENOTEMPTY):
                raise

    def make_folder(self, folder: Path) -> None:
        """Make a folder of the cache, and take the rights of others in it. Raises OSError."""
        make_private(folder)
        # An earlier version made folders as the umask said. Through a link, or where others could put one, no
        # rights are changed.
        if folder.is_symlink() or can_others_write(self.folder.resolve()):
            return
        if can_others_write(folder):
            with suppress(OSError):
                folder.chmod(0o700)

    def _discard(self, path: Path) -> None:
        """Remove a damaged entry, so that it can be written again."""
        if not _remove(_entry(path, "weights"), dry_run=False):
            raise SourceError(
                f"{path} is damaged, and a model still runs on it: restore or delete that model, or end its "
                "process, and try again, which writes the entry again"
            )
        _log.warning("%s was damaged, and is written again", path)

    def make_room(self, nbytes: int) -> None:
        """Remove the least recently used entries until `nbytes` more are within the limit.

        Entries in use stay. If the limit is still exceeded, a warning is logged once.
        """
        if self.limit is None:
            return
        done = prune(self.folder, most=self.limit - nbytes)
        if done.removed:
            _log.info("%s removed from the cache, to keep %s", format_size(done.freed_bytes), LIMIT)
        total = done.left_bytes + nbytes
        if total > self.limit and not self._warned:
            self._warned = True
            _log.warning(
                "the cache %s takes %s, and %s is %s: what is left there is in use or is being written",
                self.folder,
                format_size(total),
                LIMIT,
                format_budget(self.limit),
            )


@dataclass(frozen=True)
class Pruned:
    """The entries that were removed, those that are in use and stayed, and the bytes of all that are left."""

    removed: tuple[Entry, ...]
    in_use: tuple[Entry, ...]
    left_bytes: int

    @property
    def freed_bytes(self) -> int:
        return sum(removed.nbytes for removed in self.removed)


def list_entries(folder: Path) -> tuple[Entry, ...]:
    """The entries of a cache, the least recently used first."""
    return tuple(sorted(_entries(folder), key=lambda listed: (listed.used, listed.path)))


def prune(
    folder: Path,
    *,
    before: float = -math.inf,
    most: float = math.inf,
    dry_run: bool = False,
    only: Container[Path] | None = None,
) -> Pruned:
    """Remove leftovers of killed writers, entries last used `before` a time, and entries beyond `most` bytes.

    `before` is in seconds since 1970. With `only`, entries at other paths stay. Beyond `most` bytes, the
    least recently used entries are removed first; the rates of the machine, which are small, stay. Entries in
    use stay. A dry run removes nothing, and returns what would be removed. Raises SourceError if the system
    refuses to remove a file.
    """
    removed: list[Entry] = []
    in_use: list[Entry] = []
    with reading(folder):
        entries = list_entries(folder)
        left = sum(listed.nbytes for listed in entries)
        for listed in sorted(entries, key=lambda listed: listed.kind != "leftover"):
            if only is not None and listed.path not in only:
                continue
            beyond = left > most and listed.kind != "rates"
            if not (listed.kind == "leftover" or listed.used < before or beyond):
                continue
            if _remove(listed, dry_run=dry_run):
                removed.append(listed)
                left -= listed.nbytes
            else:
                in_use.append(listed)
    return Pruned(tuple(removed), tuple(in_use), left)


def _remove(removed: Entry, *, dry_run: bool) -> bool:
    """Remove an entry, and return True; if it is in use, leave it, and return False."""
    with ExitStack() as locks:
        if not _locked(removed, locks, make=not dry_run):
            return False
        try:
            if not dry_run:
                _remove_one(removed)
        except OSError as error:
            raise SourceError(
                f"{removed.path} cannot be removed ({error.strerror}): check its permissions"
            ) from error
    return True


def _remove_one(removed: Entry) -> None:
    with suppress(FileNotFoundError):  # another process has removed it
        if removed.kind == "leftover":
            remove_stale(removed.path)
        elif removed.path.is_dir() and not removed.path.is_symlink():
            remove_folder(removed.path)
        else:
            removed.path.unlink()


def _entries(folder: Path) -> Iterator[Entry]:
    for name, kind in _KINDS.items():
        for path in _inside(folder / name):
            if is_unfinished(path):
                yield _entry(path, "leftover")
            elif _OWN.fullmatch(path.name):
                yield _entry(path, kind)
    for path in _inside(folder):
        if path.name == "hardware.json":
            yield _entry(path, "rates")
        elif is_unfinished(path):
            yield _entry(path, "leftover")


def _inside(folder: Path) -> list[Path]:
    """What is in a folder, nothing if it is none. Raises SourceError for one that cannot be listed."""
    with reading(folder), suppress(FileNotFoundError, NotADirectoryError):
        return sorted(folder.iterdir())
    return []


def _entry(path: Path, kind: Kind) -> Entry:
    record, made_for = path / RECORD, ""
    with suppress(OSError, PenstockError, ValueError, RecursionError):
        if kind == "plan":
            made_for = _plan_made_for(path)
        else:
            stored = json.loads(read_bounded(record, "a record of the cache"))
            made_for = str(stored.get(MADE_FOR, "")) if isinstance(stored, dict) else ""
    used = 0.0
    for place in (path, record):  # the record, if there is one, is newer
        with suppress(OSError):
            used = place.stat().st_mtime
    return Entry(path, kind, made_for, _nbytes(path), used)


def _plan_made_for(path: Path) -> str:
    """What a plan says at its beginning; the rest, which may be long, is not read."""
    with open(open_regular(path), "rb") as file:
        begin = file.read(64 << 10).decode(errors="replace")
    model, _ = json.JSONDecoder().raw_decode(begin, len(f'{{"{MADE_FOR}": '))
    return model if isinstance(model, str) and begin.startswith(f'{{"{MADE_FOR}": ') else ""


def _nbytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder. A file that vanishes meanwhile counts as empty."""
    with suppress(OSError):
        if not path.is_dir():
            return path.lstat().st_size
        return sum(_nbytes(child) for child in path.iterdir() if not child.is_symlink())
    return 0


def _hold(path: Path, made_for: str) -> Hold | None:
    """Hold an entry from now on; None if it does not exist, or is being removed."""
    while path.is_dir():
        _make_record(path, made_for)
        record = _open_record(path)
        if record is None:  # in a folder that may not be written to, there are no locks
            return Hold(path, None) if path.is_dir() else None
        with suppress(OSError):  # a file system may have no locks
            fcntl.flock(record, fcntl.LOCK_SH)
        with suppress(OSError):
            if os.path.samestat(os.fstat(record), (path / RECORD).stat()):
                with suppress(OSError):
                    os.utime(record)
                return Hold(path, record)
        os.close(record)
    return None


def _make_record(path: Path, made_for: str) -> None:
    with suppress(OSError):
        record = os.open(path / RECORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(record, json.dumps({MADE_FOR: made_for}).encode() + b"\n")
        finally:
            os.close(record)


def _open_record(path: Path) -> int | None:
    """A descriptor of an entry's record; None if there is no record or it may not be read."""
    for flags in (os.O_RDWR, os.O_RDONLY):  # some file systems lock exclusively only files open for writing
        with suppress(OSError):
            return os.open(path / RECORD, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def _let_go(record: int | None) -> None:
    if record is not None:
        with suppress(OSError):
            os.utime(record)
        close_read(record)


def _locked(locked: Entry, locks: ExitStack, *, make: bool) -> bool:
    """Lock an entry's record until `locks` ends; False if it is in use. `make` makes a missing record."""
    if locked.kind == "leftover":
        return remove_stale(locked.path, dry_run=True)
    if locked.path.is_symlink() or not locked.path.is_dir():
        return True
    if make:
        _make_record(locked.path, locked.made_for)
    record = _open_record(locked.path)
    if record is None:
        return not make or not locked.path.is_dir()
    locks.callback(os.close, record)
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remembered_plan(
    folder: Path,
    payload: Payload,
    request: object,
    problem: Problem,
    *,
    budget: int,
    make: Callable[[], Plan],
) -> Plan:
    """The plan for `budget` bytes and a request: one made before, or one that `make` makes now.

    `problem` is what is planned, with the machine's present figures. Two requests, and two problems, are
    equal if their reprs are. Where only the figures differ, the decisions made before are kept if they are as
    near to the bound as they were when they were searched, to within `NEARNESS`. A plan is made anew for
    another artifact or version of penstock, and a plan from the cache is verified again. A program that is
    only in memory has no artifact, and its plans are not kept.
    """
    digest = artifact_digest(folder)
    if digest is None:
        return make()
    methods = [method.name for method in payload.methods]  # which differ by what a program keeps
    pool = problem.pool and replace(problem.pool, expected_ns=(), worst_ns=())
    asked = repr((digest, methods, request, problem.arena, pool, problem.hardware.name, __version__))
    path = user_cache() / PLANS / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    earlier, nearness = _read_plan(path, payload, budget)
    if earlier is not None and (earlier.hardware, earlier.traces) == (problem.hardware, problem.traces):
        with suppress(OSError):
            os.utime(path)
        return earlier
    plan = with_figures(earlier, problem, NEARNESS * nearness) if earlier else None
    if plan is None:
        plan = make()
        nearness = plan.predicted_ns / plan.lower_bound_ns if plan.lower_bound_ns else 0.0
    made_for = json.dumps(str(folder.absolute()))
    data = f'{{"{MADE_FOR}": {made_for}, "nearness": {nearness!r}, "plan": {plan.to_json()}}}'
    remember(path, data.encode())
    with suppress(OSError):
        _forget_oldest_plans(path.parent)
    return plan


def _read_plan(path: Path, payload: Payload, budget: int) -> tuple[Plan | None, float]:
    """Returns the plan in a file, verified, and how near to its bound it was when it was searched.

    There is no plan where none is safe and for this budget.
    """
    with suppress(OSError, PenstockError, RecursionError, ValueError, KeyError, TypeError):
        stored = json.loads(read_bounded(path, "a plan"))
        plan = plan_from_json(json.dumps(stored["plan"]).encode(), source=str(path))
        verify_plan(payload.storages, payload.traces, plan)
        if plan.budget == budget:
            return plan, float(stored["nearness"])
    return None, 0.0


def _forget_oldest_plans(folder: Path) -> None:
    plans = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in plans[:-MOST_PLANS]:
        path.unlink(missing_ok=True)
