"""Ways to do the same work, each in a process that answers line by line, in a memory group or not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.demo.cgroup import MemoryGroup, make_group


class Job(Protocol):
    """What one process does: a frozen dataclass that JSON can hold, with the name of the way."""

    @property
    def way(self) -> str:
        """The name of the way."""


class Way:
    """The process of one way: `script --serve JOB`, in a control group if there is one.

    It answers with a line of JSON once it has loaded, which has the bytes of a bare process as `bare`, and
    with one for each line that it is sent.
    """

    def __init__(self, script: str, job: Any, group: Path | None) -> None:
        command = [sys.executable, script, "--serve", json.dumps(dataclasses.asdict(job))]
        if group is not None:
            command = ["/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        self.steps: list[dict[str, Any]] = []
        self.failure = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        loaded = self._answer()
        self.bare = int(loaded["bare"]) if loaded else 0

    def step(self, how: str) -> None:
        if self.failure:
            return
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin
            self._process.stdin.write(f"{how}\n")
            self._process.stdin.flush()
        answer = self._answer()
        if answer is not None:
            self.steps.append(answer)

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):  # and not what a library says
                answer: dict[str, Any] = json.loads(line)
                return answer
        assert self._process.stderr
        status, said = self._process.wait(), self._process.stderr.read().strip().splitlines()
        self.failure = "was killed" if status == -9 else (said or [f"ended with status {status}"])[-1][:100]
        return None

    def close(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def started(script: str, jobs: Sequence[Job], limit: int | None) -> Iterator[dict[str, Way]]:
    """The processes of all ways, each in a control group of `limit` bytes beside a bare process."""
    with contextlib.ExitStack() as stack:
        ways = {}
        for job in jobs:
            group: MemoryGroup | None = None
            if limit is not None:
                with contextlib.closing(Way(script, job, None)) as bare:
                    group = stack.enter_context(make_group(bare.bare + limit))
            folder = group.folder if group else None
            ways[job.way] = stack.enter_context(contextlib.closing(Way(script, job, folder)))
        yield ways
