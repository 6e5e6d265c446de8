"""Whether copies and kernels run at the same time, told by events of their own streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.target import Report, Target, make_stack, require
from penstock.runtime.device.accelerator import AcceleratorDevice
from penstock.runtime.device.protocol import Move
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest

WIDTH, DEPTH, TOKENS = 4096, 16, 512
"""A stack of half a gibibyte."""

SHARES = (0.0, 0.25, 0.5)
"""Budgets, as shares of the way from the floor to all weights."""

PASSES = 3

Interval = tuple[float, float]
"""From and to, in milliseconds since a pass began."""


@dataclass
class Timeline:
    """Events before and after each copy, and around each time that kernels wait for one."""

    origin: torch.Event | None = None
    copies: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)
    waits: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)

    def intervals(self, pairs: Iterable[tuple[torch.Event, torch.Event]]) -> list[Interval]:
        assert self.origin is not None
        return [(self.origin.elapsed_time(start), self.origin.elapsed_time(stop)) for start, stop in pairs]


def watched(kind: type[AcceleratorDevice], timeline: Timeline) -> type[AcceleratorDevice]:
    """A device of a kind whose copies and waits are put on a timeline."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def copy(self, stream: Any, target: torch.Tensor, moves: Sequence[Move], label: object) -> None:
            start = mark(self, stream)
            super().copy(stream, target, moves, label)
            timeline.copies.append((start, mark(self, stream)))

        def _wait(self, stream: Any, event: Any) -> None:
            if stream != self.current_stream():
                super()._wait(stream, event)
                return
            start = mark(self, stream)
            super()._wait(stream, event)
            timeline.waits.append((start, mark(self, stream)))

    return Watched


def mark(device: AcceleratorDevice, stream: Any) -> torch.Event:
    event = torch.Event(device.torch_device, enable_timing=True)
    event.record(stream)
    return event


def measure(target: Target, report: Report) -> None:
    """One line for each budget: how long the copies and the kernels of a pass took, and how long both did."""
    module = target.draw(make_stack(target.width(WIDTH), DEPTH, bias=True))
    given = target.normal(TOKENS, target.width(WIDTH))
    expected = module(given)
    program = target.compile(module, {"forward": (given,)}, "overlap")
    floor = program.floor(target.device)
    with target.plan_sizes():
        budgets = (floor + int(share * (program.weight_bytes - floor)) for share in SHARES)
        plans = [program.plan(budget, device=target.device, wrap="overlap") for budget in budgets]
    opened = target.open()
    opened.close()
    for share, plan in zip(SHARES, plans, strict=True):
        timeline = Timeline()
        device = watched(type(opened), timeline)(target.device)
        with load_module(program, plan, LoadRequest(device=target.device), device=device) as streamed:
            equal = torch.equal(streamed(given), expected)
            for _ in range(PASSES):
                timeline.copies.clear()
                timeline.waits.clear()
                timeline.origin = mark(device, device.current_stream())
                streamed(given)
                ended = mark(device, device.current_stream())
            target.finish()
            ms = timeline.origin.elapsed_time(ended)  # type: ignore[union-attr]
            copying = timeline.intervals(timeline.copies)
            computing = outside(timeline.intervals(timeline.waits), ms)
            figures = summary(copying, computing)
            report(share=share, budget=plan.budget, ms=ms, transfers=len(copying), equal=equal, **figures)
        require(equal, f"the output at share {share} is not the resident module's")


def outside(intervals: Iterable[Interval], stop: float) -> list[Interval]:
    """What is left of 0 to `stop` outside of intervals that stand in order."""
    found, at = [], 0.0
    for start, end in intervals:
        found.append((at, start))
        at = end
    return [(start, end) for start, end in [*found, (at, stop)] if end > start]


def summary(copying: Sequence[Interval], computing: Sequence[Interval]) -> dict[str, float]:
    """Milliseconds of both, of their intersection, and its share of the shorter one."""
    both = sum(
        max(0.0, min(copied[1], computed[1]) - max(copied[0], computed[0]))
        for copied in copying
        for computed in computing
    )
    each = [sum(stop - start for start, stop in intervals) for intervals in (copying, computing)]
    hidden = both / min(each) if min(each) else 1.0
    return {"copying_ms": each[0], "computing_ms": each[1], "both_ms": both, "hidden": hidden}
