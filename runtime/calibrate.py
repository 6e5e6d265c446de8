"""Measures the machine: the rates of compute, memory and copies that plans are made with.

Every measurement is bounded in time and bytes. Together they take a fraction of a second.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from penstock.runtime.cache import user_cache
from penstock.runtime.files.rates import READERS, measure_read
from penstock.runtime.files.source import Source
from penstock.runtime.remembered import remember
from penstock.runtime.stream.queue import PIECE
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Hardware, Weight

_MATRIX = 512
_BUFFER = 32 << 20
_ROUNDS = 3
_LATENCY_NS = 50_000  # waking a reader and telling the caller, mostly the interpreter's
_COPY_LATENCY_NS = 5_000  # as the presets have it (schedule/facts/hardware.py)
_IN_FLIGHT = 2 * READERS * PIECE  # what every reader copies, and what it copies next


def measure_hardware(weights: Sequence[Weight], link_bytes_per_s: float, note: str) -> Hardware:
    """The CPU that this process runs on, with its matrix rate in the dtype that most weights have.

    The rates of products and of memory are measured once and remembered (see `_remembered`); how fast
    weights arrive depends on files and page cache, so it is given.
    """
    dtype = _common_dtype(weights)
    rates = _remembered(dtype, lambda: (_flops_per_s(dtype), _memory_bytes_per_s()))
    return Hardware(
        name="auto",
        flops_per_s=rates[0],
        memory_bytes_per_s=rates[1],
        link_bytes_per_s=link_bytes_per_s,
        link_latency_ns=_LATENCY_NS,
        link_in_flight_bytes=_IN_FLIGHT,
        note=f"measured on this machine with {torch.get_num_threads()} threads; {note}",
    )


def measure_cuda(device: str, weights: Sequence[Weight], source: Source) -> Hardware:
    """A CUDA device, the rate of copies to it from page-locked memory, and the rate of reads from disk.

    Raises StreamError where there is none.
    """
    from penstock.runtime.device.cuda import CudaDevice

    opened = CudaDevice.of(device)
    try:
        pinned, kind = opened.allocate_host(8 * _BUFFER), "page-locked"
    except StreamError:
        pinned, kind = CudaDevice.of(device, page_lock=False).allocate_host(8 * _BUFFER), "ordinary"
    try:
        return _measure_on(opened.torch_device, _common_dtype(weights), pinned, kind, source)
    finally:
        opened.close()
        torch.cuda.empty_cache()  # what was measured with is not taken from the weights


def _measure_on(
    where: torch.device, dtype: torch.dtype, pinned: torch.Tensor, kind: str, source: Source
) -> Hardware:
    matrix = torch.ones(8 * _MATRIX, 8 * _MATRIX, dtype=dtype, device=where)
    buffer = torch.zeros(8 * _BUFFER, dtype=torch.uint8, device=where)

    def seconds(work: Callable[[], object]) -> float:
        def finish() -> None:
            work()
            torch.cuda.synchronize(where)

        return _best(finish)

    return Hardware(
        name=str(where),
        flops_per_s=2 * (8 * _MATRIX) ** 3 / seconds(lambda: torch.mm(matrix, matrix)),
        memory_bytes_per_s=buffer.numel() / seconds(buffer.sum),
        link_bytes_per_s=buffer.numel() / seconds(lambda: buffer.copy_(pinned, non_blocking=True)),
        link_latency_ns=_COPY_LATENCY_NS,
        memory_nbytes=torch.cuda.mem_get_info(where)[1],
        disk_bytes_per_s=measure_read(source) if source.files else None,
        note=f"measured on {torch.cuda.get_device_name(where)}, copies from {kind} memory",
    )


def _remembered(dtype: torch.dtype, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """What `measure` returns, or returned before: it is kept in `hardware.json` in the user's cache folder.

    The key is the processor, the number of threads, the dtype and torch. A file that cannot be read
    counts as none, and one that cannot be written is not missed.
    """
    path = user_cache() / "hardware.json"
    key = f"{_processor()}, {torch.get_num_threads()} threads, {dtype}, torch {torch.__version__}"
    known: dict[str, list[float]] = {}
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            known = {name: rates for name, rates in found.items() if _are_rates(rates)}
    if key not in known:
        known[key] = list(measure())
        remember(path, json.dumps(known, indent=1).encode())
    return known[key][0], known[key][1]


def _are_rates(rates: object) -> bool:
    return (
        isinstance(rates, list)
        and len(rates) == 2
        and all(isinstance(rate, float) and rate > 0 and math.isfinite(rate) for rate in rates)
    )


def _processor() -> str:
    """The name of the processor, as the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
