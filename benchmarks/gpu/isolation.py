"""Runs a step in a process of its own, which may crash or hang, and hands on its lines as they come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def environment() -> dict[str, str]:
    """Where a step finds the code of this checkout, whatever penstock is installed."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def run(name: str, arguments: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the lines of a step as it prints them, and one with its outcome: "done", or "failed" and why.

    The step and all that it started are killed after so many seconds, and where the caller stops to listen.
    What it prints on its standard error is printed on the caller's.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--step", name, "--limit", str(seconds), *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=ROOT,
            env=environment(),
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(seconds, _kill, [process])
        timer.start()
        failed = ""
        try:
            assert process.stdout
            for text in process.stdout:
                if not text.endswith("\n"):
                    break  # it was killed while it wrote
                try:
                    line = json.loads(text)
                    at = line["step"]
                except (ValueError, TypeError, KeyError):
                    at = None
                if at != name:  # what Python or a package says before the step begins
                    sys.stderr.write(text)
                elif line.keys() == {"step", "failed"}:
                    failed = line["failed"]
                else:
                    yield line
            process.wait()
        finally:
            in_time = timer.is_alive()
            timer.cancel()
            _kill(process)
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        said.seek(0)
        text = said.read()
    sys.stderr.write(text)
    took = {"wall_s": round(time.monotonic() - began, 2)}
    if process.returncode == 0:
        yield {"step": name, "outcome": "done", **took}
        return
    if not in_time:
        failed = f"it was killed after its {seconds:.0f} s"
    yield {"step": name, "outcome": "failed", "reason": failed or _explain(process.returncode, text), **took}


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a step and what it has started, unless it was waited for already."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _explain(status: int, said: str) -> str:
    """Why a step ended that did not say so itself."""
    how = (
        f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"
    )
    last = said.strip().splitlines()[-1:]
    return ": ".join([how, *last])
