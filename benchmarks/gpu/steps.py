"""The steps of the script, in their order, and how one of them runs in a process of its own."""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


class SkippedError(Exception):
    """Something that cannot be measured here; the message is the reason."""


@dataclass(frozen=True)
class Step:
    """A function `home` ("module:name") of a Target and a Report, which may take so many seconds."""

    home: str
    seconds: int
    shows: str


STEPS = {
    "machine": Step("target:describe", 60, "what is measured, on what, with which software"),
    "suite": Step("suite:run", 60, "the suite of devices, and faults that it must find"),
    "copies": Step("copying:measure", 60, "page-locking; copies by size of piece, alone and under products"),
    "overlap": Step("overlap:measure", 60, "copies and kernels of a pass on one timeline of events"),
    "bits": Step(
        "bits:measure", 60, "equal bits at three alignments, with and without bias, 1 and 512 tokens"
    ),
    "streams": Step("passes:run_streams", 45, "passes on two streams in turn"),
    "closing": Step("passes:run_closing", 45, "closing while kernels run"),
    "graphs": Step("passes:run_graphs", 45, "decode as a graph, prefill as calls; broken and late captures"),
    "llama": Step("llama:run_budgets", 150, "a decoder of 2 GiB at three budgets, prediction and limit"),
    "replay": Step("llama:run_replay", 60, "its passes as graphs"),
    "inductor": Step("compiled:run", 90, "compiled modules and programs, streamed and not"),
    "peers": Step("llama:run_peers", 90, "accelerate and diffusers on the same decoder"),
}


def run(name: str, device: str, scale: float, limit: float) -> int:
    """Run a step here. Its lines go to the standard output that the process was started with.

    Whatever libraries print goes to the standard error, and so does what all threads are doing shortly before
    the limit. Returns the exit status: 0, or 1 behind a last line that says why the step failed.
    """
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.8 * limit)

    def report(**figures: object) -> None:
        lines.write(json.dumps({"step": name, **figures}) + "\n")

    try:
        _call(name, device, scale, report)
    except Exception as error:
        traceback.print_exc()
        report(failed=say(error))
        return 1
    return 0


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
        with target.ready():
            measure(target, report)
