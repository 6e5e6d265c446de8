"""How far ahead of the reads copies must start: passes on a link of a known rate.

Equal bfloat16 linears of 2 MiB within a share of their bytes, by the native engine. The link is emulated
(`link.cpp`): it takes its time and brings nothing, so that outputs mean nothing here, and two runs agree
where a disk's rate would change threefold between them. What is left of the limit is the engine's, the
scheduler's and the plan's. Every plan is made for a link that needs other bytes on their way
(`Hardware.link_in_flight_bytes`), and timed on the same link.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest import mock

import torch
import typer

import penstock
from benchmarks.machine import describe_machine
from penstock import LoadOptions
from penstock.native.library import Options, open_engine
from penstock.runtime.stream import native
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.facts.model import Hardware
from penstock.schedule.facts.sizes import format_size, parse_size
from penstock.schedule.plan import Plan

WIDTH = 1024
PASSES = 3


def compile_linears(folder: Path, nbytes: int, tokens: int) -> penstock.Program:
    """The artifact of `nbytes` of linears of 2 MiB each."""
    layers = [
        torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        for _ in range(max(2, nbytes // (2 * WIDTH * WIDTH)))
    ]
    exported = torch.export.export(torch.nn.Sequential(*layers).eval(), (inputs(tokens),))
    return penstock.compile(exported, folder / "linears.penstock")


def inputs(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, WIDTH, dtype=torch.bfloat16)


@contextmanager
def emulated_link(folder: Path, bytes_per_s: float, answer_ns: int) -> Iterator[None]:
    """Every engine that is opened meanwhile reads from the emulated link."""
    library = folder / "link.so"
    source = Path(__file__).with_name("link.cpp")
    flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-pthread")
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    link = ctypes.CDLL(str(library))
    link.link_set(ctypes.c_double(bytes_per_s), ctypes.c_int64(answer_ns))

    def open_on_link(payload: bytes, plan: str, folder: Path, options: Options) -> ctypes.c_void_p:
        options.read = ctypes.cast(link.link_read, ctypes.c_void_p).value
        return open_engine(payload, plan, folder, options)

    with mock.patch.object(native, "open_engine", open_on_link):
        yield


def in_memory(program: penstock.Program, tokens: int) -> float:
    """Seconds of a pass with everything resident."""
    with program.load("100%", options=LoadOptions(arena="contiguous", engine="python")) as module:
        return time_passes(module, tokens)


def time_passes(module: penstock.StreamedModule, tokens: int) -> float:
    """The median seconds of some passes behind one that does not count."""
    seconds = []
    with torch.no_grad():
        for _ in range(PASSES + 1):
            began = time.perf_counter()
            module(inputs(tokens))
            seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def ahead(plan: Plan) -> float:
    """How many steps before its own a copy may start, on average."""
    (schedule,), (trace,) = plan.schedules, plan.traces
    return sum((t.step - t.after) % len(trace.steps) for t in schedule.transfers) / len(schedule.transfers)


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of weights.")] = "1GiB",
    budget: Annotated[str, typer.Option(help="Bytes of the arena.")] = "12.5%",
    arena: Annotated[str, typer.Option(help="The kind of arena.")] = "contiguous",
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the inputs.")] = 256,
    rate: Annotated[float, typer.Option(help="The link's bytes per second.")] = 2.2e9,
    answer: Annotated[int, typer.Option(min=0, help="Nanoseconds until bytes flow.")] = 50_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each every plan runs once.")] = 5,
    depths: Annotated[
        str, typer.Option(help="Bytes on their way that plans are made for.")
    ] = "0,100KB,500KB,1MiB,2MiB,4MiB,8MiB,16MiB,32MiB",
) -> None:
    """Measure passes by the bytes that plans leave in flight.

    Example: python -m benchmarks.disk.depth --rate 3.5e9 --answer 1000000 --tokens 8
    """
    with tempfile.TemporaryDirectory(dir=".") as folder:
        program = compile_linears(Path(folder), parse_size(size), tokens)
        given = program.plan(budget, arena=arena)
        if not given.streamed_bytes:
            raise typer.BadParameter(f"nothing streams within {budget} of {size}: give less")
        computing = in_memory(program, tokens)
        link = replace(given.hardware, link_bytes_per_s=rate, link_in_flight_bytes=int(rate * answer / 1e9))
        plans = {}
        for depth in depths.split(","):
            hardware = replace(link, link_in_flight_bytes=0 if depth == "0" else parse_size(depth))
            plans[depth] = program.plan(budget, arena=arena, hardware=hardware)
        seconds: dict[str, list[float]] = {depth: [] for depth in plans}
        with emulated_link(Path(folder), rate, answer):
            for number in range(rounds):
                order = list(plans)
                for depth in order[number % len(order) :] + order[: number % len(order)]:
                    with program.load(plan=plans[depth], options=LoadOptions(engine="native")) as module:
                        seconds[depth].append(time_passes(module, tokens))
    _print(plans, seconds, link, computing, f"{size}, {tokens} tokens, {budget}, {arena}, {rounds} rounds")


def _print(
    plans: dict[str, Plan], seconds: dict[str, list[float]], link: Hardware, computing: float, what: str
) -> None:
    machine = describe_machine()
    fills = format_size(link.link_in_flight_bytes)
    typer.echo(
        f"{what}; {machine['cpu']}, {machine['cores']} cores, {machine['date']}. The link brings "
        f"{link.link_bytes_per_s / 1e9:.2f} GB/s and is filled by {fills}; in memory {computing:.3f} s.\n"
    )
    typer.echo("| planned for | stays | steps ahead | predicted, s | a pass, s | share of the limit |")
    typer.echo("|---|---|---|---|---|---|")
    least = min(plan.streamed_bytes for plan in plans.values()) / link.link_bytes_per_s
    for depth, plan in plans.items():
        (trace,), (schedule,) = plan.traces, plan.schedules
        predicted = steady_period_ns(trace, schedule, link, plan.wrap) / 1e9
        took = median(seconds[depth])
        stays = format_size(sum(one.nbytes for one in plan.resident))
        typer.echo(
            f"| {depth} | {stays} | {ahead(plan):.1f} | {predicted:.3f} | {took:.3f} "
            f"| {max(least, computing) / took:.3f} |"
        )


if __name__ == "__main__":
    typer.run(main)
