"""Times of work modelled for a machine, and presets of machines from public figures.

The presets let people plan for machines that they do not have. Rates of matrix products and of memory are the
vendors' peaks (dense bfloat16 or float16, accumulated in float32). Kernels reach less, so modelled compute is
the shortest possible, and less copying hides behind it than in reality. Rates of links are those that copies
from pinned memory were reported to reach, in one direction.

- t4: NVIDIA T4 data sheet: 65 TFLOPS, 320 GB/s, 16 GB, PCIe 3.0 x16 (15.8 GB/s of which 12 are reached).
- l4: NVIDIA L4 data sheet: 242 TFLOPS with sparsity, 300 GB/s, 24 GB, PCIe 4.0 x16.
- a10: NVIDIA A10 data sheet: 125 TFLOPS, 600 GB/s, 24 GB, PCIe 4.0 x16.
- l40s: NVIDIA L40S data sheet: 362 TFLOPS, 864 GB/s, 48 GB, PCIe 4.0 x16.
- a6000: NVIDIA RTX A6000 data sheet: 309.7 TFLOPS with sparsity, 768 GB/s, 48 GB, PCIe 4.0 x16.
- rtx3060: NVIDIA's page of the card: 360 GB/s, 12 GB, PCIe 4.0 x16; 25.5 TFLOPS are its 28 multiprocessors at
  1.777 GHz, by the rate of one in the Ampere GA102 architecture paper.
- rtx3090: NVIDIA Ampere GA102 architecture paper: 71 TFLOPS, 936 GB/s, 24 GB, PCIe 4.0 x16.
- rtx4070: NVIDIA's page of the card: 504 GB/s, 12 GB, PCIe 4.0 x16; 58.3 TFLOPS are its 46 multiprocessors at
  2.475 GHz, by the rate of one of the rtx4090.
- rtx4080: NVIDIA Ada architecture paper, appendix A: 97.5 TFLOPS, 716.8 GB/s, 16 GB, PCIe 4.0 x16.
- rtx4090: NVIDIA Ada architecture paper, appendix A: 165.2 TFLOPS, 1008 GB/s, 24 GB, PCIe 4.0 x16.
- rtx5090: NVIDIA RTX Blackwell architecture paper, appendix A: 209.5 TFLOPS, 1792 GB/s, 32 GB, PCIe 5.0 x16.
- a100: NVIDIA A100 data sheet, 80 GB SXM: 312 TFLOPS, 2039 GB/s, PCIe 4.0 x16.
- h100: NVIDIA H100 data sheet, SXM: 989 TFLOPS, 3350 GB/s, 80 GB, PCIe 5.0 x16.
- h200: NVIDIA H200 data sheet, SXM: 989 TFLOPS, 4800 GB/s, 141 GB, PCIe 5.0 x16.
- b200: NVIDIA HGX B200 data sheet, one of eight: 2250 TFLOPS, 8000 GB/s, 180 GB, PCIe 5.0 x16 (the host's).
- gh200: NVIDIA GH200 data sheet, 96 GB HBM3: 989 TFLOPS, 4000 GB/s; NVLink-C2C is 450 GB/s in one
  direction, of which public threads report 342.
- mi300x: AMD Instinct MI300X data sheet: 1307 TFLOPS, 5300 GB/s, 192 GB, PCIe 5.0 x16.
- PCIe: 25 GB/s of the 31.5 of a 4.0 x16 slot and 55 of the 63 of a 5.0 x16 slot are what public
  threads report from pinned memory. A copy costs about 5 us beside its bytes when the next copies are queued
  behind it.
- laptop: eight cores with AVX2 at 3.5 GHz (0.9 TFLOPS in float32), DDR5-5600 in two channels (90 GB/s), an
  NVMe disk behind PCIe 4.0 x4 that reads 7 GB/s. server: 64 cores with AVX-512 bfloat16 at 2.5 GHz,
  DDR5-4800 in twelve channels (461 GB/s), an NVMe disk behind PCIe 5.0 x4 that reads 14 GB/s. A read costs
  20 us beside its bytes when others are in flight, and the first bytes come after 100 us.
- Hosts of devices, for the policy that computes on the host what does not fit. desktop (rtx cards): 16
  cores with AVX2 at 4.5 GHz (2.3 TFLOPS in float32), DDR5-5600 in two channels, 64 GB. grace (gh200): NVIDIA
  Grace data sheet, half of its two chips: 7.1 TFLOPS in float32, 500 GB/s, 480 GB. All other devices have the
  server.
- The least time of a kernel. On a device: short kernels took 3.4 us each in a graph, and 3.8 us when launched
  one by one, on a V100 (NVIDIA's developer blog, Getting Started with CUDA Graphs, 2019). On a CPU: torch
  2.13 took 2.1 us for a product of eight numbers by eight, on the virtual machine of docs/notes/disk.md.

- The calling thread's time for a streamed step of a device: 5.8 us, which
  `python -m benchmarks.calls.steps --device null` measured on a virtual machine (docs/notes/disk.md) and a
  device whose streams and copies do nothing. The program's own kernels, and the driver's part of a copy or an
  event, are not in it.

The disk behind the host of every device is an NVMe disk that reads 7 GB/s.

No preset has a rate of copies out (`write_bytes_per_s`), or is `duplex`: what a forward keeps is taken to
leave as fast as weights arrive, in turn with them. On devices that is so by construction: PCIe and NVLink
have one rate for both directions, and the streamer makes all copies on one stream. Of disks it is a guess
that may be too good: many write fast until their own cache is full, and then at a small part of that rate. So
measure the machine, or give a `Hardware` with both figures.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.schedule.facts.errors import BudgetError, PlanError
from penstock.schedule.facts.model import Hardware, Trace, Work
from penstock.schedule.facts.sizes import parse_size
from penstock.schedule.facts.validity import check_machine

_GB = 10**9
_DISK = 7.0 * _GB
_DISK_LATENCY_NS = 20_000
_COPY_LATENCY_NS = 5_000
_ANSWER_NS = 100_000
_DEVICE_KERNEL_NS = 3_400
HOST_STEP_NS = 5_800
_HOST_KERNEL_NS = 2_100


def _device(name: str, tflops: float, memory_gb_per_s: float, link_gb_per_s: float, gb: int) -> Hardware:
    return Hardware(
        name=name,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * _GB,
        link_bytes_per_s=link_gb_per_s * _GB,
        link_latency_ns=_COPY_LATENCY_NS,
        memory_nbytes=gb * _GB,
        disk_bytes_per_s=_DISK,
        disk_latency_ns=_DISK_LATENCY_NS,
        note="a preset, from public figures",
        host_step_ns=HOST_STEP_NS,
    )


def _host(name: str, tflops: float, memory_gb_per_s: float, disk_gb_per_s: float, gb: int) -> Hardware:
    return Hardware(
        name=name,
        flops_per_s=tflops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * _GB,
        link_bytes_per_s=disk_gb_per_s * _GB,
        link_latency_ns=_DISK_LATENCY_NS,
        link_in_flight_bytes=int(disk_gb_per_s * _ANSWER_NS),  # GB/s are bytes a nanosecond
        memory_nbytes=gb * _GB,
        note="a preset, from public figures",
    )


PRESETS: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _device("t4", 65, 320, 12, 16),
        _device("l4", 121, 300, 25, 24),
        _device("a10", 125, 600, 25, 24),
        _device("l40s", 362, 864, 25, 48),
        _device("a6000", 154.8, 768, 25, 48),
        _device("rtx3060", 25.5, 360, 25, 12),
        _device("rtx3090", 71, 936, 25, 24),
        _device("rtx4070", 58.3, 504, 25, 12),
        _device("rtx4080", 97.5, 716.8, 25, 16),
        _device("rtx4090", 165.2, 1008, 25, 24),
        _device("rtx5090", 209.5, 1792, 55, 32),
        _device("a100", 312, 2039, 25, 80),
        _device("h100", 989.4, 3350, 55, 80),
        _device("h200", 989.4, 4800, 55, 141),
        _device("b200", 2250, 8000, 55, 180),
        _device("gh200", 989.4, 4000, 342, 96),
        _device("mi300x", 1307.4, 5300, 55, 192),
        _host("laptop", 0.9, 90, 7, 32),
        _host("server", 10, 461, 14, 768),
    )
}

_DESKTOP, _GRACE = _host("desktop", 2.3, 90, 7, 64), _host("grace", 7.1, 500, 7, 480)
"""The hosts of rtx cards, and of gh200; all other devices have the preset `server`."""

_FIGURES = {
    "memory": "memory_nbytes",
    "link": "link_bytes_per_s",
    "disk": "disk_bytes_per_s",
    "bandwidth": "memory_bytes_per_s",
    "tflops": "flops_per_s",
}
"""What may be changed of a preset: `rtx4090,memory=24GB,link=12GB/s,tflops=150`."""

_MOST = 1 << 20
"""The most bytes of a file with a machine's figures."""


def find_hardware(name: Hardware | str) -> Hardware:
    """Return the hardware of a name.

    Args:
        name: A preset (`"h200"`), one with figures of yours (`"rtx4090,memory=24GB,link=12GB/s"`), a JSON
            file as `penstock hardware h200 --json` prints it (`"mine.json"`), or a `Hardware`, which is
            returned.

    Raises:
        PlanError: The name, or a figure, is unknown. The message suggests a preset of the same number.

    Example:
        >>> from penstock.schedule.facts.hardware import find_hardware
        >>> find_hardware("rtx4090,memory=24GB").memory_nbytes
        24000000000
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise PlanError(f"hardware is {name!r}, expected a Hardware or a name of one of {', '.join(PRESETS)}")
    if name.endswith(".json"):
        return _from_file(Path(name))
    preset, *changes = name.split(",")
    if preset in PRESETS:
        return _changed(name, PRESETS[preset], changes) if changes else PRESETS[preset]
    same = [known for known in PRESETS if re.findall(r"\d+", known) == re.findall(r"\d+", preset)]
    near = difflib.get_close_matches(preset.lower(), same, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PlanError(
        f"there is no hardware {preset!r}: {hint}give one of {', '.join(PRESETS)}, one with figures of yours "
        "('rtx3090,memory=10GB,link=12GB/s'), or a .json file such as `penstock hardware h200 --json` prints"
    )


def _changed(name: str, preset: Hardware, changes: Sequence[str]) -> Hardware:
    figures: dict[str, Any] = {}
    for change in changes:
        key, _, value = change.partition("=")
        if key not in _FIGURES:
            raise PlanError(f"hardware {name!r}: expected one of {', '.join(_FIGURES)} and =, got {change!r}")
        if _FIGURES[key] in figures:
            raise PlanError(f"hardware {name!r}: {key}= stands there twice, expected it once")
        if key == "disk" and preset.disk_bytes_per_s is None:
            raise PlanError(
                f"hardware {name!r}: the disk of {preset.name} is its link: write link= for disk="
            )
        try:
            number = _figure(key, value)
        except (BudgetError, ValueError):
            form = {"memory": "24GB", "tflops": "150"}.get(key, "12GB/s")
            raise PlanError(
                f"hardware {name!r}: expected a figure such as {key}={form}, got {change!r}"
            ) from None
        figures[_FIGURES[key]] = number
    hardware = replace(preset, name=name, note=f"{preset.note}, with figures that were given", **figures)
    check_machine(hardware)
    return hardware


def _figure(key: str, text: str) -> float:
    """The value of a figure. Raises BudgetError or ValueError for what is none, or has no unit."""
    if key == "tflops":
        return float(text) * 1e12
    number = parse_size(text if key == "memory" else text.removesuffix("/s"))
    if number < 1_000_000:  # as "24" is, which has no unit
        raise ValueError(text)
    return number if key == "memory" else float(number)


def _from_file(path: Path) -> Hardware:
    from pydantic import TypeAdapter, ValidationError

    try:
        if not path.is_file():
            raise PlanError(
                f"there is no file {path}: `penstock hardware h200 --json` prints one to begin with"
            )
        with path.open("rb") as file:
            hardware = TypeAdapter(Hardware).validate_json(file.read(_MOST))
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else ""
        if isinstance(error, ValidationError):
            fault = error.errors(include_url=False)[0]
            why = ": ".join([*map(str, fault["loc"]), fault["msg"]])
        raise PlanError(
            f"{path} has no figures of a machine ({why}): write what `penstock hardware h200 --json` prints"
        ) from error
    check_machine(hardware)
    return hardware


def host_beside(hardware: Hardware) -> Hardware | None:
    """The host that could compute what does not fit on a device; None for a CPU and for unknown hardware."""
    preset = hardware.name.partition(",")[0]
    if preset not in PRESETS or hardware.disk_bytes_per_s is None:
        return None
    return _DESKTOP if preset.startswith("rtx") else _GRACE if preset == "gh200" else PRESETS["server"]


def roofline_ns(work: Work, hardware: Hardware) -> int:
    """Nanoseconds that work takes on a machine, by the roofline model.

    This is the time of computing or of moving the bytes, whichever is longer, and at least the time of one
    kernel; 0 for no work. (Williams, Waterman and Patterson, Roofline, Communications of the ACM 52(4),
    2009.)
    """
    if work == Work():
        return 0
    seconds = max(work.flops / hardware.flops_per_s, work.nbytes / hardware.memory_bytes_per_s)
    least = _HOST_KERNEL_NS if hardware.disk_bytes_per_s is None else _DEVICE_KERNEL_NS
    return max(round(seconds * 1e9), least)


def with_times(trace: Trace, hardware: Hardware) -> Trace:
    """The trace with times modelled for `hardware` from the trace's work; `gap_ns` stays as it is."""
    steps = tuple(
        replace(
            step, lead_ns=roofline_ns(step.lead_work, hardware), read_ns=roofline_ns(step.read_work, hardware)
        )
        for step in trace.steps
    )
    return replace(trace, steps=steps, tail_ns=roofline_ns(trace.tail_work, hardware), times="modelled")


def stretched(trace: Trace, compute_ns: float) -> Trace:
    """The trace, its times scaled by one factor so that a pass without its gap takes `compute_ns`."""
    modelled = trace.compute_ns - trace.gap_ns
    if not modelled:
        return trace
    scale = compute_ns / modelled
    steps = tuple(
        replace(step, lead_ns=round(step.lead_ns * scale), read_ns=round(step.read_ns * scale))
        for step in trace.steps
    )
    return replace(trace, steps=steps, tail_ns=round(trace.tail_ns * scale))
