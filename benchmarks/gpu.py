"""Compares streaming on a GPU with everything resident, with accelerate and diffusers, and with the limit.

A Llama-shaped decoder: one token and a prompt, at budgets from the floor to everything. The rate of copies
from page-locked memory is measured first; the limit of a cell is the larger of the time with everything
resident and of copying what the plan streams at that rate. Outputs must be equal bit for bit to the resident
model's; the peak that torch's allocator reports is printed beside budget and activations.

`--device sim:NAME` runs penstock's part without a GPU, on the virtual clock: it tests the script, and
measures nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import penstock
from benchmarks.cases import load_weights, make_inputs, make_meta_module, write_weights
from benchmarks.machine import describe_machine
from penstock.runtime.program import Program
from penstock.schedule.sizes import format_size, parse_size

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Budgets, as shares of the way from the floor to all weights."""

TOKENS = (1, 512)
LIMIT_SECONDS = 480
"""After which no further model is begun."""


class Machine:
    """The device that is measured: its clock, and what a copy takes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.simulated = name.startswith("sim")
        self.where = torch.device("cpu" if self.simulated else name)

    def seconds(self, call: Callable[[], object]) -> float:
        """Of a call and all that it has enqueued."""
        self.finish()
        began = time.perf_counter()
        call()
        self.finish()
        return time.perf_counter() - began

    def finish(self) -> None:
        if not self.simulated:
            torch.cuda.synchronize(self.where)

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Holds afterwards the most bytes that torch's allocator had on the device."""
        found: list[int] = []
        if not self.simulated:
            torch.cuda.reset_peak_memory_stats(self.where)
        yield found
        found.append(0 if self.simulated else torch.cuda.max_memory_allocated(self.where))


def offload_with_accelerate(module: torch.nn.Module, where: torch.device) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, execution_device=where)


def offload_with_diffusers(module: torch.nn.Module, where: torch.device, kind: str) -> None:
    from diffusers.hooks import apply_group_offloading

    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(
        module,
        onload_device=where,
        offload_device=torch.device("cpu"),
        offload_type=kind,
        use_stream=True,
        **blocks,
    )


PEERS: dict[str, Callable[[torch.nn.Module, torch.device], None]] = {
    "accelerate": offload_with_accelerate,
    "diffusers, blocks": partial(offload_with_diffusers, kind="block_level"),
    "diffusers, leaves": partial(offload_with_diffusers, kind="leaf_level"),
}


def measure_peers(machine: Machine, module: Any, weights: Path, inputs: Any, rounds: int) -> dict[str, float]:
    """Median seconds of a call of each peer; one that fails is left out, and named."""
    found = {}
    for name, offload in PEERS.items():
        load_weights(module, weights, in_memory=True)
        try:
            offload(module, machine.where)
            module(*inputs)
            found[name] = median(machine.seconds(partial(module, *inputs)) for _ in range(rounds))
        except Exception as error:
            typer.echo(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0]}", err=True)
    return found


def measure(machine: Machine, nbytes: int, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each budget."""
    module = make_meta_module("llama", nbytes)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        weights = Path(folder) / "weights.safetensors"
        write_weights(module, weights)
        load_weights(module, weights, in_memory=True)
        given = make_inputs(module, tokens)
        program = penstock.compile(torch.export.export(module, given), Path(folder) / "model.penstock")
        inputs = tuple(value.to(machine.where) for value in given)
        resident = module.to(machine.where)
        expected = resident(*inputs)
        whole = median(machine.seconds(partial(resident, *inputs)) for _ in range(rounds))
        del resident
        everything = program.plan("100%", device=machine.name)
        rate = everything.hardware.link_bytes_per_s
        if machine.simulated:
            whole = everything.predicted_seconds
        module = make_meta_module("llama", nbytes)
        peers = {} if machine.simulated else measure_peers(machine, module, weights, inputs, rounds)
        floor = program.floor(machine.name)
        cell = Cell(machine, program, inputs, expected, rounds)
        for share in SHARES:
            budget = floor + int(share * (program.weight_bytes - floor))
            row = {"tokens": tokens, "weights": program.weight_bytes, "resident_s": whole, "peers_s": peers}
            yield row | {"link_bytes_per_s": rate} | cell.run(budget)


@dataclass(frozen=True)
class Cell:
    """A program, what it is called with, and what it must return."""

    machine: Machine
    program: Program
    inputs: tuple[torch.Tensor, ...]
    expected: torch.Tensor
    rounds: int

    def run(self, budget: int) -> dict[str, Any]:
        """What came of streaming within a budget."""
        plan = self.program.plan(budget, device=self.machine.name)
        with (
            self.machine.peak() as peak,
            self.program.load(plan=plan, device=self.machine.name) as module,
        ):
            equal = torch.equal(module(*self.inputs), self.expected)
            module(*self.inputs)
            times = [self.machine.seconds(partial(module, *self.inputs)) for _ in range(self.rounds)]
            stats = module.stats
        return {
            "budget": budget,
            "equal": equal,
            "seconds": plan.predicted_seconds if self.machine.simulated else median(times),
            "predicted_s": plan.predicted_seconds,
            "copying_s": plan.streamed_bytes / plan.hardware.link_bytes_per_s,
            "held_bytes": stats.peak_bytes,
            "device_peak_bytes": peak[0],
            "activation_bytes": self.program.activation_bytes,
            "misses": stats.misses,
        }


def render(rows: list[dict[str, Any]]) -> str:
    columns = ("tokens", "budget", "ms", "over the limit", "over resident", "best peer over ours", "equal")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        limit = max(row["resident_s"], row["copying_s"])
        best = min(row["peers_s"].values(), default=0.0)
        budget = f"{format_size(row['budget'])} of {format_size(row['weights'])}"
        ms = f"{row['seconds'] * 1e3:.2f}"
        ratios = [f"{row['seconds'] / other:.3f}" for other in (limit, row["resident_s"])]
        cells = [str(row["tokens"]), budget, ms, *ratios, f"{best / row['seconds']:.2f}"]
        lines.append("| " + " | ".join([*cells, "yes" if row["equal"] else "NO"]) + " |")
    return "\n".join(lines)


def main(
    *,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or sim:NAME to try the script.")] = "cuda",
    sizes: Annotated[str, typer.Option(help="Bytes of weights, separated by ','.")] = "2GiB,8GiB",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measure a GPU.

    Example: python benchmarks/gpu.py --json benchmarks/results/gpu.json
    """
    machine = Machine(device)
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for size in sizes.split(","):
        for tokens in TOKENS:
            if time.perf_counter() - began > LIMIT_SECONDS:
                typer.echo(f"left out for want of time: {size}, {tokens} tokens", err=True)
                continue
            rows += measure(machine, parse_size(size), tokens, rounds)
    name = device if machine.simulated else torch.cuda.get_device_name(machine.where)
    rate = format_size(int(rows[0]["link_bytes_per_s"]))
    typer.echo(f"{name}, torch {torch.__version__}; copies at {rate} a second\n")
    typer.echo(render(rows))
    if json_path:
        found = {"device": name, "machine": describe_machine(), "torch": torch.__version__, "rows": rows}
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
