"""One run of the decoder in a process of its own, which may be capped.

The job is this module's one argument, as JSON. Standard output carries a JSON object a line:
`{"token": n}` after each pass, and at the end `{"result": {...}}`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.demo.cgroup import join_group

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.demo.llama import Shape


OUT_OF_MEMORY = 75
"""Exit status of a run to which the address-space limit refused memory."""


@dataclass(frozen=True)
class Job:
    """What to run: `plain` from the weights file in ordinary memory, or `streamed` from the artifact.

    `group` is the folder of a memory cgroup to join first. `spare_bytes` caps, where there is no
    group, the address space beyond what the bare process has taken.
    """

    kind: Literal["plain", "streamed"]
    hidden: int
    layers: int
    vocabulary: int
    weights: str
    artifact: str
    budget: int
    tokens: int
    group: str | None = None
    spare_bytes: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Result:
    """What a run reports. Times in seconds; `moved` and the rest of the last row are zero when plain.

    `digest` is the sha256 of the logits of every pass, `peak` the largest resident set. `moved`
    counts the bytes copied while the tokens were made, not what loading had copied before.
    """

    digest: str
    tokens: list[int]
    load_seconds: float
    run_seconds: float
    peak: int
    moved: int = 0
    misses: int = 0
    stall_seconds: float = 0.0
    arena: str = ""
    readers: int = 0


def main() -> int:
    job = Job(**json.loads(sys.argv[1]))
    if job.group is not None:
        join_group(Path(job.group))  # before torch: all that this process takes counts
    import torch

    from penstock.demo.llama import Shape

    if job.spare_bytes is not None:
        _limit_address_space(job.spare_bytes)
    torch.set_grad_enabled(False)
    shape = Shape(job.hidden, job.layers, job.vocabulary)
    try:
        result = _run_plain(job, shape) if job.kind == "plain" else _run_streamed(job)
    except (MemoryError, RuntimeError, SystemError) as error:
        # Which of them depends on who asked: Python, torch, or a C function that forgot to say.
        refused = not isinstance(error, RuntimeError) or "memory" in str(error)
        if job.spare_bytes is None or not refused:
            raise
        return OUT_OF_MEMORY
    print(json.dumps({"result": asdict(result)}), flush=True)
    return 0


def _run_plain(job: Job, shape: Shape) -> Result:
    from penstock.demo.llama import load_decoder

    start = time.perf_counter()
    decoder = load_decoder(shape, Path(job.weights))
    return _generate(job, decoder, time.perf_counter() - start)


def _run_streamed(job: Job) -> Result:
    import penstock

    start = time.perf_counter()
    with penstock.open(job.artifact).load(budget=job.budget) as module:
        load_seconds = time.perf_counter() - start
        return _generate(job, module, load_seconds, stats=lambda: module.stats)


def _generate(job: Job, call: Any, load_seconds: float, stats: Callable[[], Any] | None = None) -> Result:
    """Make the tokens with `call`, and report what the streamed module's `stats` counted meanwhile."""
    import torch

    from penstock.demo.llama import generate, make_prompt

    digest = hashlib.sha256()
    done = 0

    def report(logits: Tensor) -> None:
        nonlocal done
        done += 1
        digest.update(logits.contiguous().view(torch.uint8).numpy().data)
        print(json.dumps({"token": done}), flush=True)

    moved_before = stats().bytes_moved if stats else 0
    start = time.perf_counter()
    tokens = generate(call, make_prompt(job.vocabulary), job.tokens, report)
    seconds = time.perf_counter() - start
    result = Result(digest.hexdigest(), tokens, load_seconds, seconds, _read_peak())
    if stats is None:
        return result
    after = stats()
    return replace(
        result,
        moved=after.bytes_moved - moved_before,
        misses=after.misses,
        stall_seconds=after.stall_seconds,
        arena=str(after.arena),
        readers=after.readers,
    )


def _read_peak() -> int:
    """The largest resident set of this process so far, in bytes; 0 where the system does not say.

    Not `getrusage`: after an exec it still counts what the parent held.
    """
    try:
        status = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)


def _limit_address_space(spare_bytes: int) -> None:
    """Refuse this process more than `spare_bytes` of address space beyond what it has."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
