"""Measures the rates of compute, memory and copies on this machine, and corrects them by what calls took."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from penstock.runtime.device.accelerator import AcceleratorDevice
from penstock.runtime.device.opening import accelerators, open_accelerator
from penstock.runtime.device.protocol import aligned_bytes
from penstock.runtime.files.artifact_files import artifact_digest
from penstock.runtime.machine.figures import (
    LEAST,
    SECONDS,
    Machine,
    Measurement,
    Subject,
    Trials,
    forget,
    measured,
    measurements,
    noted,
    recall,
    record,
    repeat,
    this_machine,
)
from penstock.runtime.machine.rates import Arrival, Leaving, WeightFiles, leaving
from penstock.runtime.stream.engine import Counters
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.hardware import HOST_STEP_NS, stretched, with_times
from penstock.schedule.facts.model import MEASURED, Hardware, Method, Trace, Weight
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan

PASSES = 5
"""The number of passes of a method that are watched, after a first one, which also loads and warms up."""

FACTOR = 2
"""A time contradicts a figure if it is longer or shorter than expected by more than this factor."""

LEAST_NS = 5_000_000
"""Smaller differences contradict nothing, since most of so short a time is spent in Python."""


def seen_compute(folder: Path, method: str) -> Measurement | None:
    """The compute time of a pass that a load of this artifact saw, if it contradicted its plan; else None."""
    subject = _subject(folder, method)
    return recall(subject) if subject else None


def _subject(folder: Path, method: str) -> Subject | None:
    digest = artifact_digest(folder)
    return Subject("pass", this_machine(), method, digest[:16]) if digest else None


class _Pass(NamedTuple):
    """A watched pass: its nanoseconds, those that it waited for weights, and the bytes that it moved."""

    total_ns: int
    stall_ns: int
    nbytes: int


class Sightings:
    """Watches each method's first passes on its plan's machine; `counters` has the streamer's counters."""

    def __init__(self, folder: Path, payload: Payload, plan: Plan, counters: Callable[[], Counters]) -> None:
        self._folder, self._payload, self._plan, self._counters = folder, payload, plan, counters
        self._methods = {method.graph: method for method in payload.methods}
        self._passes: dict[int, list[_Pass]] = {method.graph: [] for method in payload.methods}

    @contextmanager
    def watching(self, graph: int, leaves: Sequence[Any]) -> Iterator[None]:
        """Watch the pass that runs in this context; it counts if `leaves` have the sizes of the trace."""
        if graph not in self._passes or not at_exported_sizes(self._methods[graph], leaves):
            yield
            return
        counters = self._counters()
        stall_ns, moved, began = counters.stall_ns, counters.bytes_moved, time.perf_counter_ns()
        yield
        took = time.perf_counter_ns() - began
        counters = self._counters()
        passes = self._passes[graph]
        passes.append(_Pass(took, counters.stall_ns - stall_ns, counters.bytes_moved - moved))
        if len(passes) > PASSES:
            self._conclude(graph, self._passes.pop(graph)[1:])

    def _conclude(self, graph: int, passes: Sequence[_Pass]) -> None:
        self._check_compute(graph, Trials(tuple(timed.total_ns - timed.stall_ns for timed in passes)))
        self._check_arrival(graph, passes)

    def _check_compute(self, graph: int, seen: Trials) -> None:
        """Remember the compute time of a pass if it contradicts the time that the plan assumed."""
        (planned,) = (trace for trace in self._plan.traces if trace.graph == graph)
        subject = _subject(self._folder, planned.method)
        if subject is None or not _contradicts(seen.median, planned.compute_ns):
            return
        record(subject, seen)
        modelled = with_times(planned, self._plan.hardware).compute_ns
        if seen.median < modelled and _contradicts(seen.median, modelled):
            # The machine cannot compute faster than its true rates, so these were measured while it was busy.
            rates = Subject("products", this_machine()), Subject("memory", this_machine())
            forget(lambda measurement: replace(measurement.subject, what="") in rates)

    def _check_arrival(self, graph: int, passes: Sequence[_Pass]) -> None:
        """Forget the rate at which weights arrive if a pass was faster than it allows, or waited longer."""
        hardware = self._plan.hardware
        (schedule,) = (schedule for schedule in self._plan.schedules if schedule.graph == graph)
        least = statistics.median(hardware.copy_ns(timed.nbytes) for timed in passes)
        most = least + len(schedule.transfers) * (hardware.link_latency_ns + hardware.link_fill_ns)
        took = statistics.median(timed.total_ns for timed in passes)
        stalled = statistics.median(timed.stall_ns for timed in passes)
        faster = took < least and _contradicts(took, least)
        slower = stalled > most and _contradicts(stalled, most)
        if faster or slower:
            identity = WeightFiles(self._payload.files, self._folder).identity
            forget(lambda measurement: measurement.subject.identity == identity)


def at_exported_sizes(method: Method, leaves: Sequence[Any]) -> bool:
    """Tells whether the leaves of a call have the sizes of the method's trace, which are those at export."""
    examples = {symbol.name: symbol.example for symbol in method.symbols}
    for described, leaf in zip(method.inputs, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            shape = [examples[size] if isinstance(size, str) else size for size in described.shape]
            if list(leaf.shape) != shape:
                return False
        elif described.value is None:
            return False  # the payload does not have the value of a number at export
    return True


def _contradicts(seen_ns: float, expected_ns: float) -> bool:
    most, least = max(seen_ns, expected_ns), min(seen_ns, expected_ns)
    return most > FACTOR * least and most - least > LEAST_NS


_LEAST_MATRIX, _MATRIX, _DEVICE_MATRIX = 128, 1024, 4096
_BUFFER = 32 << 20  # a load may measure, and may take at most 64 MiB beside its budget
_DEVICE_BUFFER = 256 << 20  # several times what a processor's cache holds
_LATENCY_NS = 50_000  # to wake a reader and to notify the caller, most of it in Python
_COPY_LATENCY_NS = 5_000  # as the presets have it (schedule/facts/hardware.py)

_Result = TypeVar("_Result")

THIS_CPU = "auto"
"""The name of the hardware of this machine's CPU with measured figures."""

NO_FILES = 1e9
"""The bytes per second at which weights are assumed to arrive if there is no file to read."""


def measure_cpu(weights: Sequence[Weight], arrival: Arrival | None, why: str = "") -> Hardware:
    """The CPU that this process runs on, with the rate of matrix products in the dtype of most weights.

    How weights arrive depends on files, page cache and arena, so the caller gives it as `arrival` (None if
    there is no file), together with `why`, a reason that is added to the note.
    """
    products, memory = compute_rates(common_dtype(weights))
    rate, answer = (arrival.rate, arrival.answer) if arrival else (None, None)
    measured = f"{rate.subject.title} at {rate.amount}" if rate else ""
    threads = torch.get_num_threads()
    where = f"{MEASURED} this machine with {threads} thread{'' if threads == 1 else 's'}"
    return Hardware(
        name=THIS_CPU,
        flops_per_s=products.median,
        memory_bytes_per_s=memory.median,
        link_bytes_per_s=NO_FILES if rate is None else rate.median,
        link_latency_ns=_LATENCY_NS,
        link_in_flight_bytes=arrival.in_flight_bytes if arrival else 0,
        note=noted(where, (measured, why), (products, memory, rate, answer)),
    )


def with_leaving(hardware: Hardware, leaving: Leaving | None) -> Hardware:
    """The machine with the rate at which what a forward keeps leaves memory, and with a note of it."""
    if leaving is None:
        note = noted(hardware.note, ["no rate of writes: they are taken for reads"], ())
        return replace(hardware, note=note)
    both = "beside reads" if leaving.duplex else "in turn with reads"
    sentence = f"{leaving.rate.subject.title} at {leaving.rate.amount}, {both}"
    note = noted(hardware.note, [sentence], (leaving.rate, leaving.both))
    return replace(hardware, write_bytes_per_s=leaving.rate.median, duplex=leaving.duplex, note=note)


def measure_accelerator(device: str, weights: Sequence[Weight], files: WeightFiles | None) -> Hardware:
    """An accelerator, with the rates of copies to it from page-locked memory and of reads from `files`.

    What was measured once on a device of its kind and memory is remembered. Raises StreamError if there is no
    such device.
    """
    opened = open_accelerator(device)
    dtype, machine = common_dtype(weights), replace(this_machine(), processor=opened.product)
    try:
        timing = partial(_giving_back, partial(_device_products, opened, dtype))
        products = measured(Subject("products", machine, dtype), timing)
        timing = partial(_giving_back, partial(_device_memory, opened))
        memory = measured(Subject("memory", machine), timing)
        copies = _device_copies(opened, machine)
    finally:
        opened.close()
    disk = files.disk() if files else None
    sources = [measurement.subject.title for measurement in (copies, disk) if measurement]
    return Hardware(
        name=opened.name,
        flops_per_s=products.median,
        memory_bytes_per_s=memory.median,
        link_bytes_per_s=copies.median,
        link_latency_ns=_COPY_LATENCY_NS,
        memory_nbytes=opened.memory_info[1],
        disk_bytes_per_s=disk.median if disk else None,
        note=noted(f"{MEASURED} {opened.model}", sources, (products, memory, copies, disk)),
        host_step_ns=HOST_STEP_NS,
    )


def compute_rates(dtype: str) -> tuple[Measurement, Measurement]:
    """The rate at which this CPU multiplies matrices of a dtype, and the rate at which it reads memory."""
    machine = this_machine()
    return (
        measured(Subject("products", machine, dtype), partial(_products, dtype)),
        measured(Subject("memory", machine), _memory),
    )


def corrected(
    folder: Path, traces: Sequence[Trace], hardware: Hardware
) -> tuple[tuple[Trace, ...], Hardware]:
    """The traces with the compute times that loads saw, if there are any, and a note about them."""
    traces_now = []
    for trace in traces:
        seen = seen_compute(folder, trace.method)
        traces_now.append(stretched(trace, seen.median) if seen else trace)
        if seen:
            correction = f"{seen.subject.title} took {seen.amount} in a load"
            hardware = replace(hardware, note=noted(hardware.note, [correction], [seen]))
    return tuple(traces_now), hardware


def machines_here() -> tuple[Machine, ...]:
    """The CPU, and every accelerator that this process sees."""
    cpu = this_machine()
    products = [open_accelerator(name).product for name in accelerators()]
    return (cpu, *(replace(cpu, processor=product) for product in dict.fromkeys(products)))


def measure_again() -> None:
    """Forget all remembered figures of this machine, and measure those again that need no weight files."""
    here = machines_here()
    subjects = (measurement.subject for measurement in measurements())
    dtypes = [subject.what for subject in subjects if subject.quantity == "products"]
    forget(lambda measurement: measurement.subject.machine in here)
    for dtype in dict.fromkeys(("float32", "bfloat16", *dtypes)):
        compute_rates(dtype)
    leaving()
    for name in accelerators():
        measure_accelerator(name, (), None)


def common_dtype(weights: Sequence[Weight]) -> str:
    """The name of the floating-point dtype of most elements of weights; float32 if there is none."""
    elements: Counter[str] = Counter()
    for part in (part for weight in weights for part in weight.parts):
        elements[part.dtype] += math.prod(part.shape)
    floating = [n for n, _ in elements.most_common() if n in ("float32", "bfloat16", "float16", "float64")]
    return floating[0] if floating else "float32"


def _products(dtype: str) -> Trials:
    """Floating-point operations a second of matrix products on this CPU.

    The matrices have `_MATRIX` rows, or fewer where the trials would take longer than `SECONDS`: a product in
    float16 takes seconds on a processor that has no instructions for it.
    """
    size, products = _LEAST_MATRIX, _products_of(dtype, _LEAST_MATRIX)
    while size < _MATRIX and LEAST * 2 * (2 * size) ** 3 <= SECONDS * max(products.figures):
        size *= 2
        products = _products_of(dtype, size)
    return products


def _products_of(dtype: str, size: int) -> Trials:
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype))
    return repeat(lambda: torch.mm(matrix, matrix), 2 * size**3, threads=torch.get_num_threads())


def _memory() -> Trials:
    buffer = torch.zeros(_BUFFER // 4)
    return repeat(buffer.sum, _BUFFER, threads=torch.get_num_threads())


def _on_device(device: AcceleratorDevice, work: Callable[[], object], amount: float) -> Trials:
    def finish() -> None:
        work()
        torch.accelerator.synchronize(device.torch_device)

    return repeat(finish, amount)


def _giving_back(measure: Callable[[], _Result]) -> _Result:
    """Measure, and give the device's memory back, which the buffers must not take from the weights."""
    try:
        return measure()
    finally:
        torch.accelerator.empty_cache()


def _device_products(device: AcceleratorDevice, dtype: str) -> Trials:
    shape = (_DEVICE_MATRIX, _DEVICE_MATRIX)
    matrix = torch.ones(shape, dtype=getattr(torch, dtype), device=device.torch_device)
    return _on_device(device, lambda: torch.mm(matrix, matrix), 2 * _DEVICE_MATRIX**3)


def _device_memory(device: AcceleratorDevice) -> Trials:
    both = torch.zeros(2, _DEVICE_BUFFER // 2, dtype=torch.uint8, device=device.torch_device)
    return _on_device(device, lambda: both[1].copy_(both[0]), _DEVICE_BUFFER)


def _device_copies(device: AcceleratorDevice, machine: Machine) -> Measurement:
    """Bytes a second of copies from page-locked memory, or from ordinary memory if the system locks none."""
    for kind in ("page-locked", "ordinary"):
        if remembered := recall(Subject("copies", machine, kind)):
            return remembered
    trials, kind = _giving_back(partial(_time_copies, device))
    return record(Subject("copies", machine, kind), trials)


def _time_copies(device: AcceleratorDevice) -> tuple[Trials, str]:
    try:
        host, kind = device.allocate_host(_DEVICE_BUFFER), "page-locked"
    except StreamError:
        host, kind = aligned_bytes(_DEVICE_BUFFER), "ordinary"
    buffer = torch.zeros(_DEVICE_BUFFER, dtype=torch.uint8, device=device.torch_device)
    copy = partial(buffer.copy_, host, non_blocking=True)
    return _on_device(device, copy, _DEVICE_BUFFER), kind
