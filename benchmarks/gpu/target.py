"""The device that is measured, and what every step makes on it: weights, programs, times, graphs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import penstock
from benchmarks.machine import describe_machine
from penstock.runtime.device.opening import hardware_of, open_accelerator
from penstock.runtime.device.simulated import SimDevice
from penstock.runtime.machine import calibrate
from penstock.runtime.program import Program
from penstock.schedule.facts.hardware import HOST_STEP_NS

Report = Callable[..., None]
"""Prints one line of figures, which are given by name."""

RIG = "rig"
"""The device of the tests (tests/rig), on which this script is tried and nothing is measured."""


class WrongResultError(AssertionError):
    """Something that must hold on every device does not."""


@dataclass
class Graph:
    """A call that is repeated by `replay`, which writes into `output`."""

    replay: Callable[[], object]
    output: Tensor


class Called(Graph):
    """Stands for a graph where there are none: a replay is a call, with another output each time."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        def again() -> None:
            self.output = call()

        super().__init__(again, call())


@dataclass(frozen=True)
class Target:
    """A device by its name, the share of the full sizes that is tried, and a folder for artifacts."""

    device: str
    scale: float
    folder: Path

    @property
    def where(self) -> torch.device:
        return torch.device("cpu" if self.is_simulated else self.device)

    @property
    def is_simulated(self) -> bool:
        """Tell whether no accelerator is there, but its simulation, whose memory is the host's."""
        return self.device.partition(":")[0] == "sim"

    @property
    def rounds(self) -> int:
        """Calls of which a time is the median; where only the script is tried, few do."""
        return 7 if self.scale == 1 else 2

    @property
    def captures(self) -> bool:
        """Tells whether passes can be captured as graphs here: penstock does so on CUDA alone."""
        return self.where.type == "cuda"

    def nbytes(self, full: int, *, least: int = 1 << 16) -> int:
        """A number of bytes that is `full` at full scale, and a multiple of 4096."""
        return max(least, int(full * self.scale) // 4096 * 4096)

    def width(self, full: int) -> int:
        """The width of a square matrix whose bytes scale: `full` at full scale, and a multiple of 64."""
        return max(64, int(full * self.scale**0.5) // 64 * 64)

    def ready(self) -> AbstractContextManager[object]:
        """What steps run within: the rig is loaded, and runs what is waited for and nothing earlier."""
        if self.where_is_rig:
            rig: Any = import_module("tests.rig.machine")
            return rig.ordered("late")  # type: ignore[no-any-return]
        return nullcontext()

    @property
    def where_is_rig(self) -> bool:
        return self.device.partition(":")[0] == RIG

    def open(self) -> Any:
        if self.is_simulated:
            return SimDevice(hardware_of(self.device), name=self.device)
        return open_accelerator(self.device)

    # Times and memory.

    def finish(self) -> None:
        if not self.is_simulated:
            torch.accelerator.synchronize(self.where)

    def empty_cache(self) -> None:
        """Have torch's allocator give free memory back, so that the driver's count is of what is held."""
        if not self.is_simulated:
            torch.accelerator.empty_cache()

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call and of all that it has enqueued."""
        self.finish()
        began = time.perf_counter()
        call()
        self.finish()
        return time.perf_counter() - began

    def usual_seconds(self, call: Callable[[], object]) -> float:
        """The median over `rounds` calls, after one that does not count."""
        call()
        return median(self.seconds(call) for _ in range(self.rounds))

    def event_seconds(self, stream: torch.Stream, enqueue: Callable[[], object]) -> float:
        """Seconds that a stream took for what `enqueue` puts on it, by its own events."""
        return self.timed(stream, enqueue)()

    def timed(self, stream: torch.Stream, enqueue: Callable[[], object]) -> Callable[[], float]:
        """Enqueues between two events of a stream, and returns what waits for them and gives the seconds."""
        start, stop = (torch.Event(self.where, enable_timing=True) for _ in range(2))
        start.record(stream)
        enqueue()
        stop.record(stream)

        def seconds() -> float:
            stop.synchronize()
            return float(start.elapsed_time(stop)) / 1e3

        return seconds

    def taken(self) -> int:
        """Bytes of the device that are taken by any process, by the driver's count; 0 on a simulated one."""
        if self.is_simulated:
            return 0
        free, total = torch.accelerator.get_memory_info(self.where)
        return int(total - free)

    def plan_sizes(self) -> AbstractContextManager[object]:
        """Has what plans need to know of the device measured with matrices and copies of the scaled sizes.

        Launches are scaled too: they would be the limit of all small programs, and are not of large ones.
        """
        if self.scale >= 1:
            return nullcontext()
        return patch.multiple(
            calibrate,
            _DEVICE_MATRIX=self.width(4096),
            _DEVICE_BUFFER=self.nbytes(256 << 20),
            HOST_STEP_NS=int(self.scale * HOST_STEP_NS),
        )

    # Modules and programs.

    def draw(self, module: nn.Module) -> nn.Module:
        """Gives a module on the meta device weights that the device itself draws, so the host draws nothing.

        Matrices are normal with standard deviation fan_in^-0.5, vectors near one.
        """
        drawn = module.to_empty(device=self.where).requires_grad_(False).eval()
        torch.manual_seed(0)
        for weight in drawn.parameters():
            if weight.dim() == 1:
                weight.normal_(1, 0.1)
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5)
        return drawn

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.where)

    def compile(self, module: nn.Module, methods: Mapping[str, tuple[Tensor, ...]], name: str) -> Program:
        """The program of a module for each of these inputs, with the weights that the module has."""
        here = on_host(module)
        exported = {
            method: torch.export.export(here, tuple(value.cpu() for value in given))
            for method, given in methods.items()
        }
        return penstock.compile(exported, self.folder / f"{name}.penstock", force=True)

    # Graphs.

    @contextmanager
    def graph(self, call: Callable[[], Tensor]) -> Iterator[Graph]:
        """Yields what `call` enqueues, captured; where nothing can be captured, a replay calls it again."""
        if not self.captures:
            yield Called(call)
            return
        captured = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.where),
            torch.cuda.graph(captured, stream=torch.cuda.Stream(self.where)),  # type: ignore[no-untyped-call]
        ):
            output = call()
        yield Graph(captured.replay, output)
        captured.reset()


class Stack(nn.Module):
    """Square linear layers with a tanh behind each; maps [tokens, width] to [tokens, width]."""

    def __init__(self, width: int, depth: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def make_stack(width: int, depth: int, *, bias: bool) -> nn.Module:
    """A stack in bfloat16 whose weights have no memory yet."""
    with torch.device("meta"):
        return Stack(width, depth, bias=bias).to(torch.bfloat16)


def on_host(module: nn.Module) -> nn.Module:
    """A copy of a module whose weights are in ordinary memory. The module's own stay where they are."""
    weights = {id(weight): nn.Parameter(weight.cpu(), requires_grad=False) for weight in module.parameters()}
    return copy.deepcopy(module, dict(weights))


def require(holds: bool, what: str) -> None:
    """Raises WrongResultError with `what` unless it holds. Call it behind the report of the figures."""
    if not holds:
        raise WrongResultError(what)


def describe(target: Target, report: Report) -> None:
    """What is measured, on what. Raises WrongResultError where the device has no room for the sizes."""
    device = target.open()
    product = target.device if target.is_simulated else device.product
    free, total = (device.hardware.memory_nbytes,) * 2 if target.is_simulated else device.memory_info
    device.close()
    facts = {"product": product, "free_bytes": free, "total_bytes": total}
    measures = not (target.where_is_rig or target.is_simulated)
    report(**describe_machine(), **facts, scale=target.scale, measures=measures)
    needed = target.nbytes(6 << 30)
    require(free >= needed, f"the largest step needs {needed} bytes of the device, and {free} are free")
