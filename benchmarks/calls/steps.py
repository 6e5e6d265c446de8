"""What a step costs beside its kernel: many tiny linears, each a step, streamed by both engines.

Processor seconds of passes through the exported program, weights in memory, and through streamed modules of
the same program within a part of its weights, in turn. Their difference is divided by the steps.

With `--device null` it is what the host does to enqueue a streamed step on an accelerator, whose streams and
events do nothing here: its waits, its copies of 4 KiB and its marks. No kernel is called.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

import penstock
from benchmarks.machine import describe_machine
from penstock import LoadOptions
from penstock.runtime.device.accelerator import AcceleratorDevice, DiskedDevice
from penstock.runtime.device.protocol import aligned_bytes
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.device.weights import DeviceWeights
from penstock.runtime.files.source import open_source

WIDTH = 32
"""In float32: a linear has 4 KiB of weights."""


class NullStream:
    """A stream, or an event, that does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class NullDevice(AcceleratorDevice):
    """An accelerator whose memory is the host's, and whose streams and events do nothing."""

    def __init__(self) -> None:
        DiskedDevice.__init__(self)
        self.torch_device, self.name = torch.device("cpu"), "null"
        self._page_lock, self._streams = True, []
        self._current: Any = NullStream()

    def current_stream(self) -> Any:
        return self._current

    def _lock(self, nbytes: int) -> torch.Tensor:
        return aligned_bytes(nbytes)

    def _new_stream(self) -> Any:
        return NullStream()

    def mark(self, stream: Any, spent: Any) -> Any:
        event: Any = spent or NullStream()
        return super().mark(stream, event)

    def _event(self, stream: object) -> Any:
        return NullStream()

    def finish(self) -> None:
        pass


def measure_null(program: penstock.Program, budget: str, rounds: int) -> tuple[float, int]:
    """Return the calling thread's median microseconds for each streamed step of a pass, and the steps."""
    plan, device = program.plan(budget, arena="contiguous"), NullDevice()
    storages = program.payload.storages
    with closing(open_source(program.payload.files, program.path, storages=storages)) as source:
        weights = DeviceWeights(plan, storages, device, source)
        streamer = DeviceStreamer(plan, storages, device, weights)
        steps, times = streamer.probed(0), []
        for _ in range(rounds + 3):
            began = time.thread_time()
            streamer.begin(0)
            for step in steps:
                streamer.acquire(0, step)
                streamer.release(0, step)
            streamer.end(0)
            times.append(time.thread_time() - began)
        streamer.close()
        device.close()
    return median(times[3:]) / len(steps) * 1e6, len(steps)


def main(
    *,
    steps: Annotated[int, typer.Option(min=1, help="Linears of 32 x 32, in float32.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    budget: Annotated[str, typer.Option(help="Of the streamed modules.")] = "50%",
    device: Annotated[str, typer.Option(help="`cpu`, or `null` for the host's part on a device.")] = "cpu",
) -> None:
    """Measure what streaming adds to a step.

    Example: python -m benchmarks.calls.steps --rounds 15
    Example: python -m benchmarks.calls.steps --device null --steps 1000 --rounds 51
    """
    if device not in ("cpu", "null"):
        raise typer.BadParameter(f"there is no device {device!r} here: choose cpu or null")
    torch.manual_seed(0)
    linears = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(steps)]
    example = torch.ones(1, WIDTH)
    exported = torch.export.export(torch.nn.Sequential(*linears).eval(), (example,))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = penstock.compile(exported, Path(folder) / "steps.penstock")
        machine = describe_machine()
        where = f"on {machine['cpu']}, {machine['cores']} cores, {machine['date']}; {rounds} rounds"
        if device == "null":
            microseconds, streamed = measure_null(program, budget, rounds)
            typer.echo(f"{microseconds:.2f} us of the host for each of {streamed} streamed steps {where}.")
            return
        ways = {"in memory": program.load("100%")}
        for arena in ("mapped", "contiguous"):
            plan = program.plan(budget, arena=arena)
            for engine in ("native", "python"):
                ways[f"{arena}, {engine}"] = program.load(plan=plan, options=LoadOptions(engine=engine))
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # the first round does not count
            for way in [*ways][number % len(ways) :] + [*ways][: number % len(ways)]:
                began = time.process_time()
                ways[way](example)
                found[way].append(time.process_time() - began)
        moved = {way: module.stats.bytes_moved for way, module in ways.items()}
        probed = {way: len(module._weights.probed(0)) for way, module in ways.items()}
        for module in ways.values():
            module.close()
    typer.echo(f"{steps} steps {where}.\n")
    typer.echo("| way | processor, us a step | more than in memory | steps that act | bytes moved a pass |")
    typer.echo("|---|---|---|---|---|")
    least = median(found["in memory"][1:])
    for way, seconds in found.items():
        one = median(seconds[1:])
        typer.echo(
            f"| {way} | {one / steps * 1e6:.1f} | {(one - least) / steps * 1e6:.1f} | {probed[way]} "
            f"| {moved[way] // (rounds + 1)} |"
        )


if __name__ == "__main__":
    typer.run(main)
