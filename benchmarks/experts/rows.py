"""Rows of a table of embeddings that is on disk: by penstock, through mmap, and by reading all of the table.

Each way runs in a process of its own, and looks up the same rows at the same time of a round, in an order
that rotates. No row is looked up twice, and before each look-up the file leaves the page cache and every
mapping, so that all rows come from the disk. Outputs are compared to the bit. penstock has the budget of
`--budget`; `whole` reads the table into memory, in blocks of 8 MiB, and looks up there.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file
from torch import nn

import penstock
from benchmarks import machine
from benchmarks.disk.cases import write_weights
from benchmarks.table import write_between
from benchmarks.ways import answer, in_turn, scratch, started
from penstock.schedule.facts.sizes import format_size, parse_size

BEGIN = "<!-- benchmarks.experts.rows writes from here -->"
WAYS = ("penstock", "mmap", "mmap-random", "whole")
COUNTS = (8, 256, 4096)
_BAR = 1 / 100
"""At most what part of a table 256 rows may read."""

_BLOCK = 8 << 20
_MADV_RANDOM = 1


@dataclass(frozen=True)
class Job:
    """What one process does."""

    way: str
    rows: int
    width: int
    budget: int
    folder: str

    @property
    def weights(self) -> Path:
        return Path(self.folder) / "table.safetensors"

    @property
    def artifact(self) -> Path:
        return Path(self.folder) / "table.penstock"


def table_of(job: Job) -> nn.Embedding:
    """The table, on meta."""
    with torch.device("meta"):
        return nn.Embedding(job.rows, job.width, dtype=torch.bfloat16)


def prepare(job: Job) -> None:
    """Write the table, and compile a program that looks up as many rows as it is asked for."""
    write_weights(table_of(job), job.weights)
    model = table_of(job)
    model.load_state_dict(load_file(job.weights), assign=True)
    dynamic = {"input": {0: torch.export.Dim("rows", min=2, max=1 << 20)}}
    exported = torch.export.export(model, (torch.zeros(8, dtype=torch.int64),), dynamic_shapes=dynamic)
    penstock.compile(exported, job.artifact, weights=[job.weights], pack=False)


def lookup(job: Job) -> Callable[[torch.Tensor], torch.Tensor]:
    """What returns rows, in the way of a job."""
    if job.way == "penstock":
        module: Callable[[torch.Tensor], torch.Tensor] = penstock.open(job.artifact).load(job.budget)
        return module
    if job.way == "whole":
        return partial(read_whole, job)
    model = table_of(job)
    model.load_state_dict(load_file(job.weights), assign=True)  # mapped
    if job.way == "mmap-random":
        start = model.weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        machine.advise(start, model.weight.data_ptr() + model.weight.nbytes - start, _MADV_RANDOM)
    return model


def read_whole(job: Job, ids: torch.Tensor) -> torch.Tensor:
    """Read the table, and look up rows in memory."""
    table = torch.empty(job.rows, job.width, dtype=torch.bfloat16)
    place = table.view(torch.uint8).numpy().reshape(-1).data
    with job.weights.open("rb", buffering=0) as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        done = 0
        while done < len(place):
            count = file.readinto(place[done : done + _BLOCK])
            if not count:
                raise OSError(f"{job.weights} ends after {done} bytes of its table")
            done += count
    return nn.functional.embedding(ids, table)


def stepping(job: Job) -> Callable[[str], dict[str, Any]]:
    """What a process does for each line, which has the number of rows: look up that many others."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    find = lookup(job)
    left = torch.randperm(job.rows, generator=torch.Generator().manual_seed(0))

    def step(line: str) -> dict[str, Any]:
        nonlocal left
        ids, left = left[: int(line)], left[int(line) :]
        machine.drop_cache([job.weights], unmap=job.way != "penstock")
        read, start, spent = machine.read_disk_bytes(), time.perf_counter(), time.process_time()
        with torch.no_grad():
            found = find(ids)
        seconds, processor = time.perf_counter() - start, time.process_time() - spent
        read = machine.read_disk_bytes() - read
        machine.drop_cache([job.weights], unmap=job.way != "penstock")
        digest = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        return {"rows": len(ids), "seconds": seconds, "processor": processor, "read": read, "digest": digest}

    return step


def run(jobs: list[Job], rounds: int) -> dict[str, Any]:
    """Measure all ways; everything, as JSON can hold it. The first round warms up and is not among it."""
    prepare(jobs[0])
    machine.drop_cache([jobs[0].weights])
    with started("benchmarks.experts.rows", jobs, {}) as ways:
        for number in range(rounds + 1):
            for name in in_turn(ways, number):
                for count in COUNTS:
                    ways[name].step(str(count))
    return {
        "machine": machine.describe_machine(),
        "table": asdict(jobs[0]) | {"folder": None, "way": None},
        "ways": {
            name: {"failure": way.failure, "steps": way.steps[len(COUNTS) :]} for name, way in ways.items()
        },
    }


def render(result: dict[str, Any]) -> str:
    """The table as Markdown, and what was asked."""
    facts, table = result["machine"], result["table"]
    nbytes = 2 * table["rows"] * table["width"]
    first = next(way["steps"] for way in result["ways"].values() if not way["failure"])
    lines = [
        f"{table['rows']} rows of {table['width']} numbers in bfloat16, {format_size(nbytes)}; penstock "
        f"within {format_size(table['budget'])}, medians of {len(first) // len(COUNTS)}. {facts['cpu']}, "
        f"{facts['cores']} cores, torch {facts['torch']}, {facts['date']}.",
        "",
        "| rows | way | ms (min to max) | of a processor, ms | bytes read | of the table | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for count in COUNTS:
        for name, way in result["ways"].items():
            lines.append(_row(count, name, way, first, nbytes))
    return "\n".join([*lines, "", *_verdict(result, nbytes)]) + "\n"


def _row(count: int, name: str, way: dict[str, Any], first: list[dict[str, Any]], nbytes: int) -> str:
    if way["failure"]:
        return f"| {count} | {name} | {way['failure']} | | | | |"
    steps = [step for step in way["steps"] if step["rows"] == count]
    alike = [step["digest"] for step in first if step["rows"] == count] == [step["digest"] for step in steps]
    times = [1000 * step["seconds"] for step in steps]
    read = median(step["read"] for step in steps)
    return (
        f"| {count} | {name} | {median(times):.1f} ({min(times):.1f} to {max(times):.1f}) "
        f"| {1000 * median(step['processor'] for step in steps):.1f} | {format_size(round(read))} "
        f"| {read / nbytes:.5f} | {'equal' if alike else '**different**'} |"
    )


def _verdict(result: dict[str, Any], nbytes: int) -> Iterator[str]:
    ours = result["ways"].get("penstock")
    if ours and not ours["failure"]:
        most = max(step["read"] for step in ours["steps"] if step["rows"] == 256) / nbytes
        met = "met" if most <= _BAR else "**not met**"
        yield f"Asked: 256 rows read at most {_BAR:g} of the table. Measured: {most:.5f} at most, {met}."


def main(
    *,
    rows: Annotated[int, typer.Option(min=8192, help="Of the table.")] = 262144,
    width: Annotated[int, typer.Option(min=16, help="Numbers in a row.")] = 4096,
    budget: Annotated[str, typer.Option(help="Of penstock.")] = "64MiB",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    ways: Annotated[str, typer.Option(help="Some of the ways.")] = ",".join(WAYS),
    folder: Annotated[Path | None, typer.Option(help="For the table; a temporary one by default.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the table into this document.")] = None,
    rendered: Annotated[Path | None, typer.Option("--render", help="Only print this JSON.")] = None,
    serve: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure looking up rows.

    Example: python -m benchmarks.experts.rows --rows 16384 --budget 1MiB --rounds 2
    """
    if serve:
        answer(partial(stepping, Job(**json.loads(serve))))
        return
    if rendered is not None:
        result = json.loads(rendered.read_text(encoding="utf-8"))
    else:
        names = ways.split(",")
        if {*names} - {*WAYS}:
            raise typer.BadParameter(f"--ways takes some of {', '.join(WAYS)}")
        if (rounds + 1) * sum(COUNTS) > rows:
            raise typer.BadParameter(f"{rounds} rounds look up more rows than {rows}: no row comes twice")
        nbytes = 2 * rows * width
        with scratch(int(1.01 * nbytes) + (16 << 20), folder) as place:
            jobs = [Job(way, rows, width, parse_size(budget, total=nbytes), str(place)) for way in names]
            result = run(jobs, rounds)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if docs is not None:
        write_between(docs, render(result), BEGIN)
    typer.echo(render(result))


if __name__ == "__main__":
    typer.run(main)
