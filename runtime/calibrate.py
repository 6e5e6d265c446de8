"""Measures the machine: compute and memory rates for the planner, and how weights are best read.

Every measurement is bounded in time and bytes; together they take a fraction of a second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from penstock.runtime.queue import PIECE
from penstock.runtime.rates import READERS
from penstock.schedule.model import Hardware, Weight

_MATRIX = 512
_BUFFER = 32 << 20
_ROUNDS = 3
_LATENCY_NS = 50_000  # waking a reader and telling the caller, mostly the interpreter's
_IN_FLIGHT = 2 * READERS * PIECE  # what every reader copies, and what it copies next


def measure_hardware(weights: Sequence[Weight], link_bytes_per_s: float, note: str) -> Hardware:
    """The CPU this process runs on, with its matrix rate in the dtype most weight bytes have."""
    return Hardware(
        name="auto",
        flops_per_s=_flops_per_s(_common_dtype(weights)),
        memory_bytes_per_s=_memory_bytes_per_s(),
        link_bytes_per_s=link_bytes_per_s,
        link_latency_ns=_LATENCY_NS,
        link_in_flight_bytes=_IN_FLIGHT,
        note=f"measured on this machine with {torch.get_num_threads()} threads; {note}",
    )


def _common_dtype(weights: Sequence[Weight]) -> torch.dtype:
    elements: Counter[str] = Counter()
    for part in (part for weight in weights for part in weight.parts):
        size = 1
        for length in part.shape:
            size *= length
        elements[part.dtype] += size
    floating = [n for n, _ in elements.most_common() if n in ("float32", "bfloat16", "float16", "float64")]
    return getattr(torch, floating[0]) if floating else torch.float32


def _flops_per_s(dtype: torch.dtype) -> float:
    a = torch.ones(_MATRIX, _MATRIX, dtype=dtype)
    seconds = _best(lambda: torch.mm(a, a))
    return 2 * _MATRIX**3 / seconds


def _memory_bytes_per_s() -> float:
    buffer = torch.zeros(_BUFFER // 8, dtype=torch.int64)
    return _BUFFER / _best(buffer.sum)


def _best(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
