"""What a caller may do around passes: streams of its own, closing while kernels run, and graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.target import Graph, Report, Target, WrongResultError, make_stack, require
from penstock.runtime.module import StreamedModule
from penstock.runtime.program import Program
from penstock.schedule.facts.model import Wrap

WIDTH, DEPTH = 4096, 8
DECODE, PREFILL = 1, 256
"""Tokens of a call of the two methods."""


def make(target: Target) -> tuple[nn.Module, Program]:
    """A stack on the device, and the program of its two methods."""
    width = target.width(WIDTH)
    module = target.draw(make_stack(width, DEPTH, bias=True))
    methods = {"decode": (target.normal(DECODE, width),), "prefill": (target.normal(PREFILL, width),)}
    return module, target.compile(module, methods, "passes")


def load(target: Target, program: Program, share: float, wrap: Wrap = "overlap") -> StreamedModule:
    """The program at a share of the way from the floor to all weights, with the last layer kept."""
    floor = program.floor(target.device)
    budget = floor + int(share * (program.weight_bytes - floor))
    plan = program.plan(budget, device=target.device, hardware="h200", wrap=wrap)
    return program.load(plan=plan, device=target.device)


def run_streams(target: Target, report: Report) -> None:
    """Passes on two streams in turn, which nothing orders but penstock."""
    module, program = make(target)
    calls = [target.normal(DECODE, target.width(WIDTH)) for _ in range(8)]
    expected = [module(given) for given in calls]
    streams = [torch.Stream(target.where) for _ in range(2)]
    target.finish()
    wraps: tuple[Wrap, ...] = ("overlap", "barrier")
    for share, wrap in ((share, wrap) for share in (0.0, 0.5) for wrap in wraps):
        with load(target, program, share, wrap) as streamed:
            outputs = []
            for number, given in enumerate(calls):
                with streams[number % 2]:
                    outputs.append(streamed.decode(given))
            target.finish()
            equal = all(map(torch.equal, outputs, expected))
            misses = streamed.stats.misses
        report(share=share, wrap=wrap, passes=len(calls), equal=equal, misses=misses)
        require(equal and not misses, f"passes on two streams at share {share} and wrap {wrap} went wrong")


def run_closing(target: Target, report: Report) -> None:
    """Closing while the kernels of a pass run, whose memory is then taken and overwritten."""
    module, program = make(target)
    given = target.normal(PREFILL, target.width(WIDTH))
    expected = module(given)
    stream = torch.Stream(target.where)
    target.finish()
    for share in (0.0, 0.5, 1.0):
        streamed = load(target, program, share)
        nbytes = streamed.stats.budget
        with stream:
            output = streamed.prefill(given)
        streamed.close()
        del streamed
        taken = [torch.full((nbytes // 8,), 255, dtype=torch.uint8, device=target.where) for _ in range(8)]
        target.finish()
        equal = torch.equal(output, expected)
        report(share=share, overwritten_bytes=len(taken) * (nbytes // 8), equal=equal)
        del taken
        require(equal, f"closing at share {share} gave memory away that kernels read")


class BrokenCallError(Exception):
    """Raised inside a capture, on purpose."""


def run_graphs(target: Target, report: Report) -> None:
    """Decode as a graph beside prefill as calls, an exception in a capture, and a replay after closing."""
    module, program = make(target)
    one = target.normal(DECODE, target.width(WIDTH))
    many = target.normal(PREFILL, target.width(WIDTH))
    expected = {"decode": module(one), "prefill": module(many)}
    for share in (0.0, 0.5):
        with load(target, program, share, "barrier") as streamed:
            for _ in range(2):
                streamed.decode(one)
            _break(target, partial(streamed.decode, one))
            after = torch.equal(streamed.prefill(many), expected["prefill"])
            streamed.decode(one)
            with target.graph(partial(streamed.decode, one)) as graph:
                turns = _take_turns(graph, partial(streamed.prefill, many), expected)
                streamed.close()
                # Where there is no graph, a replay is a call, which a closed module refuses.
                late = _replays(graph, expected["decode"]) if target.captures else None
        report(
            share=share,
            captured=target.captures,
            equal_after_a_broken_capture=after,
            equal=turns,
            equal_after_closing=late,
        )
        require(after and turns and late is not False, f"graphs at share {share} went wrong")


def _break(target: Target, call: Callable[[], torch.Tensor]) -> None:
    """Raise an exception inside a capture, behind a pass."""

    def fail() -> torch.Tensor:
        call()
        raise BrokenCallError

    with suppress(BrokenCallError), target.graph(fail):
        raise WrongResultError("a capture has swallowed an exception")


def _take_turns(
    graph: Graph, prefill: Callable[[], torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> bool:
    """Whether replays and calls in turn, three of each, give what is expected."""
    equal = True
    for _ in range(3):
        equal &= _replays(graph, expected["decode"])
        equal &= torch.equal(prefill(), expected["prefill"])
    return equal


def _replays(graph: Graph, expected: torch.Tensor) -> bool:
    """Whether a replay writes what is expected over zeros."""
    graph.output.zero_()
    graph.replay()
    return torch.equal(graph.output, expected)
