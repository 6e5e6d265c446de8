"""Tokens of a mixture of experts whose weights are several times the memory, by penstock and by others.

This is the method:

- Each way runs in a process of its own, one token a round, in an order that rotates. All compute the same
  layers with the same weights for the same routes, and their outputs are compared to the bit.
- Each but `memory` has a memory group of a bare process and a share of the weights, page cache included;
  penstock's budget is that share without what a process takes beside weights. `least` has the smallest
  budget that there is, in a group of that and the same overhead. `before` is penstock as it was without reads
  by units: the same plan, but every stack of experts is read whole.
- mmap maps a file of its own, `mmap-random` another with MADV_RANDOM; accelerate offloads to disk. The page
  cache has none of the files when the first token begins. The first tokens, which fill caches, do not count.
- `disk` reads experts drawn at random from the file, past the page cache, in pieces and with as many readers
  as penstock has, just before and just after penstock's own token, as many bytes as that last missed. What
  penstock could reach is the time to read the bytes that it missed at this rate, and then to compute what
  `memory` computes, in the same round.
- With room for all weights, `full` runs beside `memory` alone, at the end. Both have weights where a mapping
  of the file has them, modulo 64: products of weights elsewhere take some hundredths less or more.
- Times are compared within a round, as a virtual machine's speed changes by several times within minutes.

Linux only; groups need root. Peer: `pip install '.[bench]'`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file

import penstock
from benchmarks import machine
from benchmarks.disk.reader import read_pieces
from benchmarks.experts.mixture import ROUTINGS, SHAPES, Model, Shape, draw, write_weights
from benchmarks.experts.table import BEGIN, render
from benchmarks.table import write_between
from benchmarks.ways import Way, answer, in_turn, scratch, started
from penstock.runtime.files.artifact_files import read_payload, replace_payload
from penstock.runtime.sparse.units import FEW, PIECE
from penstock.schedule.facts.errors import SourceError

OURS = ("before", "units", "least", "full")
WAYS = ("memory", "before", "units", "least", "mmap", "mmap-random", "accelerate")
_MADV_RANDOM = 1
_OVERHEAD = 192 << 20
"""Bytes of a group that are left for the interpreter's own growth, activations and inputs."""

_LEAST_READ = 64 << 20
"""Bytes. Less is not read to learn the rate of a disk."""


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
        return Path(self.folder) / f"{'units' if self.way == 'full' else self.way}.penstock"

    @property
    def weights(self) -> Path:
        """A file of its own for each way that might find what another has left in the page cache."""
        own = "units" if self.way in ("memory", "full", "disk") else self.way
        return Path(self.folder) / f"{own}.safetensors"

    @property
    def offloaded(self) -> Path:
        return Path(self.folder) / "offloaded"


def prepare(ways: Sequence[str], job: Job) -> int:
    """Write the files of every way; returns the bytes of the weights."""
    nbytes = write_weights(job.shape, job.weights)
    for way in {*ways} - {"accelerate"}:
        own = replace(job, way=way).weights
        if not own.exists():
            shutil.copyfile(job.weights, own)
    model = mapped(job)
    if "accelerate" in ways:
        from accelerate.utils import offload_state_dict

        offload_state_dict(job.offloaded, model.state_dict())
    route = draw(job.shape, "uniform", 1)[0]
    exported = torch.export.export(model, (torch.zeros(1, dtype=torch.int64), route))
    for way in {"units", *ways} & {"units", "before", "least"}:
        artifact = replace(job, way=way).artifact
        penstock.compile(exported, artifact, weights=[replace(job, way=way).weights], pack=False)
        if way == "before":
            payload = read_payload(artifact)
            steps = [tuple(replace(step, sparse=()) for step in trace.steps) for trace in payload.traces]
            traces = tuple(replace(one, steps=own) for one, own in zip(payload.traces, steps, strict=True))
            replace_payload(artifact, replace(payload, traces=traces))
    return nbytes


def mapped(job: Job) -> Model:
    """The model with the weights of its file, which are mapped."""
    with torch.device("meta"):
        model = Model(job.shape).to(torch.bfloat16).eval()
    model.load_state_dict(load_file(job.weights), assign=True)
    return model


def load(job: Job) -> Any:
    """The model of a way."""
    if job.way in OURS:
        return penstock.open(job.artifact).load(job.budget or "100%")
    if job.way == "accelerate":
        from accelerate import disk_offload

        with torch.device("meta"):
            model = Model(job.shape).to(torch.bfloat16).eval()
        return disk_offload(model, job.offloaded, execution_device=torch.device("cpu"))
    model = mapped(job)
    if job.way == "memory":
        copies = {name: copied(value) for name, value in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)
        machine.drop_cache([job.weights], unmap=True)  # or penstock would read its file from the page cache
    if job.way == "mmap-random":
        for value in model.state_dict().values():
            start = value.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            machine.advise(start, value.data_ptr() + value.nbytes - start, _MADV_RANDOM)
    return model


def copied(value: torch.Tensor) -> torch.Tensor:
    """A copy at the same address modulo 64, since products of other addresses take other times."""
    phase = value.data_ptr() % 64
    copy = torch.empty(phase + value.nbytes, dtype=torch.uint8)[phase:].view(value.dtype).view(value.shape)
    return copy.copy_(value)


def stepping(job: Job) -> Callable[[str], dict[str, Any]]:
    """What a process does for each line: a token, or for `disk` a read of as many bytes as the line says."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if job.way == "disk":
        return partial(read_bare, job, Random(0))
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
        seconds, processor = time.perf_counter() - start, time.process_time() - spent
        memory = machine.read_memory()
        return {
            "seconds": seconds,
            "processor": processor,
            "read": machine.read_disk_bytes() - read,
            "moved": model.stats.bytes_moved if job.way in OURS else 0,
            "digest": hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            "anonymous": memory.anonymous - bare.anonymous,
            "peak": memory.peak - bare.total,
        }

    return step


def read_bare(job: Job, random: Random, line: str) -> dict[str, Any]:
    """Read whole experts, wherever they are in the file, until as many bytes are read as the line says."""
    with job.weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        first = file.tell()
    stacks = [one for name, one in header.items() if ".experts." in name]
    pieces: list[tuple[int, int]] = []
    nbytes = 0
    while nbytes < int(line):
        stack = random.choice(stacks)
        start, stop = stack["data_offsets"]
        unit = (stop - start) // stack["shape"][0]
        place = (first + start + random.randrange(stack["shape"][0]) * unit) // mmap.PAGESIZE * mmap.PAGESIZE
        pieces += [(place + at, min(PIECE, unit - at)) for at in range(0, unit, PIECE)]
        nbytes += unit
    return {"seconds": read_pieces(job.weights, pieces, threads=FEW), "read": nbytes}


def drop_files(job: Job) -> None:
    """Drop the files of all ways from the page cache: penstock plans for what it finds there."""
    machine.drop_cache([*Path(job.folder).glob("*.safetensors"), *job.offloaded.glob("*.dat")])


def measure(jobs: Sequence[Job], limits: dict[str, int], rounds: int) -> dict[str, Any]:
    """Every way with the steps that it took in its rounds, those of `disk` twice as many."""
    drop_files(jobs[0])
    with started("benchmarks.experts.__main__", jobs, limits) as ways:
        disk, others = ways.get("disk"), {name: way for name, way in ways.items() if name != "disk"}
        for number in range(rounds):
            for name in in_turn(others, number):
                with _between(disk, ways[name]) if name == "units" and disk else contextlib.nullcontext():
                    ways[name].step("token")
    return {
        name: {"failure": way.failure, "bare": way.bare, "steps": way.steps} for name, way in ways.items()
    }


@contextlib.contextmanager
def _between(disk: Way, way: Way) -> Any:
    """Let the bare disk be read just before and just after a way's token."""
    nbytes = max(_LEAST_READ, way.steps[-1]["read"] if way.steps else 0)
    disk.step(str(nbytes))
    yield
    disk.step(str(nbytes))


@dataclass(frozen=True)
class Options:
    """What is measured: `tokens` of each routing behind `warm_up` others."""

    model: str
    layers: int
    share: float
    tokens: int
    warm_up: int
    routings: tuple[str, ...]
    ways: tuple[str, ...]
    group: bool

    @property
    def shape(self) -> Shape:
        return replace(SHAPES[self.model], layers=self.layers)


def run(options: Options, folder: Path) -> dict[str, Any]:
    """Measure all routings, then all weights in memory; everything, as JSON can hold it."""
    rounds = options.warm_up + options.tokens
    first = Job("units", options.model, options.layers, "", rounds, str(folder))
    nbytes = prepare(options.ways, first)
    drop_files(first)
    program = penstock.open(first.artifact)
    share = int(nbytes * options.share)
    budgets = dict.fromkeys(("before", "units"), share - _OVERHEAD * options.group)
    budgets["least"] = program.floor_bytes
    jobs = [replace(first, way=way, budget=budgets.get(way, 0)) for way in options.ways]
    limits = {job.way: share for job in jobs if options.group and job.way != "memory"}
    if "least" in limits:
        limits["least"] = budgets["least"] + _OVERHEAD
    whole = [penstock.open(job.artifact) for job in jobs if job.way == "before"]
    result: dict[str, Any] = {
        "machine": machine.describe_machine(),
        "options": asdict(options),
        "weights": nbytes,
        "asked": options.layers * options.shape.asked * 3 * options.shape.inner * options.shape.width * 2,
        "floors": [program.floor_bytes, *(one.floor_bytes for one in whole)],
        "budgets": {job.way: job.budget for job in jobs},
        "plans": {job.way: str(penstock.open(job.artifact).plan(job.budget)) for job in jobs if job.budget},
        "tables": {},
    }
    for routing in options.routings:
        typer.echo(f"{options.model}, {routing}: {rounds} rounds", err=True)
        routed = [replace(job, routing=routing) for job in jobs]
        if "units" in options.ways:
            routed.append(replace(routed[0], way="disk", budget=0))
        result["tables"][routing] = measure(routed, limits | {"disk": share} if limits else {}, rounds)
    alone = [replace(first, way=way, routing=options.routings[0]) for way in ("memory", "full")]
    result["full"] = measure(alone, {}, rounds)
    return result


def check(options: Options) -> int:
    """The bytes of the files of a run. Raises typer.BadParameter for what cannot be measured here."""
    unknown = {*options.ways} - {*WAYS} | {*options.routings} - {*ROUTINGS}
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: choose among {', '.join((*WAYS, *ROUTINGS))}"
        )
    if options.model not in SHAPES:
        raise typer.BadParameter(f"--model {options.model} is none of {', '.join(SHAPES)}")
    try:
        for routing in options.routings:
            draw(options.shape, routing, options.warm_up + options.tokens)
    except (SourceError, ValueError) as error:
        raise typer.BadParameter(f"{error}; benchmarks/experts/recorded_routes.py records routes") from None
    with torch.device("meta"):
        nbytes = sum(one.numel() * 2 for one in Model(options.shape).parameters())
    there = machine.read_available_memory()
    need = int(nbytes * max(2.1, 1.1 + options.share * len(options.ways)))
    if need > there:
        raise typer.BadParameter(f"this needs {need >> 20} MiB of memory and there are {there >> 20}")
    copies = 1 + len({*options.ways} - {"memory", "units"})
    return int(1.01 * copies * nbytes) + (16 << 20)


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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the tables into this document.")] = None,
    rendered: Annotated[Path | None, typer.Option("--render", help="Only print this JSON.")] = None,
    serve: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure tokens of a mixture of experts.

    Example: python -m benchmarks.experts --model tiny --no-group --tokens 8 --ways memory,units,mmap
    """
    if serve:
        penstock.Payload  # noqa: B018 - its libraries count as bare, as those of the others do
        answer(partial(stepping, Job(**json.loads(serve))))
        return
    if rendered is not None:
        result = json.loads(rendered.read_text(encoding="utf-8"))
    else:
        options = Options(
            model,
            layers or SHAPES.get(model, SHAPES["tiny"]).layers,
            share=share,
            tokens=tokens,
            warm_up=warm_up,
            routings=tuple(routings.split(",")),
            ways=tuple(ways.split(",")),
            group=group,
        )
        with scratch(check(options), folder) as place:
            result = run(options, place)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if docs is not None:
        write_between(docs, render(result), BEGIN.format(model=result["options"]["model"]))
    typer.echo(render(result))


if __name__ == "__main__":
    typer.run(main)
