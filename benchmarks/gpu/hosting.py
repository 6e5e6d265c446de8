"""What the calling thread does to enqueue a streamed step: many small linears, one token."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.gpu.passes import load
from benchmarks.gpu.target import Report, Target, make_stack, require

WIDTH, DEPTH = 1024, 128
"""Linears of 2 MiB."""

SHARES = (1.0, 0.0, 0.5, 0.9)
"""Budgets, as shares of the way from the floor to all weights. The first, without streams, is subtracted."""


def measure(target: Target, report: Report) -> None:
    """Report a line for each budget: microseconds of the host for a call, a replay, a streamed step."""
    width = target.width(WIDTH)
    module = target.draw(make_stack(width, DEPTH if target.scale == 1 else 8, bias=False))
    given = target.normal(1, width)
    expected = module(given)
    program = target.compile(module, {"forward": (given,)}, "host")
    resident: dict[str, float] = {}
    for share in SHARES:
        with load(target, program, share) as streamed:
            steps = len(streamed._weights.probed(0))
            equal = torch.equal(streamed(given), expected)
            called, processor = enqueue_us(target, partial(streamed, given))
            misses = streamed.stats.misses
        with load(target, program, share, "barrier") as streamed:
            for _ in range(2):
                streamed(given)
            with target.graph(partial(streamed, given)) as graph:
                replayed, _ = enqueue_us(target, graph.replay)
                equal &= torch.equal(graph.output, expected)
        figures = {"call_us": called, "call_processor_us": processor, "replay_us": replayed}
        resident = resident or figures
        added = {
            f"{name.removesuffix('_us')}_us_a_streamed_step": (us - resident[name]) / max(1, steps)
            for name, us in figures.items()
        }
        report(share=share, streamed_steps=steps, captured=target.captures, **figures, **added, equal=equal)
        require(equal and not misses, f"a stack of many steps went wrong at share {share}")


def enqueue_us(target: Target, call: Callable[[], object]) -> tuple[float, float]:
    """Return the median microseconds of a call on an idle device, which ends when all is enqueued.

    The first are of the clock, the second of the processor: in their difference, the thread waits.
    """
    wall, processor = [], []
    for _ in range(3 * target.rounds):
        target.finish()
        clocks = time.perf_counter(), time.thread_time()
        call()
        wall.append(time.perf_counter() - clocks[0])
        processor.append(time.thread_time() - clocks[1])
    target.finish()
    return median(wall) * 1e6, median(processor) * 1e6
