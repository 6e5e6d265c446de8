"""Tokens of a mixture of experts whose weights are several times the memory, by penstock and by others.

This is the method:

- Each way runs in a process of its own, one token a round, in an order that rotates. All compute the same
  layers with the same weights for the same routes, and their outputs are compared to the bit.
- Each but `memory` has a memory group of a bare process and a share of the weights, page cache included;
  penstock's budget is that share without what a process takes beside weights. `least` has the smallest
  budget that there is, in a group of that and the same overhead.
- mmap maps a file of its own; accelerate offloads to disk. The page cache has none of the files when the
  first token begins. The first tokens, which fill caches, do not count.
- Times are compared within a round, as a virtual machine's speed changes by several times within minutes.

Linux only; groups need root. Peer: `pip install '.[bench]'`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file

import penstock
from benchmarks import machine
from benchmarks.experts.mixture import ROUTINGS, SHAPES, Model, Shape, draw, write_weights
from benchmarks.ways import Way, answer, in_turn, scratch, started

WAYS = ("memory", "units", "least", "mmap", "accelerate")
STREAMED = ("units", "least")
OVERHEAD = 192 << 20
"""Bytes of a group that are left for the interpreter's own growth, activations and inputs."""

COLUMNS = (
    "way",
    "s a token",
    "times units",
    "of a processor, s",
    "MiB read",
    "MiB moved",
    "peak MiB",
    "result",
)


@dataclass(frozen=True)
class Job:
    """What one process does; `tokens` bounds how often it is asked to."""

    way: str
    model: str
    layers: int
    routing: str
    tokens: int
    folder: str
    budget: int = 0

    @property
    def shape(self) -> Shape:
        return replace(SHAPES[self.model], layers=self.layers)

    @property
    def artifact(self) -> Path:
        return Path(self.folder) / f"{self.way}.penstock"

    @property
    def weights(self) -> Path:
        """A file of its own for each way: one process could find what another has left in the page cache."""
        return Path(self.folder) / f"{self.way}.safetensors"

    @property
    def offloaded(self) -> Path:
        return Path(self.folder) / "offloaded"


def prepare(jobs: Sequence[Job]) -> int:
    """Write the files of every way; return the bytes of the weights."""
    first = jobs[0]
    nbytes = write_weights(first.shape, first.weights)
    model = load_mapped(first)
    exported = torch.export.export(
        model, (torch.zeros(1, dtype=torch.int64), draw(first.shape, "uniform", 1)[0])
    )
    for job in jobs:
        if job.way == "accelerate":
            from accelerate.utils import offload_state_dict

            offload_state_dict(job.offloaded, model.state_dict())
            continue
        if job is not first:
            shutil.copyfile(first.weights, job.weights)
        if job.way in STREAMED:
            penstock.compile(exported, job.artifact, weights=[job.weights], pack=False)
    return nbytes


def load_mapped(job: Job) -> Model:
    """Return the model with the weights of its file, which are mapped."""
    with torch.device("meta"):
        model = Model(job.shape).to(torch.bfloat16).eval()
    model.load_state_dict(load_file(job.weights), assign=True)
    return model


def load(job: Job) -> Any:
    """Return the model of a way."""
    if job.way in STREAMED:
        return penstock.open(job.artifact).load(job.budget)
    if job.way == "accelerate":
        from accelerate import disk_offload

        with torch.device("meta"):
            model = Model(job.shape).to(torch.bfloat16).eval()
        return disk_offload(model, job.offloaded, execution_device=torch.device("cpu"))
    model = load_mapped(job)
    if job.way == "memory":
        copies = {name: copy_aligned(value) for name, value in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)
    return model


def copy_aligned(value: torch.Tensor) -> torch.Tensor:
    """A copy at the same address modulo 64, since products of other addresses take other times."""
    phase = value.data_ptr() % 64
    copy = torch.empty(phase + value.nbytes, dtype=torch.uint8)[phase:].view(value.dtype).view(value.shape)
    return copy.copy_(value)


def stepping(job: Job) -> Callable[[str], dict[str, Any]]:
    """Return what a process does for each line: it computes a token."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    bare = machine.read_memory()
    model = load(job)
    drawn = iter(draw(job.shape, job.routing, job.tokens))
    token = torch.tensor([len(job.routing) * 37 % job.shape.words])
    machine.forget_peak()

    def step(_: str) -> dict[str, Any]:
        route = next(drawn)
        read, start, spent = machine.read_disk_bytes(), time.perf_counter(), time.process_time()
        with torch.no_grad():
            result = model(token, route)
        return {
            "seconds": time.perf_counter() - start,
            "processor": time.process_time() - spent,
            "read": machine.read_disk_bytes() - read,
            "moved": model.stats.bytes_moved if job.way in STREAMED else 0,
            "digest": hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            "peak": machine.read_memory().peak - bare.total,
        }

    return step


def measure(jobs: Sequence[Job], limits: Mapping[str, int]) -> dict[str, Way]:
    """Run every way, as many tokens as its job says, with files that the page cache has not."""
    folder = Path(jobs[0].folder)
    machine.drop_cache([*folder.glob("*.safetensors"), *jobs[0].offloaded.glob("*.dat")])
    with started("benchmarks.experts.__main__", jobs, limits) as ways:
        for number in range(jobs[0].tokens):
            for name in in_turn(ways, number):
                ways[name].step("token")
    return ways


def render(ways: Mapping[str, Way], warm_up: int) -> Iterator[str]:
    """Yield the lines of a table; the first `warm_up` tokens do not count."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    units = ways.get("units")
    expected = next(way for way in ways.values() if not way.failure)
    for name, way in ways.items():
        if way.failure:
            yield f"| {name} | {way.failure} |" + " |" * (len(COLUMNS) - 2)
            continue
        steps = way.steps[warm_up:]
        seconds = [step["seconds"] for step in steps]
        ratios = [
            step["seconds"] / other["seconds"]
            for step, other in zip(steps, units.steps[warm_up:] if units else (), strict=False)
        ]
        moved = (way.steps[-1]["moved"] - way.steps[warm_up - 1]["moved"]) / len(steps)
        equal = [step["digest"] for step in way.steps] == [step["digest"] for step in expected.steps]
        cells = [
            f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
            f"{median(ratios):.2f}" if ratios else "",
            f"{median(step['processor'] for step in steps):.3f}",
            f"{sum(step['read'] for step in steps) / len(steps) / 2**20:.0f}",
            f"{moved / 2**20:.0f}",
            f"{max(step['peak'] for step in way.steps) / 2**20:.0f}",
            "equal" if equal else "**different**",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def split(text: str, known: Sequence[str]) -> list[str]:
    """Return the parts of a list. Raises typer.BadParameter for one that is not known."""
    parts = text.split(",")
    if unknown := {*parts} - {*known}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose among {', '.join(known)}")
    return parts


def check_room(shape: Shape, share: float, ways: Sequence[str]) -> int:
    """Return the bytes of the files of a run. Raises typer.BadParameter where memory is too little."""
    with torch.device("meta"):
        nbytes = sum(value.numel() * 2 for value in Model(shape).parameters())
    there = machine.read_available_memory()
    need = int(nbytes * max(2.1, 1.1 + share * len(ways)))
    if need > there:
        raise typer.BadParameter(f"this needs {need >> 20} MiB of memory and there are {there >> 20}")
    return int(1.01 * len(ways) * nbytes) + (16 << 20)


def main(
    *,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "olmoe",
    layers: Annotated[int, typer.Option(min=0, help="0: as many as the model has here.")] = 0,
    share: Annotated[float, typer.Option(help="Of the weights, for the memory group.")] = 0.25,
    tokens: Annotated[int, typer.Option(min=2, help="Measured, for each routing.")] = 24,
    warm_up: Annotated[int, typer.Option(min=1, help="Tokens before those.")] = 24,
    routings: Annotated[str, typer.Option(help="Some of the routings.")] = ",".join(ROUTINGS),
    ways: Annotated[str, typer.Option(help="Some of the ways.")] = ",".join(WAYS),
    group: Annotated[bool, typer.Option(help="Run in memory groups.")] = True,
    folder: Annotated[Path | None, typer.Option(help="For the weights; a temporary one by default.")] = None,
    serve: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure tokens of a mixture of experts; ends with 1 where outputs differ.

    Example: python -m benchmarks.experts --model tiny --no-group --tokens 8 --ways memory,units,mmap
    """
    if serve:
        penstock.Payload  # noqa: B018 - its libraries count as bare, as those of the others do
        answer(partial(stepping, Job(**json.loads(serve))))
        return
    split(model, list(SHAPES))
    names = split(ways, WAYS)
    layers = layers or SHAPES[model].layers
    shape, different = replace(SHAPES[model], layers=layers), False
    with scratch(check_room(shape, share, names), folder) as place:
        jobs = [Job(name, model, layers, "", warm_up + tokens, str(place)) for name in names]
        nbytes = prepare(jobs)
        part = int(nbytes * share)
        limits = dict.fromkeys({*names} - {"memory"}, part) if group else {}
        for number, job in enumerate(jobs):
            if job.way in STREAMED:
                least = penstock.open(job.artifact).floor_bytes
                budget = least if job.way == "least" else part - OVERHEAD * group
                jobs[number] = replace(job, budget=budget)
                limits |= {"least": least + OVERHEAD} if group and job.way == "least" else {}
        facts, asked = machine.describe_machine(), layers * shape.asked * 3 * shape.inner * shape.width * 2
        typer.echo(
            f"{model}, {layers} layers: {nbytes / 2**20:.0f} MiB of weights, of which a token asks for "
            f"{asked / 2**20:.0f} MiB of experts; {'a' if group else 'no'} memory group each, of {share:.0%} "
            f"of the weights; {tokens} tokens behind {warm_up}. {facts['cpu']}, {facts['cores']} cores, "
            f"torch {facts['torch']}, {facts['date']}."
        )
        for routing in split(routings, ROUTINGS):
            text = "\n".join(
                render(measure([replace(job, routing=routing) for job in jobs], limits), warm_up)
            )
            typer.echo(f"\n### {model}, {routing}\n\n{text}")
            different |= "**different**" in text
    raise typer.Exit(different)


if __name__ == "__main__":
    typer.run(main)
