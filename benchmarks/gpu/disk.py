"""Weights from the disk through page-locked memory to the device: the host holds half of a decoder."""

from __future__ import annotations

from functools import partial
from statistics import median

import torch

from benchmarks.gpu.llama import Cell
from benchmarks.gpu.target import Report, Target, require
from benchmarks.machine import drop_cache

SHARES = (0.0, 0.5)
"""Budgets, as shares of the way from the floor to all weights."""


def measure(target: Target, report: Report) -> None:
    """Report a line for each budget: one token with the artifact out of the page cache, then in it."""
    cell = Cell(target, 1)
    program = cell.compile()
    cell.release()
    half = program.weight_bytes // 2
    for share in SHARES:
        plan = cell.plan(program, share, host_memory=half)
        staged = sum(plan.schedules[0].staged)
        with program.load(plan=plan, device=target.device) as streamed:
            equal = torch.equal(streamed(cell.given), cell.expected)
            call = partial(streamed, cell.given)
            for cached in (False, True):
                before = streamed.stats
                times = []
                for _ in range(3):
                    if not cached:
                        drop_cache(file for file in program.path.rglob("*") if file.is_file())
                    times.append(target.seconds(call))
                after = streamed.stats
                seconds = median(times)
                report(
                    share=share,
                    cached=cached,
                    weights=program.weight_bytes,
                    host_memory=half,
                    pinned_bytes=after.pinned_bytes,
                    staged_bytes=staged,
                    staged_bytes_per_s=staged / seconds,
                    planned_disk_bytes_per_s=plan.hardware.disk_bytes_per_s,
                    stall_s=(after.stall_seconds - before.stall_seconds) / len(times),
                    misses=after.misses - before.misses,
                    equal=equal,
                    **(figures := cell.figures(plan, seconds)),
                    reading_s=(reading := staged / (plan.hardware.disk_bytes_per_s or 1)),
                    over_disk_limit=seconds / max(reading, figures["resident_s"], figures["copying_s"]),
                )
        require(equal, "a decoder from the disk has not the bits of the resident one")
        require(after.misses == 0, "the plan missed weights")
        require(after.pinned_bytes <= half, "the host holds more than host_memory allows")
