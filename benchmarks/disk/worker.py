"""The process that one competitor runs in, so that its memory is its own.

It answers each line of JSON with another, and computes nothing between commands: `prepare` writes
what the competitor keeps on disk, `load` makes it ready, `train` runs it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from typing import Any

from torch import Tensor

from benchmarks import machine
from benchmarks.disk.cases import make_meta_module
from benchmarks.disk.competitors import Job, Loaded, load, prepare

_LIBRARIES = {
    "accelerate": ("accelerate",),
    "diffusers": ("diffusers.hooks",),
    # torch imports what reads an exported program when the first one is read, penstock its solver.
    "penstock": ("penstock.runtime.program", "torch.export.pt2_archive._package", "scipy.optimize"),
}


class Session:
    """The state of this process: at most one competitor."""

    def __init__(self) -> None:
        self.loaded = Loaded(call=lambda: None)

    def answer(self, request: dict[str, Any]) -> object:
        """The answer to a request, as values of JSON."""
        job = Job(**request["job"])
        match request["command"]:
            case "prepare":
                prepare(job)
                return None
            case "bare":
                _import_libraries(job.competitor)
                return machine.read_memory().anonymous
            case "load":
                return self.load(job)
            case "train":
                return self.train(request["passes"], cold=request["cold"])
        raise ValueError(f"unknown command {request['command']!r}")

    def load(self, job: Job) -> dict[str, float]:
        """Load the competitor. The bare process is this one with every library in it and no weights."""
        _import_libraries(job.competitor)
        module = make_meta_module(job.model, job.nbytes)
        machine.forget_peak()
        bare = machine.read_memory()
        start = time.perf_counter()
        self.loaded = load(job, module)
        seconds = time.perf_counter() - start
        machine.forget_peak()
        return {
            "load_seconds": seconds,
            "bare_anonymous": bare.anonymous,
            "bare_total": bare.total,
        }

    def train(self, passes: int, *, cold: bool) -> dict[str, object]:
        """One pass that does not count, then `passes` that do; the method is that of benchmarks/disk."""
        loaded = self.loaded
        if cold:
            machine.drop_cache(loaded.files, unmap=loaded.unmaps)
        output = loaded.call()
        if not cold and machine.measure_cached(loaded.files) < 1:
            machine.warm_cache(loaded.files)
            output = loaded.call()
        samples = []
        for _ in range(passes):
            output = None
            gap = _cool(loaded) if cold else {}
            sample, output = _time_pass(loaded)
            samples.append(_charge_gap(gap | sample))
        _wait_until_idle(loaded)
        if cold:
            # What stays mapped here stays in the page cache for whoever reads the same file next.
            machine.drop_cache(loaded.files, unmap=loaded.unmaps)
        return {
            "samples": samples,
            "output": _hash(output),
            "peak_total": machine.read_memory().peak,
        }


def _import_libraries(competitor: str) -> None:
    for name in ("torch.export", "safetensors", *_LIBRARIES.get(competitor, ())):
        importlib.import_module(name)


def _cool(loaded: Loaded) -> dict[str, float]:
    """Make the cache cold between two passes; count what is read behind our back meanwhile."""
    start, read = time.perf_counter(), machine.read_disk_bytes()
    machine.drop_cache(loaded.files, unmap=loaded.unmaps)
    cached = machine.measure_cached(loaded.files)
    seconds = time.perf_counter() - start
    return {"cached": cached, "gap_seconds": seconds, "gap_bytes": machine.read_disk_bytes() - read}


def _time_pass(loaded: Loaded) -> tuple[dict[str, float], Tensor | None]:
    before, read = loaded.counters(), machine.read_disk_bytes()
    start = time.perf_counter()
    output = loaded.call()
    seconds = time.perf_counter() - start
    after = loaded.counters()
    sample = {"forward_seconds": seconds, "disk_bytes": machine.read_disk_bytes() - read}
    return sample | {name: after[name] - before[name] for name in after}, output


def _charge_gap(sample: dict[str, float]) -> dict[str, float]:
    """Add to a pass the time that it saved by reading on while the clock stood still.

    This is the time of these bytes at the pass's own rate, and never more than the gap.
    """
    forward = sample["forward_seconds"]
    gap, ahead = sample.get("gap_seconds", 0.0), sample.get("gap_bytes", 0)
    saved = min(gap, forward * ahead / sample["disk_bytes"]) if sample["disk_bytes"] else gap * bool(ahead)
    return sample | {"seconds": forward + saved}


def _wait_until_idle(loaded: Loaded) -> None:
    """Wait until nothing is read ahead any more, so that the next competitor has the disk to itself."""
    deadline = time.monotonic() + 30
    before = None
    while time.monotonic() < deadline:
        now = (loaded.counters(), machine.read_disk_bytes())
        if now == before:
            return
        before = now
        time.sleep(0.1)


def _hash(output: Tensor | None) -> str | None:
    import torch

    if output is None:
        return None
    return hashlib.sha256(output.contiguous().view(torch.uint8).numpy().data).hexdigest()


def main() -> None:
    """Answer standard input until it ends; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    session = Session()
    for line in sys.stdin:
        answers.write(json.dumps(session.answer(json.loads(line))) + "\n")
        answers.flush()
    session.loaded.close()


if __name__ == "__main__":
    main()
