"""Consoles for tests, and results as a demo could have found them."""

import io
from dataclasses import replace

from rich.console import Console

from examples.demo import cap, disk, processes
from examples.demo.child import Result

MIB = 1 << 20
CONSOLE = Console(file=io.StringIO())


def capture(show, width=160):
    file = io.StringIO()
    show(Console(file=file, width=width))
    return file.getvalue()


def make_runs(digest, plain=None):
    reference = Result("a" * 64, [1], 1.0, 1.0, 100 * MIB)
    streamed = replace(reference, digest=digest, moved=10**9, run_seconds=2.0, arena="mapped", readers=2)
    return cap.Runs(
        weight_bytes=100 * MIB,
        layers=2,
        hidden=128,
        cap=25 * MIB,
        cap_kind="memory cgroup, version 2",
        budget=9 * MIB,
        reference=processes.Ending(reference, 100 * MIB),
        plain=processes.Ending(plain, 25 * MIB, "killed by the kernel"),
        streamed=processes.Ending(streamed, 24 * MIB),
        disk=disk.ReadRate(0, 10**9, direct=True),
    )
