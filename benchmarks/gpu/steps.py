"""The steps of the script, in their order, and how one of them runs in a process of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


class SkippedError(Exception):
    """Something that cannot be measured here; the message is the reason."""


@dataclass(frozen=True)
class Step:
    """A function `home` ("module:name") of a Target and a Report, which may take so many seconds."""

    home: str
    seconds: int
    shows: str


STEPS = {
    "machine": Step("target:describe", 45, "what is measured, on what, with which software"),
    "suite": Step("suite:run", 45, "the suite of devices, and faults that it must find"),
    "copies": Step("copying:measure", 30, "page-locking; copies by size of piece, alone and under products"),
    "bits": Step(
        "bits:measure", 20, "equal bits at three alignments, with and without bias, 1 and 512 tokens"
    ),
    "overlap": Step("overlap:measure", 20, "copies and kernels of a pass on one timeline of events"),
    "llama": Step("llama:run_budgets", 90, "a decoder of 2 GiB at four budgets, prediction and limit"),
    "replay": Step("llama:run_replay", 30, "its passes as graphs"),
    "host": Step("hosting:measure", 25, "the calling thread's time for a streamed step, called and replayed"),
    "disk": Step("disk:measure", 30, "a decoder of which the host holds half, the rest comes from the disk"),
    "peers": Step(
        "peers:run", 75, "accelerate and diffusers on the same decoder, penstock within their bytes"
    ),
    "graphs": Step("passes:run_graphs", 15, "decode as a graph, prefill as calls; broken and late captures"),
    "inductor": Step("compiled:run", 40, "compiled modules and programs, streamed and not"),
    "streams": Step("passes:run_streams", 15, "passes on two streams in turn"),
    "closing": Step("passes:run_closing", 15, "closing while kernels run"),
}
"""Those up to `llama` fit a run of 270 s that begins with the installation of wheels; the rest, a second."""


NEED_STREAMS = ("copies", "overlap", "peers", "inductor", "streams", "closing")
"""Steps that a simulated device skips: it has no streams, events or memory of torch's."""


def run(name: str, device: str, scale: float, limit: float) -> int:
    """Run a step here. Its lines go to the standard output that the process was started with.

    Whatever libraries print goes to the standard error, and so does what all threads are doing shortly before
    the limit. Returns the exit status: 0, or 1 behind a last line that says why the step failed.
    """
    end_with_parent()
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.8 * limit)

    def report(**figures: object) -> None:
        lines.write(json.dumps({"step": name, **figures}) + "\n")

    try:
        _call(name, device, scale, report)
    except SkippedError as reason:
        report(skipped=str(reason))
    except Exception as error:
        traceback.print_exc()
        report(failed=say(error))
        return 1
    return 0


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends: a step of a killed run would keep its memory."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def say(error: Exception) -> str:
    """An error on one line: its type, and the first line of what it says."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"


def _call(name: str, device: str, scale: float, report: Callable[..., None]) -> None:
    import torch

    from benchmarks.gpu.target import Target

    module, _, function = STEPS[name].home.partition(":")
    measure: Any = getattr(import_module(f"benchmarks.gpu.{module}"), function)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        target = Target(device, scale, Path(folder))
        if target.is_simulated and name in NEED_STREAMS:
            raise SkippedError("a simulated device has no streams of torch's")
        with target.ready():
            measure(target, report)
