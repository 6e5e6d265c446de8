"""A decoder of Llama's shape: streamed at four budgets, and replayed as a graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.target import Report, Target, require
from examples.demo.llama import choose_shape, make_meta_decoder
from penstock.runtime.program import Program
from penstock.schedule.facts.model import Wrap
from penstock.schedule.plan import Plan

WEIGHTS = 2 << 30
SHARES = (0.0, 0.5, 0.9, 1.0)
"""Budgets, as shares of the way from the floor to all weights."""

TOKENS = (1, 512)


class Cell:
    """The decoder on the device, its program for a number of tokens, and what it must compute."""

    def __init__(self, target: Target, tokens: int) -> None:
        self.target, self.tokens = target, tokens
        self.module = target.draw(make_meta_decoder(choose_shape(target.nbytes(WEIGHTS))))
        vocabulary = next(self.module.parameters()).shape[0]
        self.given = torch.arange(tokens, device=target.where)[None] * 7919 % vocabulary
        self.expected = self.module(self.given)
        self.resident_s = target.usual_seconds(partial(self.module, self.given))

    def release(self) -> None:
        """Give the resident module's memory back, so that the driver's count is of what streams."""
        del self.module
        self.target.empty_cache()

    def plan(
        self, program: Program, share: float, wrap: Wrap = "overlap", host_memory: int | None = None
    ) -> Plan:
        floor = program.floor(self.target.device)
        budget = floor + int(share * (program.weight_bytes - floor))
        return self.plan_within(program, budget, wrap, host_memory)

    def plan_within(
        self, program: Program, budget: int, wrap: Wrap = "overlap", host_memory: int | None = None
    ) -> Plan:
        device = self.target.device
        with self.target.plan_sizes():
            return program.plan(budget, device=device, wrap=wrap, host_memory=host_memory)

    def compile(self) -> Program:
        return self.target.compile(self.module, {"forward": (self.given,)}, "llama")

    def figures(self, plan: Plan, seconds: float) -> dict[str, Any]:
        """A time beside the prediction, the time with everything resident, and the limit.

        The limit is the larger of that time and the time of the copies alone. `hidden` is the share of the
        shorter of the two that the longer hides: 1 where both overlap all the time, 0 where they alternate.
        """
        copying = plan.streamed_bytes / plan.hardware.link_bytes_per_s
        shorter, limit = sorted((self.resident_s, copying))
        return {
            "tokens": self.tokens,
            "budget": plan.budget,
            "seconds": seconds,
            "predicted_s": plan.predicted_seconds,
            "resident_s": self.resident_s,
            "copying_s": copying,
            "over_prediction": seconds / plan.predicted_seconds,
            "over_limit": seconds / limit,
            "hidden": (limit + shorter - seconds) / shorter if shorter else 1.0,
        }


def run_budgets(target: Target, report: Report) -> None:
    """A line for each number of tokens and each budget, with a prediction from measured steps as well."""
    for tokens in TOKENS:
        cell = Cell(target, tokens)
        program = cell.compile()
        cell.release()
        for share in SHARES:
            plan = cell.plan(program, share)
            target.empty_cache()
            before = target.taken()
            with program.load(plan=plan, device=target.device) as streamed:
                equal = torch.equal(streamed(cell.given), cell.expected)
                seconds = target.usual_seconds(partial(streamed, cell.given))
                trace, stats, taken = streamed.measure(cell.given), streamed.stats, target.taken()
            again = program.plan(
                plan.budget, device=target.device, hardware=plan.hardware, traces=[trace], wrap=plan.wrap
            )
            report(
                share=share,
                weights=program.weight_bytes,
                **cell.figures(plan, seconds),
                predicted_from_measured_steps_s=again.predicted_seconds,
                held_bytes=stats.peak_bytes,
                driver_bytes=taken - before,
                activation_bytes=program.activation_bytes,
                link_bytes_per_s=plan.hardware.link_bytes_per_s,
                misses=stats.misses,
                equal=equal,
            )
            require(equal, "the streamed decoder has not the bits of the resident one")
            require(stats.misses == 0, "the plan missed weights")
            require(stats.peak_bytes <= plan.budget, "more is held than the budget allows")


def run_replay(target: Target, report: Report) -> None:
    """A line for each budget: one token, captured as a graph and replayed."""
    cell = Cell(target, 1)
    program = cell.compile()
    for share in SHARES:
        plan = cell.plan(program, share, "barrier")
        with program.load(plan=plan, device=target.device) as streamed:
            for _ in range(2):
                streamed(cell.given)
            called = target.usual_seconds(partial(streamed, cell.given))
            with target.graph(partial(streamed, cell.given)) as graph:
                seconds = target.usual_seconds(graph.replay)
                equal = torch.equal(graph.output, cell.expected)
        report(
            share=share, captured=target.captures, **cell.figures(plan, seconds), called_s=called, equal=equal
        )
        require(equal, "a replayed pass has not the bits of the resident decoder")
