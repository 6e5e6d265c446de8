"""Measures the rates at which three readers bring a cold file into memory, by alignment and way of reading.

Where file offset and address agree modulo the disk's block a direct read needs nothing else. Where they do
not, as for every checkpoint whose tensors begin anywhere, whole blocks are read and moved. Ways through the
page cache are the alternatives. All ways run in turn, in a random order.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from benchmarks.calls.loading_ways import PIECE, forget_pages
from benchmarks.machine import describe_machine
from penstock.runtime.files.artifact_files import stamp_file
from penstock.runtime.files.source import Mode, Source
from penstock.runtime.system.threads import READERS
from penstock.schedule.facts.sizes import parse_size

ROOM = 64 << 20
WAYS: dict[
    str, tuple[int, Mode, bool]
] = {  # bytes off the blocks, way of opening, and whether the cache is told of each piece
    "direct, on blocks": (0, "direct", False),
    "direct and moved": (64, "direct", False),
    "through the cache, announced": (64, "buffered", True),
    "through the cache": (64, "buffered", False),
}


def read_all(folder: Path, way: str) -> tuple[float, float]:
    """Bytes per second of reading the file once, and the processor's seconds."""
    shift, mode, told = WAYS[way]
    (path,) = folder.glob("*.safetensors")
    memory = torch.zeros(ROOM + 8192, dtype=torch.uint8)
    base = -(-memory.data_ptr() // 4096) * 4096 + shift
    with Source([stamp_file(path, recorded_path=path.name)], folder, mode=mode) as source:
        file = source.files[0]
        starts = range(0, file.nbytes - PIECE, PIECE)

        def read(at: int) -> None:
            file.read_into(at, base + at % (ROOM - PIECE), PIECE, through_cache=told)

        forget_pages(folder)
        began, used = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, starts))
        return len(starts) * PIECE / (time.perf_counter() - began), time.process_time() - used


def write_file(folder: Path, nbytes: int) -> None:
    from safetensors.torch import save_file

    values = torch.frombuffer(bytearray(os.urandom(16 << 20)), dtype=torch.uint8)
    save_file({"w": values.repeat(max(1, nbytes // values.numel()))}, folder / "w.safetensors")


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of the file.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    folder: Annotated[Path | None, typer.Option(help="Where the file is made.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measure all ways in turn.

    Example: python -m benchmarks.disk.reading --json benchmarks/results/reading.json
    """
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        write_file(Path(made), parse_size(size))
        for _ in range(rounds):
            for way in random.sample(list(WAYS), len(WAYS)):
                found[way].append(read_all(Path(made), way))
    typer.echo("| way | GB/s | processor, s |\n|---|---|---|")
    for way, rows in found.items():
        rate, used = (median(row[k] for row in rows) for k in (0, 1))
        typer.echo(f"| {way} | {rate / 1e9:.2f} | {used:.2f} |")
    if json_path:
        facts = {"machine": describe_machine(), "size": size, "results": found}
        json_path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
