"""One run of the decoder in a process of its own, which may be capped.

The only argument of this module is the job as JSON. Standard output carries one JSON object a line:
`{"token": n}` after each pass, and `{"result": {...}}` at the end.
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

from examples.demo.cgroup import join_group

if TYPE_CHECKING:
    from torch import Tensor

    from examples.demo.llama import Shape


OUT_OF_MEMORY = 75
"""The exit status of a run that got no more memory because of its address-space limit."""


@dataclass(frozen=True)
class Job:
    """The run of a decoder: `plain`, with the weights in ordinary memory, or `streamed` from the artifact.

    `group` is the folder of a memory cgroup to join first. If there is no group, `spare_bytes` limits the
    address space beyond that of the bare process.
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
    """The results of a run. A plain run has no values from `moved` on.

    `digest` is the sha256 of the logits of all passes, and `peak` the largest resident set in bytes. `moved`
    is the bytes copied while the tokens were made, without those copied by loading.
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
        join_group(Path(job.group))  # before torch is imported, so that all memory of this process counts
    import torch

    from examples.demo.llama import Shape

    if job.spare_bytes is not None:
        _limit_address_space(job.spare_bytes)
    torch.set_grad_enabled(False)
    shape = Shape(job.hidden, job.layers, job.vocabulary)
    try:
        result = _run_plain(job, shape) if job.kind == "plain" else _run_streamed(job)
    except (MemoryError, RuntimeError, SystemError) as error:
        # The type depends on what asked for memory: Python, torch, or a C function that sets no error.
        refused = not isinstance(error, RuntimeError) or "memory" in str(error)
        if job.spare_bytes is None or not refused:
            raise
        return OUT_OF_MEMORY
    print(json.dumps({"result": asdict(result)}), flush=True)
    return 0


def _run_plain(job: Job, shape: Shape) -> Result:
    from examples.demo.llama import load_decoder

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
    """Make the tokens with `call`; the result has what the streamed module's `stats` counted meanwhile."""
    import torch

    from examples.demo.llama import generate, make_prompt

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
    """The largest resident set so far, in bytes, or 0; after an exec, `getrusage` has the parent's."""
    try:
        status = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)


def _limit_address_space(spare_bytes: int) -> None:
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
