"""Compares streaming on a GPU with everything resident, with accelerate and diffusers, and with the limit.

A Llama-shaped decoder, one token and a prompt, and a denoising step of Flux's shape, at budgets from the
floor to everything. The rate of copies from page-locked memory is measured first; the limit of a cell is the
larger of the time with everything resident and of copying what the plan streams at that rate. A pass is
also captured as a CUDA graph and replayed. Outputs must be equal bit for bit to the resident model's; what
the driver says is held is printed beside budget and activations. `hidden` is the share of the shorter of
copying and computing that the longer one hides: 1 where both overlap all the time, 0 where they alternate.

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
from benchmarks.flux import make_flux_inputs, make_meta_flux
from benchmarks.machine import describe_machine
from penstock.runtime.device.opening import open_accelerator
from penstock.runtime.program import Program
from penstock.schedule.facts.sizes import format_size, parse_size

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Budgets, as shares of the way from the floor to all weights."""

CALLS = (("llama", 1), ("llama", 512), ("flux", 4096))
"""The models, and the number of tokens in a call."""

LIMIT_SECONDS = 480
"""Seconds after which no further model is begun."""


class Machine:
    """The device that is measured: its clock, and the rate of its copies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.simulated = name.startswith("sim")
        self.where = torch.device("cpu" if self.simulated else name)

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call and of all that it has enqueued."""
        self.finish()
        began = time.perf_counter()
        call()
        self.finish()
        return time.perf_counter() - began

    def finish(self) -> None:
        if not self.simulated:
            torch.accelerator.synchronize(self.where)

    def held(self) -> int:
        """Bytes of the device that are taken by any process, by the driver's count."""
        if self.simulated:
            return 0
        torch.accelerator.empty_cache()
        free, total = torch.accelerator.get_memory_info(self.where)
        return int(total - free)

    def taken(self, before: int) -> int:
        """Bytes that the driver has given out since it was asked `before`; what is freed is kept by torch."""
        if self.simulated:
            return 0
        free, total = torch.accelerator.get_memory_info(self.where)
        return int(total - free - before)

    @contextmanager
    def graph(self, call: Callable[[], object]) -> Iterator[Callable[[], object]]:
        """Replays what `call` enqueues, captured once."""
        captured = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.where),
            torch.cuda.graph(captured, stream=torch.cuda.Stream(self.where)),  # type: ignore[no-untyped-call]
        ):
            call()
        yield captured.replay
        captured.reset()


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


def measure_peers(
    machine: Machine, make: Callable[[], torch.nn.Module], weights: Path, inputs: Any, rounds: int
) -> dict[str, float]:
    """Median seconds of a call of each peer, each with a module of its own; one that fails is named."""
    found = {}
    for name, offload in PEERS.items():
        module = make()
        load_weights(module, weights, in_memory=True)
        try:
            # Groups are looked for among the children of what is given.
            offload(getattr(module, "transformer", module), machine.where)
            module(*inputs)
            found[name] = median(machine.seconds(partial(module, *inputs)) for _ in range(rounds))
        except Exception as error:
            typer.echo(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0]}", err=True)
    return found


def make_module(model: str, nbytes: int) -> torch.nn.Module:
    return make_meta_flux(nbytes) if model == "flux" else make_meta_module(model, nbytes)


def measure(
    machine: Machine, call: tuple[str, int], nbytes: int, rounds: int, *, with_peers: bool
) -> Iterator[dict[str, Any]]:
    """One row for each budget."""
    model, tokens = call
    module = make_module(model, nbytes)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        weights = Path(folder) / "weights.safetensors"
        write_weights(module, weights)
        load_weights(module, weights, in_memory=True)
        given = make_flux_inputs(tokens) if model == "flux" else make_inputs(module, tokens)
        program = penstock.compile(torch.export.export(module, given), Path(folder) / "model.penstock")
        inputs = tuple(value.to(machine.where) for value in given)
        resident = module.to(machine.where)
        expected = resident(*inputs)
        whole = median(machine.seconds(partial(resident, *inputs)) for _ in range(rounds))
        del resident, module
        everything = program.plan("100%", device=machine.name)
        rate = everything.hardware.link_bytes_per_s
        if machine.simulated:
            whole = everything.predicted_seconds
        peers = {}
        if with_peers and not machine.simulated:
            make = partial(make_module, model, nbytes)
            peers = measure_peers(machine, make, weights, inputs, rounds)
        floor = program.floor(machine.name)
        cell = Cell(machine, program, inputs, expected, rounds)
        for share in SHARES:
            budget = floor + int(share * (program.weight_bytes - floor))
            row = {
                "model": model,
                "tokens": tokens,
                "weights": program.weight_bytes,
                "resident_s": whole,
                "peers_s": peers,
            }
            yield row | {"link_bytes_per_s": rate} | cell.run(budget)


@dataclass(frozen=True)
class Cell:
    """A program, its inputs, and the expected output."""

    machine: Machine
    program: Program
    inputs: tuple[torch.Tensor, ...]
    expected: torch.Tensor
    rounds: int

    def run(self, budget: int) -> dict[str, Any]:
        """The results of streaming within a budget."""
        plan = self.program.plan(budget, device=self.machine.name)
        before = self.machine.held()
        with self.program.load(plan=plan, device=self.machine.name) as module:
            equal = torch.equal(module(*self.inputs), self.expected)
            module(*self.inputs)
            times = [self.machine.seconds(partial(module, *self.inputs)) for _ in range(self.rounds)]
            stats, peak = module.stats, self.machine.taken(before)
        return self._graphed(budget) | {
            "budget": budget,
            "equal": equal,
            "seconds": plan.predicted_seconds if self.machine.simulated else median(times),
            "predicted_s": plan.predicted_seconds,
            "copying_s": plan.streamed_bytes / plan.hardware.link_bytes_per_s,
            "held_bytes": stats.peak_bytes,
            "driver_bytes": peak,
            "activation_bytes": self.program.activation_bytes,
            "misses": stats.misses,
        }

    def _graphed(self, budget: int) -> dict[str, Any]:
        """The results of a pass as one CUDA graph, whose output must also be the resident model's."""
        if self.machine.where.type != "cuda":
            return {}
        plan = self.program.plan(budget, device=self.machine.name, wrap="barrier")
        with self.program.load(plan=plan, device=self.machine.name) as module:
            for _ in range(2):
                module(*self.inputs)
            outputs: list[torch.Tensor] = []
            with self.machine.graph(lambda: outputs.append(module(*self.inputs))) as replay:
                times = [self.machine.seconds(replay) for _ in range(self.rounds)]
                equal = torch.equal(outputs[-1], self.expected)
        return {
            "graphed_s": median(times),
            "graphed_equal": equal,
            "graphed_predicted_s": plan.predicted_seconds,
        }


def hidden(row: dict[str, Any]) -> float:
    """The share of the shorter of copying and computing that the longer one hides."""
    shorter = min(row["resident_s"], row["copying_s"])
    return (row["resident_s"] + row["copying_s"] - row["seconds"]) / shorter if shorter else 1.0


def render(rows: list[dict[str, Any]]) -> str:
    columns = (
        *("model", "tokens", "budget", "ms", "graphed, ms", "over the limit", "over resident", "hidden"),
        *("best peer over ours", "equal"),
    )
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        limit = max(row["resident_s"], row["copying_s"])
        best = min(row["peers_s"].values(), default=0.0)
        budget = f"{format_size(row['budget'])} of {format_size(row['weights'])}"
        ms = f"{row['seconds'] * 1e3:.2f}"
        ratios = [f"{row['seconds'] / other:.3f}" for other in (limit, row["resident_s"])]
        graphed = f"{row['graphed_s'] * 1e3:.2f}" if "graphed_s" in row else "-"
        peer = f"{best / row['seconds']:.2f}" if best else "-"
        cells = [row["model"], str(row["tokens"]), budget, ms, graphed, *ratios, f"{hidden(row):.2f}", peer]
        equal = row["equal"] and row.get("graphed_equal", True)
        lines.append("| " + " | ".join([*cells, "yes" if equal else "NO"]) + " |")
    return "\n".join(lines)


def main(
    *,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, xpu, or sim:NAME to try the script.")] = "cuda",
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
        for call in CALLS:
            if time.perf_counter() - began > LIMIT_SECONDS:
                typer.echo(f"left out for want of time: {size}, {call}", err=True)
                continue
            with_peers = time.perf_counter() - began < LIMIT_SECONDS / 2
            rows += measure(machine, call, parse_size(size), rounds, with_peers=with_peers)
    name = device if machine.simulated else open_accelerator(device).product
    rate = format_size(int(rows[0]["link_bytes_per_s"]))
    typer.echo(f"{name}, torch {torch.__version__}; copies at {rate} a second\n")
    typer.echo(render(rows))
    if json_path:
        found = {"device": name, "machine": describe_machine(), "torch": torch.__version__, "rows": rows}
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
