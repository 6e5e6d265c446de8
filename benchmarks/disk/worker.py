"""The process that one competitor runs in, so that its memory is its own."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import machine
from benchmarks.disk.cases import make_meta_module
from benchmarks.disk.competitors import Job, Loaded, load, prepare
from benchmarks.ways import answer

_LIBRARIES = {
    "accelerate": ("accelerate",),
    "diffusers": ("diffusers.hooks",),
    # torch imports what reads an exported program when the first one is read, penstock its solver.
    "penstock": ("penstock.runtime.program", "torch.export.pt2_archive._package", "scipy.optimize"),
}


class Session:
    """The competitor of this process, which has imported its libraries and no weights yet."""

    def __init__(self, job: Job) -> None:
        for name in ("torch.export", "safetensors", *_LIBRARIES.get(job.competitor, ())):
            importlib.import_module(name)
        self._job = job
        self._facts: dict[str, float] = {}
        self.loaded = Loaded(call=lambda: None)

    def load(self) -> Callable[[str], dict[str, Any]]:
        """Load the competitor; return what runs a train of passes, `{"passes": 2, "cold": true}`.

        Its files leave the page cache first: pages that another process has cached are charged to that one,
        not to a cgroup, and what is warm later a competitor's own pass has read.
        """
        machine.drop_cache(files_of(self._job))
        module = make_meta_module(self._job.model, self._job.nbytes)
        bare = machine.read_memory()
        start = time.perf_counter()
        self.loaded = load(self._job, module)
        self._facts = {"load_seconds": time.perf_counter() - start, "bare_total": bare.total}
        machine.forget_peak()
        return lambda line: self.train(**json.loads(line))

    def train(self, passes: int, cold: bool) -> dict[str, Any]:
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
        peak = machine.read_memory().peak
        return self._facts | {"samples": samples, "output": _hash(output), "peak_total": peak}


def files_of(job: Job) -> list[Path]:
    """What a competitor may read: the weights, and what was prepared for it."""
    prepared = Path(job.folder).rglob("*") if job.folder else ()
    return [Path(job.weights), *(path for path in prepared if path.is_file())]


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
    """Prepare a competitor, or be one."""
    how, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    if how == "--prepare":
        prepare(job)
        print("null")
        return
    session = Session(job)
    answer(session.load)
    session.loaded.close()


if __name__ == "__main__":
    main()
