"""Steps of adapter training: plain, with mapped weights, by penstock.

Each way runs in a process of its own, one step a round, in an order that rotates. All train the same decoder
with the same adapters on the same tokens; the gradients of the first step are compared with those of plain
PyTorch, to the bit. Cold rounds drop the weights from the page cache before each step. In a control group,
whose limit is a bare process and half of the weights, all memory of the process counts, page cache included.
penstock keeps all that the backward reads, or the outputs of layers alone (`penstock-layers`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

import penstock
from benchmarks.machine import describe_machine, drop_cache, forget_peak, read_disk_bytes, read_memory
from benchmarks.ways import Way, answer, in_turn, scratch, started
from penstock import LoadOptions

WAYS = ("plain", "mapped", "penstock", "penstock-layers")
STATES = ("warm", "cold", "cgroup")
TRAINED = ("*down*", "*up*")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does: a way to train, the sizes of the model, and where its weights are."""

    way: str
    layers: int
    width: int
    tokens: int
    budget: str
    folder: str

    @property
    def streams(self) -> bool:
        return self.way.startswith("penstock")

    @property
    def weights(self) -> Path:
        """A file of its own for each way: what one process has mapped stays in the page cache."""
        return Path(self.folder) / f"{self.way}.safetensors"

    @property
    def files(self) -> list[Path]:
        return list(self.artifact.glob("*.safetensors")) if self.streams else [self.weights]

    @property
    def artifact(self) -> Path:
        return Path(self.folder) / "model.penstock"


class Frozen(nn.Linear):
    """A linear without bias whose weight is frozen."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)
        self.requires_grad_(False)


class Adapted(Frozen):
    """A frozen linear with an adapter of rank 8."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer)
        self.down, self.up = nn.Linear(inner, 8, bias=False), nn.Linear(8, outer, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = super().forward(x) + self.up(self.down(x))
        return adapted


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width).requires_grad_(False) for _ in range(2))
        self.query, self.value = Adapted(width, width), Adapted(width, width)
        self.key, self.out = Frozen(width, width), Frozen(width, width)
        self.gate, self.wide, self.back = (
            Frozen(width, 3 * width),
            Frozen(width, 3 * width),
            Frozen(3 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, (batch, length, width) = self.norms[0](x), x.shape
        heads = [
            one(seen).view(batch, length, -1, 64).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        ]
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        seen = self.norms[1](x)
        wide: torch.Tensor = self.back(functional.silu(self.gate(seen)) * self.wide(seen))
        return x + wide


class Decoder(nn.Module):
    """Layers between an embedding and a head, in float32; its result is the loss of the next token."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, width).requires_grad_(False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = Frozen(width, 8192)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(job: Job) -> torch.Tensor:
    return torch.randint(0, 8192, (1, job.tokens + 1), generator=torch.Generator().manual_seed(0))


def prepare(jobs: list[Job]) -> tuple[int, float]:
    """Writes the weights of every way once; returns bytes of frozen weights, and seconds of compiling.

    Those are seconds of the processor.
    """
    torch.manual_seed(0)
    job = jobs[0]
    model = Decoder(job.layers, job.width)
    for one in {*jobs, dataclasses.replace(job, way="plain")}:
        if not one.streams:
            save_file(model.state_dict(), one.weights)
    begun = time.process_time()
    program = penstock.compile_training(
        model, job.artifact, example=(batch(job),), trainable=TRAINED, evaluate=False
    )
    return program.weight_bytes, time.process_time() - begun


def load(job: Job) -> nn.Module:
    """The model of a way, with the values of the file."""
    if job.streams:
        kept = job.way.removeprefix("penstock").strip("-") or "keep"
        return penstock.open(job.artifact).load(job.budget, options=LoadOptions(activations=kept))
    with torch.device("meta"):
        model = Decoder(job.layers, job.width)
    values = load_file(job.weights)  # mapped
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    copied = values if job.way == "plain" else trained
    values |= {name: values[name].clone() for name in copied}
    model.load_state_dict(values, assign=True)
    for name, one in model.named_parameters():
        one.requires_grad_(name in trained)
    return model


def stepping(job: Job) -> Callable[[str], dict[str, Any]]:
    """What a process does for each line, which is the state of the page cache: one step of training."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokens, bare = batch(job), read_memory().anonymous
    model = load(job)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-4)

    def step(state: str) -> dict[str, Any]:
        if state == "cold":
            drop_cache(job.files, unmap=not job.streams)
        forget_peak()
        optimizer.zero_grad()
        read, start = read_disk_bytes(), time.perf_counter()
        model(tokens).backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        gradients = {name: one.grad for name, one in trained.items() if one.grad is not None}
        digest = hashlib.sha256()
        for name in sorted(gradients):
            digest.update(gradients[name].numpy().tobytes())
        memory = read_memory()
        return {
            "seconds": seconds,
            "read": read_disk_bytes() - read,
            "gradients": f"{len(gradients)} of {len(trained)}",
            "digest": digest.hexdigest(),
            "anonymous": memory.anonymous - bare,
            "peak": memory.peak,
        }

    return step


def rows(ways: dict[str, Way], expected: str) -> Iterator[str]:
    """The rows of a table: the first step warms up and gives the gradients, the others the time."""
    plain = ways.get("plain")
    base = median(step["seconds"] for step in plain.steps[1:]) if plain and plain.steps[1:] else None
    for name, way in ways.items():
        if way.failure:
            yield f"| {name} | {way.failure} | | | | |"
            continue
        first, rest = way.steps[0], way.steps[1:]
        seconds = [step["seconds"] for step in rest]
        ratio = f"{median(seconds) / base:.2f}" if base else ""
        read = median(step["read"] for step in rest)
        held = max(step["anonymous"] for step in way.steps)
        peak = max(step["peak"] for step in way.steps)
        equal = "equal" if first["digest"] == expected else "different"
        yield (
            f"| {name} | {median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f}) | {ratio} "
            f"| {read / 2**20:.0f} | {held / 2**20:.0f}; {peak / 2**20:.0f} | {first['gradients']}, {equal} |"
        )


def main(
    *,
    layers: Annotated[int, typer.Option(min=1)] = 12,
    width: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="In a step.")] = 128,
    budget: Annotated[str, typer.Option(help="Of penstock, for weights.")] = "25%",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    states: Annotated[str, typer.Option(help=f"Some of {', '.join(STATES)}.")] = ",".join(STATES),
    ways: Annotated[str, typer.Option(help=f"Some of {', '.join(WAYS)}.")] = ",".join(WAYS),
    serve_job: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Measure steps of training.

    Example: python -m benchmarks.training --layers 24 --states cold
    """
    if serve_job:
        penstock.Payload  # noqa: B018 - its libraries count as bare, as those of the others do
        answer(partial(stepping, Job(**json.loads(serve_job))))
        return
    machine = describe_machine()
    with torch.device("meta"):
        whole = sum(one.nbytes for one in Decoder(layers, width).parameters())
    with scratch(int(1.01 * whole * (len(ways.split(",")) + 2))) as folder:
        plain = Job("plain", layers, width, tokens, budget, str(folder))
        jobs = [dataclasses.replace(plain, way=way) for way in ways.split(",")]
        nbytes, compiled = prepare(jobs)
        plan = penstock.open(jobs[0].artifact).plan(budget)
        with contextlib.closing(Way("benchmarks.training.__main__", plain, None)) as alone:
            alone.load()
            alone.step("warm")
        typer.echo(
            f"{nbytes / 2**20:.0f} MiB of frozen weights in {layers} layers, {tokens} tokens; "
            f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}; {rounds} rounds, "
            f"penstock within {budget}, predicted {plan.predicted_seconds:.3f} s a step, "
            f"lower bound {plan.lower_bound_seconds or 0:.3f} s; compiling took {compiled:.1f} s of a core."
        )
        for state in states.split(","):
            limits = dict.fromkeys(ways.split(","), nbytes // 2) if state == "cgroup" else {}
            with started("benchmarks.training.__main__", jobs, limits) as running:
                for number in range(rounds + 1):
                    for name in in_turn(running, number):
                        running[name].step("cold" if state != "warm" else "warm")
                typer.echo(f"\n### {state}\n")
                typer.echo(
                    "| way | seconds a step | of plain | MiB read | MiB held; with libraries | gradients |"
                )
                typer.echo("|---|---|---|---|---|---|")
                typer.echo("\n".join(rows(running, alone.steps[0]["digest"])))


if __name__ == "__main__":
    typer.run(main)
