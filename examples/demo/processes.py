"""Runs the demo's jobs as processes of their own, with or without a cap, and tells how each ended."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from examples.demo.cgroup import MemoryGroup, make_group
from examples.demo.child import OUT_OF_MEMORY, Job, Result
from examples.demo.disk import drop_cache
from examples.demo.screen import show_progress
from penstock.schedule.facts.errors import StreamError


@dataclass(frozen=True)
class Ending:
    """The end of a process: its result, or None if it was killed; `failure` then says why.

    `peak` is the most bytes of the process's group (page cache included), or, without a group, of its
    resident set.
    """

    result: Result | None
    peak: int
    failure: str = ""


def run_capped(console: Console, job: Job, cap: int, description: str) -> tuple[Ending, str]:
    """Run the job under a cap of `cap` bytes; returns its end, and what enforced the cap."""
    with make_group(cap) as group:
        if group is not None:
            ending = run_child(console, replace(job, group=str(group.folder)), description, group)
            return ending, f"memory cgroup, version {group.version}"
        # An address-space limit counts mapped weights as memory, so only the plain run has such a limit.
        spare = cap if job.kind == "plain" else None
        return run_child(
            console, replace(job, spare_bytes=spare), description
        ), "address-space limit, plain run only"


def run_child(console: Console, job: Job, description: str, group: MemoryGroup | None = None) -> Ending:
    """Run the job in a process of its own. Raises `StreamError` if it fails for any reason but the cap."""
    drop_cache(Path(job.weights))
    command = [sys.executable, "-m", "examples.demo.child", job.to_json()]
    with (
        show_progress(console, description, job.tokens) as report,
        tempfile.TemporaryFile("w+") as complaints,
        _start(command, complaints.fileno()) as process,
    ):
        result = follow(process, report)
        status = process.wait()
        complaints.seek(0)
        trouble = complaints.read()
    peak = group.peak_bytes if group else (result.peak if result else 0)
    if status == 0 and result is not None:
        return Ending(result, peak)
    if status == -signal.SIGKILL and group is not None and group.kills:
        return Ending(None, peak, "killed by the kernel")
    if status == OUT_OF_MEMORY and job.spare_bytes is not None:
        return Ending(None, peak, "memory refused")
    last = trouble.strip().splitlines()[-1:] or ["it said nothing"]
    raise StreamError(f"{description}: the process ended with status {status} before its result: {last[0]}")


@contextlib.contextmanager
def _start(command: list[str], stderr: int) -> Iterator[subprocess.Popen[str]]:
    """Yield the process, which is killed if it has not ended when the context is left."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def follow(process: subprocess.Popen[str], report: Callable[[int], None]) -> Result | None:
    """Report the child's progress until it closes its output; returns its result, or None."""
    result = None
    assert process.stdout is not None
    for line in process.stdout:
        message = json.loads(line)
        if "token" in message:
            report(1)
        else:
            result = Result(**message["result"])
    return result
