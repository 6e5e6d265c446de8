"""The handle by which the benchmark drives the process of one competitor."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.disk.competitors import Job
from benchmarks.machine import read_memory

_ROOT = Path(__file__).resolve().parents[2]
_POLL = 0.05
"""Seconds between two looks at the memory of a process at work; one look takes 30 microseconds."""


class WorkerError(Exception):
    """A competitor's process that failed or died; the message ends with the last line it left in its log."""


class Worker:
    """Starts the process, inside the memory cgroup `group` where one is given. Close it."""

    def __init__(self, job: Job, log: Path, *, group: Path | None = None) -> None:
        self.job = job
        self.peak_anonymous = 0
        self._log = log
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "benchmarks.disk.worker"]
        if group:
            # Joined before Python starts, so that all its memory is counted.
            command = ["/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | {"PYTHONPATH": path},
            )

    def ask(self, command: str, **arguments: object) -> Any:
        """Send a command and return its answer, sampling the anonymous peak meanwhile; raises WorkerError."""
        assert self._process.stdin
        assert self._process.stdout
        request = {"command": command, "job": dataclasses.asdict(self.job), **arguments}
        answered = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(answered,))
        sampler.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            answered.set()
            sampler.join()
        if not answer:
            raise WorkerError(self._explain(command))
        return json.loads(answer)

    def _sample(self, answered: threading.Event) -> None:
        while not answered.wait(_POLL):
            try:
                held = read_memory(self._process.pid).anonymous
            except OSError:
                return
            self.peak_anonymous = max(self.peak_anonymous, held)

    def _explain(self, command: str) -> str:
        status = self._process.wait()
        reason = "was killed" if status == -9 else f"ended with status {status}"
        tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        said = tail if status > 0 else []
        return ": ".join([f"{self.job.competitor} {reason} during {command!r}", *said])

    def close(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(timeout=30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
