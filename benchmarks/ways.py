"""Ways to do the same work, each in a process that answers line by line, in a memory group or not.

A script starts itself once for each way. That process says how much memory it takes before it has loaded
anything, loads when it is told to, and then takes one step for each line that it is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import typer

from benchmarks.machine import read_memory
from examples.demo.cgroup import MemoryGroup, make_group
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size

_SCRATCH = "penstock-ways-"
_POLL = 0.05
"""Seconds between two looks at the memory of a process at work; one look takes 30 microseconds."""

PASSIVE = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of one way that wait do not spin on the cores that another way needs."""


class Job(Protocol):
    """What one process does: a frozen dataclass that JSON can hold, with the name of the way."""

    @property
    def way(self) -> str:
        """The name of the way."""


def run_apart(module: str, *arguments: str, **environment: str) -> Any:
    """Run `python -m module` with these arguments, and return the last line of its output, which is JSON.

    Raises StreamError where the process fails, or is killed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    if done.returncode:
        killed = ["killed by the kernel"]
        last = (killed if done.returncode < 0 else done.stderr.strip().splitlines() or killed)[-1]
        raise StreamError(f"the process ended with {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def answer(load: Callable[[], Callable[[str], dict[str, Any]]]) -> None:
    """Be the process of a way: `load` returns what answers a line with facts that JSON can hold."""
    print(json.dumps({"bare": read_memory().anonymous}), flush=True)
    if not sys.stdin.readline():
        return
    step = load()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(step(line.strip())), flush=True)


class Way:
    """The process of one way: `python -m module --serve JOB`, in a control group or not, not yet loaded.

    `bare` has its anonymous bytes before it loads, `peak_anonymous` the most since, by samples, `steps` what
    it has answered since, and `failure` what it said before it ended too early; then it takes no more steps.
    Close it.
    """

    def __init__(
        self, module: str, job: Any, group: Path | None, environment: Mapping[str, str] = PASSIVE
    ) -> None:
        command = [sys.executable, "-m", module, "--serve", json.dumps(dataclasses.asdict(job))]
        if group is not None:
            command = ["/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        self.steps: list[dict[str, Any]] = []
        self.failure = ""
        self.peak_anonymous = 0
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | environment,
        )
        said = self._read()
        self.bare = int(said["bare"]) if said else 0

    def load(self) -> None:
        """Have it load its weights."""
        self._ask("load")

    def step(self, how: str) -> None:
        """Have it take one step, and note what it answers."""
        said = self._ask(how)
        if said is not None:
            self.steps.append(said)

    def _ask(self, line: str) -> dict[str, Any] | None:
        if self.failure:
            return None
        answered = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(answered,))
        sampler.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                assert self._process.stdin
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()
            return self._read()
        finally:
            answered.set()
            sampler.join()

    def _sample(self, answered: threading.Event) -> None:
        while not answered.wait(_POLL):
            with contextlib.suppress(OSError):
                self.peak_anonymous = max(self.peak_anonymous, read_memory(self._process.pid).anonymous)

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # and not what a library says
                said: dict[str, Any] = json.loads(line)
                return said
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()
        self.failure = "was killed" if status == -9 else (last or [f"ended with status {status}"])[-1][:100]
        return None

    def close(self) -> None:
        """Let the process end, and wait until it has."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def started(
    module: str, jobs: Sequence[Job], limits: Mapping[str, int], environment: Mapping[str, str] = PASSIVE
) -> Iterator[dict[str, Way]]:
    """The processes of all ways, loaded one after another.

    A way that `limits` has bytes for runs in a control group of these and its bare process, page cache
    included. Raises typer.BadParameter where no group can be made.
    """
    with contextlib.ExitStack() as stack:
        ways = {}
        for job in jobs:
            group: MemoryGroup | None = None
            if job.way in limits:
                with contextlib.closing(Way(module, job, None, environment)) as alone:
                    bare = alone.bare
                group = stack.enter_context(make_group(bare + limits[job.way]))
                if group is None:
                    raise typer.BadParameter("no memory group can be made here: run as root, or without")
            folder = group.folder if group else None
            ways[job.way] = stack.enter_context(contextlib.closing(Way(module, job, folder, environment)))
            ways[job.way].load()
        yield ways


def in_turn(ways: Mapping[str, Way], number: int) -> list[str]:
    """The names of the ways in the order of a round, which begins with another one each time."""
    names = list(ways)
    return names[number % len(names) :] + names[: number % len(names)]


@contextlib.contextmanager
def scratch(nbytes: int, base: Path | None = None) -> Iterator[Path]:
    """A new folder in `base` for `nbytes` bytes of files, which are removed at the end.

    SIGTERM ends the process as an interrupt does, and so removes them, too. What a run that was killed
    otherwise has left is removed by the next. Raises typer.BadParameter where the disk has too little room.
    """
    base = Path(tempfile.gettempdir() if base is None else base)
    for left in base.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError), _locked(left):  # the lock of a run that goes on is taken
            shutil.rmtree(left)
    free = shutil.disk_usage(base).free
    if free < nbytes:
        raise typer.BadParameter(
            f"this writes {format_size(nbytes)} and there are {format_size(free)} at {base}: give another "
            "--folder, or fewer layers or ways"
        )
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=base) as folder, _locked(Path(folder)):
            yield Path(folder)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock of a folder, which ends with the process; raises OSError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
