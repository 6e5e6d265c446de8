"""Tokens of a mixture of experts whose weights are several times the memory, by penstock and by others.

Each way runs in a process of its own in a memory group of a share of the weights, one token a round, in an
order that rotates. All compute the same layers with the same weights for the same routes; the routes are an
input, so that they can be drawn: uniformly, or by a law of Zipf with favourites of each layer that drift.
`before` is penstock reading every stack of experts whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import penstock
from benchmarks.machine import advise, describe_machine, drop_cache, read_disk_bytes, read_memory
from benchmarks.ways import Way, started
from penstock.runtime.files.artifact_files import read_payload, replace_payload

WAYS = ("memory", "before", "units", "mmap", "mmap-random", "accelerate")
_MADV_RANDOM = 1
_OVERHEAD = 192 << 20
"""Bytes of the group that are left for the interpreter's own growth, activations and inputs."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: those of an expert, and of how many `experts` a token asks for `asked`."""

    layers: int
    width: int
    inner: int
    experts: int
    asked: int
    words: int = 50304


SHAPES = {
    "olmoe": Shape(6, 2048, 1024, 64, 8),
    "qwen3-30b": Shape(5, 2048, 768, 128, 8, 151936),
    "tiny": Shape(3, 256, 256, 16, 2, 4096),
}


class Experts(nn.Module):
    """Experts as transformers holds and calls them: two stacks, and products of the rows sorted by expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.inner, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.inner))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        chosen = route.reshape(-1)
        order = torch.argsort(chosen)
        rows = x[order // route.shape[1]]
        counts = torch.histc(chosen.float(), self.gate_up.shape[0], 0, self.gate_up.shape[0] - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), ends).chunk(2, -1)
        out = torch._grouped_mm(nn.functional.silu(gate) * up, self.down.transpose(-2, -1), ends)
        back = torch.empty_like(order).index_put_((order,), torch.arange(order.shape[0]))
        mixed: torch.Tensor = out[back].view(*route.shape, -1).mean(1)
        return mixed


class Layer(nn.Module):
    """A dense part as large as attention, and experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))
        self.experts = Experts(shape)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        seen = self.norms[0](x)
        for one in self.mix:
            seen = one(seen)
        x = x + seen
        out: torch.Tensor = x + self.experts(self.norms[1](x), route)
        return out


class Model(nn.Module):
    """A table of words, layers, and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, tokens: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer, route in zip(self.layers, routes, strict=True):
            x = layer(x, route)
        logits: torch.Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Job:
    """What one process does."""

    way: str
    model: str
    budget: int
    folder: str

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def artifact(self) -> Path:
        return Path(self.folder) / f"{'before' if self.way == 'before' else 'units'}.penstock"

    @property
    def weights(self) -> Path:
        """A file of its own for each way: what one process has mapped stays in the page cache."""
        shared = self.way in ("before", "units", "memory")
        return Path(self.folder) / f"{'units' if shared else self.way}.safetensors"


def write_weights(shape: Shape, path: Path) -> int:
    """Write random weights whose products keep their size; returns their bytes."""
    with torch.device("meta"):
        model = Model(shape)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1 << 22, generator=generator).to(torch.bfloat16)
    values: dict[str, torch.Tensor] = {}
    for number, (name, one) in enumerate(model.named_parameters()):
        if one.dim() == 1:
            values[name] = torch.ones(one.shape, dtype=torch.bfloat16)
            continue
        rolled = noise.roll(7919 * number) * one.shape[-1] ** -0.5
        times = -(-one.numel() // len(rolled))
        values[name] = rolled.repeat(times)[: one.numel()].view(one.shape)
    save_file(values, path)
    return sum(value.nbytes for value in values.values())


def prepare(jobs: list[Job]) -> int:
    """Write the files of every way; returns the bytes of the weights."""
    shape, folder = jobs[0].shape, Path(jobs[0].folder)
    first = folder / "units.safetensors"
    nbytes = write_weights(shape, first)
    for job in jobs:
        if not job.weights.exists():
            os.system(f"cp {first} {job.weights}")
    with torch.device("meta"):
        model = Model(shape).to(torch.bfloat16).eval()
    tokens, routes = torch.zeros(1, dtype=torch.int64), draw(shape, "uniform", 1)[0]
    values = load_file(first)
    model.load_state_dict(values, assign=True)
    exported = torch.export.export(model, (tokens, routes))
    for name in ("units", "before"):
        penstock.compile(exported, folder / f"{name}.penstock", weights=[first], pack=False)
    before = read_payload(folder / "before.penstock")
    steps = [tuple(replace(step, sparse=()) for step in trace.steps) for trace in before.traces]
    traces = tuple(replace(one, steps=own) for one, own in zip(before.traces, steps, strict=True))
    replace_payload(folder / "before.penstock", replace(before, traces=traces))
    return nbytes


def draw(shape: Shape, routing: str, tokens: int) -> list[torch.Tensor]:
    """The routes of each token, (layers, 1, asked): by Zipf, each layer has favourites, which drift."""
    generator = torch.Generator().manual_seed(1)
    rank = torch.arange(1, shape.experts + 1, dtype=torch.float64)
    weight = torch.ones_like(rank) if routing == "uniform" else 1 / rank
    orders = [torch.randperm(shape.experts, generator=generator) for _ in range(shape.layers)]
    found = []
    for token in range(tokens):
        if token % 32 == 31:  # two experts of each layer change places
            for order in orders:
                pair = torch.randperm(shape.experts, generator=generator)[:2]
                order[pair] = order[pair.flip(0)]
        picked = [order[torch.multinomial(weight, shape.asked, generator=generator)] for order in orders]
        found.append(torch.stack(picked).unsqueeze(1))
    return found


def load(job: Job) -> Any:
    """The model of a way, with the values of its file."""
    if job.way in ("before", "units"):
        return penstock.open(job.artifact).load(job.budget)
    with torch.device("meta"):
        model = Model(job.shape).to(torch.bfloat16).eval()
    values = load_file(job.weights)  # mapped
    if job.way == "memory":
        values = {name: value.clone() for name, value in values.items()}
    if job.way == "mmap-random":
        for value in values.values():
            start = value.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            advise(start, value.data_ptr() + value.nbytes - start, _MADV_RANDOM)
    model.load_state_dict(values, assign=True)
    if job.way == "accelerate":
        from accelerate import disk_offload

        disk_offload(model, Path(job.folder) / "offloaded", execution_device=torch.device("cpu"))
    return model


def serve(job: Job) -> None:
    """The process of one way: loads at once, then runs a token for each line, and answers in JSON."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    penstock.Payload  # noqa: B018 - its libraries count as bare, as those of the others do
    bare = read_memory().anonymous
    model = load(job)
    print(json.dumps({"bare": bare}), flush=True)
    routes: dict[str, Iterator[torch.Tensor]] = {}
    for line in sys.stdin:
        routing = line.strip()
        drawn = routes.setdefault(routing, iter(draw(job.shape, routing, 4096)))
        token, route = torch.tensor([len(routing) * 37 % job.shape.words]), next(drawn)
        read, start, spent = read_disk_bytes(), time.perf_counter(), time.process_time()
        with torch.no_grad():
            result = model(token, route)
        answer = {
            "seconds": time.perf_counter() - start,
            "processor": time.process_time() - spent,
            "read": read_disk_bytes() - read,
            "moved": model.stats.bytes_moved if job.way in ("before", "units") else 0,
            "digest": hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            "anonymous": read_memory().anonymous - bare,
        }
        print(json.dumps(answer), flush=True)


def rows(ways: dict[str, Way], skip: int) -> Iterator[str]:
    """The rows of a table; the first tokens fill caches."""
    known = next((way for name, way in ways.items() if name == "units"), None)
    for name, way in ways.items():
        if way.failure:
            yield f"| {name} | {way.failure} | | | | |"
            continue
        rest = way.steps[skip:]
        seconds = [step["seconds"] for step in rest]
        read = sum(step["read"] for step in rest) / len(rest)
        moved = (way.steps[-1]["moved"] - way.steps[skip - 1]["moved"]) / len(rest)
        equal = known and [s["digest"] for s in known.steps] == [s["digest"] for s in way.steps]
        yield (
            f"| {name} | {median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f}) "
            f"| {median(step['processor'] for step in rest):.3f} | {read / 2**20:.0f} | {moved / 2**20:.0f} "
            f"| {max(step['anonymous'] for step in rest) / 2**20:.0f} | {'equal' if equal else 'different'} |"
        )


def main(
    *,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "olmoe",
    layers: Annotated[int, typer.Option(help="0: as many as the model has here.")] = 0,
    share: Annotated[float, typer.Option(help="Of the weights, for the memory group.")] = 0.25,
    tokens: Annotated[int, typer.Option(min=2, help="Measured, for each routing.")] = 24,
    warm_up: Annotated[int, typer.Option(min=1, help="Tokens before those.")] = 24,
    routings: Annotated[str, typer.Option(help="Some of zipf, uniform.")] = "zipf,uniform",
    ways: Annotated[str, typer.Option(help=f"Some of {', '.join(WAYS)}.")] = ",".join(WAYS[1:]),
    group: Annotated[bool, typer.Option(help="Run in a memory group.")] = True,
    folder: Annotated[str, typer.Option(help="For the weights; a temporary one by default.")] = "",
    serve_job: Annotated[str, typer.Option("--serve", hidden=True)] = "",
) -> None:
    """Measure tokens of a mixture of experts.

    Example: python benchmarks/experts.py --model tiny --tokens 8 --ways units,mmap
    """
    if serve_job:
        serve(Job(**json.loads(serve_job)))
        return
    if layers:
        SHAPES[model] = replace(SHAPES[model], layers=layers)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(dir=folder or None) as place:
        jobs = [Job(way, model, 0, place) for way in ways.split(",")]
        nbytes = prepare(jobs)
        limit = int(nbytes * share) if group else None
        budget = int(nbytes * share) - _OVERHEAD if group else int(nbytes * share)
        jobs = [dataclasses.replace(job, budget=budget) for job in jobs]
        typer.echo(
            f"{model}: {nbytes / 2**20:.0f} MiB of weights, a share of {share}; {machine['cpu']}, "
            f"{machine['cores']} cores, {machine['date']}"
        )
        for job in jobs:
            if job.way in ("before", "units"):
                plan = penstock.open(job.artifact).plan(budget)
                typer.echo(
                    f"{job.way}: floor {penstock.open(job.artifact).floor_bytes / 2**20:.0f} MiB, {plan}"
                )
        for routing in routings.split(","):
            for job in jobs:
                drop_cache([job.weights])
            with started(__file__, jobs, limit) as running:
                for number in range(warm_up + tokens):
                    names = [*running]
                    for name in names[number % len(names) :] + names[: number % len(names)]:
                        running[name].step(routing)
                typer.echo(f"\n### {routing}\n")
                typer.echo(
                    "| way | seconds a token | of a processor | MiB read | MiB moved | MiB held | result |"
                )
                typer.echo("|---|---|---|---|---|---|---|")
                typer.echo("\n".join(rows(running, warm_up)))


if __name__ == "__main__":
    typer.run(main)
