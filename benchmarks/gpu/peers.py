"""Other libraries on the decoder of llama.py, and penstock within the memory that each of them takes."""

from __future__ import annotations

import copy
import gc
import traceback
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.llama import TOKENS, Cell
from benchmarks.gpu.steps import SkippedError, say
from benchmarks.gpu.target import Report, Target, on_host, require
from penstock.runtime.program import Program

ATTEMPTS = 3
"""Runs of penstock until its memory is at most a peer's."""


def offload_with_accelerate(module: nn.Module, where: torch.device) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, execution_device=where)


def offload_with_diffusers(module: nn.Module, where: torch.device, kind: str) -> None:
    from diffusers.hooks import apply_group_offloading

    if where.type not in ("cuda", "xpu"):
        raise SkippedError("diffusers copies on streams of cuda and xpu alone")
    apply_group_offloading(
        module,
        onload_device=where,
        offload_device=torch.device("cpu"),
        offload_type=kind,
        use_stream=True,
        **({"num_blocks_per_group": 1} if kind == "block_level" else {}),
    )


PEERS: dict[str, Callable[[nn.Module, torch.device], None]] = {
    "accelerate": offload_with_accelerate,
    "diffusers, blocks": partial(offload_with_diffusers, kind="block_level"),
    "diffusers, leaves": partial(offload_with_diffusers, kind="leaf_level"),
}


def run(target: Target, report: Report) -> None:
    """Report a line for each number of tokens and each peer, then one for penstock within the peer's memory.

    Peers hold all weights in the host's memory. One that fails is a line, and fails the step at the end.
    """
    failed = []
    for tokens in TOKENS:
        cell = Cell(target, tokens)
        program, module = cell.compile(), on_host(cell.module)
        cell.release()
        for name, offload in PEERS.items():
            library = name.partition(",")[0]
            try:
                if find_spec(library) is None:
                    raise SkippedError(f"{library} is not installed")
                figures = _measure_peer(cell, module, offload)
                report(peer=name, tokens=tokens, **figures)
                report(peer=name, tokens=tokens, penstock=True, **_run_within(cell, program, figures))
            except SkippedError as reason:
                report(peer=name, tokens=tokens, skipped=str(reason))
            except Exception as error:
                traceback.print_exc()
                report(peer=name, tokens=tokens, failed=say(error))
                failed.append(f"{name} for {tokens} tokens")
    require(not failed, f"these peers failed: {'; '.join(failed)}")


def _measure_peer(
    cell: Cell, module: nn.Module, offload: Callable[[nn.Module, torch.device], None]
) -> dict[str, Any]:
    target, before = cell.target, _taken_when_idle(cell.target)
    offloaded = copy.deepcopy(module)
    offload(offloaded, target.where)
    equal = torch.equal(offloaded(cell.given), cell.expected)
    seconds = median(target.seconds(partial(offloaded, cell.given)) for _ in range(target.rounds))
    # torch's allocator gives nothing back to the driver in between, so this is the peak.
    peak = target.taken() - before
    return {"seconds": seconds, "resident_s": cell.resident_s, "peak_driver_bytes": peak, "equal": equal}


def _run_within(cell: Cell, program: Program, peer: dict[str, Any]) -> dict[str, Any]:
    """Return figures of penstock at the largest budget whose memory, by the driver, is at most a peer's.

    What is beside the weights is known once it has run: a run that took more is repeated with less.
    """
    target, peak = cell.target, peer["peak_driver_bytes"]
    floor = program.floor(target.device)
    budget = min(program.weight_bytes, max(floor, peak - program.activation_bytes))
    for _ in range(ATTEMPTS):
        plan, before = cell.plan_within(program, budget), _taken_when_idle(target)
        with program.load(plan=plan, device=target.device) as streamed:
            equal = torch.equal(streamed(cell.given), cell.expected)
            seconds = target.usual_seconds(partial(streamed, cell.given))
            taken, misses = target.taken() - before, streamed.stats.misses
        if taken <= peak or plan.budget == floor:
            break
        budget = max(floor, budget - (taken - peak))
    require(equal and not misses, f"penstock went wrong within {peak} bytes")
    figures = {
        **cell.figures(plan, seconds),
        "driver_bytes": taken,
        "peak_driver_bytes": peak,
        "misses": misses,
    }
    del figures["tokens"]
    return {**figures, "within": taken <= peak, "times_faster": peer["seconds"] / seconds, "equal": equal}


def _taken_when_idle(target: Target) -> int:
    gc.collect()  # hooks of libraries refer to their modules in cycles
    target.empty_cache()
    return target.taken()
