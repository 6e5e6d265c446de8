"""The double of the system's calls on files: built with gcc once, and told what to do.

`double.c` must be preloaded into the process that calls `Double`.
"""

import ctypes
import fcntl
import hashlib
import os
import subprocess
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_name("double.c")
BUILT = SOURCE.parents[2] / "build" / "faults"
FLAGS = ("-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


class Kind(IntFlag):
    """What a call does, as in double.c."""

    OPENS = 1
    READS = 2
    WRITES = 4
    SYNCS = 8
    NAMES = 16
    LOOKS = 32
    CLOSES = 64
    MAPS = 128
    LOCKS = 256


ALL = Kind(511)


class Action(IntEnum):
    """What happens to the call whose turn it is, as in double.c."""

    PASS = 0
    FAIL = 1
    SHORTEN = 2
    DELAY = 3
    TRUNCATE = 4
    REPLACE = 5
    KILL_BEFORE = 6
    KILL_AFTER = 7
    NOTHING = 8


@dataclass(frozen=True)
class Call:
    """A call that counted: its name, what it does, whether it changes anything, its path in the folder."""

    name: str
    kind: Kind
    writing: bool
    path: str


class _Logged(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_char * 20),
        ("kind", ctypes.c_int),
        ("writing", ctypes.c_int),
        ("path", ctypes.c_char * 232),
    )


def build():
    """Returns the library, which is compiled unless it was before."""
    state = hashlib.sha256(repr(FLAGS).encode() + SOURCE.read_bytes()).hexdigest()
    library = BUILT / f"double-{state[:16]}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run build it once
        if not library.exists():
            partial = library.with_suffix(f".{os.getpid()}")
            command = ("gcc", *FLAGS, SOURCE, "-o", partial, "-ldl")
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError as error:
                raise RuntimeError("gcc is missing: scripts/install-compiler installs it") from error
            assert not done.returncode, done.stderr
            partial.replace(library)
    return library


class Double:
    """The double in this process, and in those that it forks, or starts with its environment."""

    def __init__(self):
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.faults_logged.restype = ctypes.POINTER(_Logged)

    def arm(self, folder, kinds=ALL, *, number=-1, action=Action.PASS, value=0):
        """Have the call with a number, of the calls of these kinds in a folder, meet an action.

        `value` is the errno of a failure, the microseconds of a delay, or how many bytes a short call moves
        at most (0: half of them). A negative number only counts.
        """
        self._library.fault_arm(os.fsencode(folder), int(kinds), number, int(action), value)

    def disarm(self):
        """Count no further call. What was counted stays known until `arm`."""
        self._library.fault_rest()

    @property
    def seen(self):
        """The number of calls that counted, also in a process that has ended."""
        return int(self._library.faults_seen())

    @property
    def fired(self):
        """Whether a call met the action."""
        return bool(self._library.faults_fired())

    def call(self, number):
        """The call with a number."""
        one = self._library.faults_logged()[number]
        path = os.fsdecode(one.path).lstrip("/")
        return Call(one.call.decode(), Kind(one.kind), bool(one.writing), path)
