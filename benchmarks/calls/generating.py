"""Measures generating with a transformers model that gets a part of the memory of its weights.

A Llama-shaped model in bfloat16, written by transformers, generates greedily behind a prompt of 32 tokens.
Each way runs in a process of its own, in turn: time until the model is ready (for penstock at first, when it
exports and compiles, and with what it keeps of that), until the first token, for each further one, and the
most anonymous memory meanwhile, above what the libraries hold. Until it is ready the processor's time is
measured, too, which other work on the machine hardly changes. accelerate gets the same memory for weights
and keeps the rest on disk. First the page cache is warm and has room for all weights: transformers and
accelerate map the files, which then are in memory. Then memory is really small: the process joins a cgroup,
page cache included, before it loads, and the cache is cold.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks import ways as processes
from benchmarks.calls.loading import Peak, checkpoint
from benchmarks.calls.loading_ways import forget_pages, shards, warm_pages
from benchmarks.machine import describe_machine
from examples.demo.cgroup import join_group, make_group
from penstock.schedule.facts.sizes import format_size, parse_size

PROMPT = 32
READY = ("ready_s", "ready_cpu_s")


@dataclass(frozen=True)
class Generated:
    """The results of one process: seconds, bytes, and the sha256 of the tokens."""

    ready_s: float
    ready_cpu_s: float
    first_token_s: float
    token_s: float
    anonymous: int
    tokens: str


class Clock:
    """Notes when tokens come; what `generate` takes as a streamer."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter() - self.began)

    def end(self) -> None:
        """Called by `generate` at the end; there is nothing to flush."""


def load_transformers(folder: Path, _: int) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def load_accelerate(folder: Path, cap: int) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": cap}}
    return AutoModelForCausalLM.from_pretrained(folder, offload_folder=folder / "offload", **options).eval()


def load_penstock(folder: Path, cap: int) -> Any:
    from penstock.integrations import load

    return load(folder, cap)


LOADERS: dict[str, Callable[[Path, int], Any]] = {
    "transformers, all in memory": load_transformers,
    "accelerate, the rest on disk": load_accelerate,
    "penstock": load_penstock,
}

BEFORE, CHECKOUT = "penstock before", "PENSTOCK_BENCHMARK_BEFORE"
"""The way of `--before`, and the variable that says where that penstock is imported from."""


def measure_here(way: str, folder: Path, cap: int, tokens: int, group: Path | None) -> Generated:
    """Load and generate twice in this process, libraries imported before; the second time counts."""
    import accelerate  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401 (registers what it returns)

    import penstock.integrations  # noqa: F401

    if group is not None:
        join_group(group)
    ids = torch.arange(3, 3 + PROMPT)[None]
    peak = Peak()
    began, processor = time.perf_counter(), time.process_time()
    model = LOADERS[way.removesuffix(" before")](folder, cap)
    ready, ready_cpu = time.perf_counter() - began, time.process_time() - processor
    for _ in range(2):
        clock = Clock()
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "use_cache": True}
        said = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
    peak.stop()
    _, first, *others = clock.times  # the prompt is put first
    digest = hashlib.sha256(said.numpy().tobytes()).hexdigest()
    return Generated(ready, ready_cpu, first, (others[-1] - first) / len(others), peak.anonymous, digest)


def run_apart(way: str, folder: Path, cap: int, tokens: int, group: Path | None) -> Generated:
    """Measure a way in a process of its own, with a cache of its own, which is empty at first."""
    own = ["--way", way, "--folder", str(folder), "--cap", str(cap), "--tokens", str(tokens)]
    own += [] if group is None else ["--group", str(group)]
    home = {"XDG_CACHE_HOME": str(folder / f"cache of {way}")}
    if way == BEFORE:
        home["PYTHONPATH"] = os.environ[CHECKOUT]
    return Generated(**processes.run_apart("benchmarks.calls.generating", *own, **home))


def run_warm(way: str, folder: Path, cap: int, tokens: int) -> Generated:
    """With all of the weights in the page cache."""
    warm_pages(folder)
    return run_apart(way, folder, cap, tokens, None)


def run_small(way: str, folder: Path, cap: int, tokens: int, limit: int) -> Generated:
    """In a memory cgroup of `limit` bytes, the page cache cold."""
    forget_pages(folder)
    with make_group(limit) as group:
        if group is None:
            raise RuntimeError("no memory cgroup can be made here: run as root, or with --limit 0")
        return run_apart(way, folder, cap, tokens, group.folder)


def render(rows: dict[str, list[Generated]]) -> str:
    """One line for each way: medians, with the time of the first load in a column of its own."""
    lines = [
        "| way | ready at first, s | of the processor | ready, s | of the processor "
        "| first token, s | a token, s | anonymous | tokens |"
    ]
    lines.append("|---" * 9 + "|")
    for way, (at_first, *others) in rows.items():
        found, later = [at_first, *others], others or [at_first]
        ready, processor = (median(getattr(one, name) for one in later) for name in READY)
        first, token = (median(getattr(one, name) for one in found) for name in ("first_token_s", "token_s"))
        anonymous = format_size(max(one.anonymous for one in found))
        lines.append(
            f"| {way} | {at_first.ready_s:.1f} | {at_first.ready_cpu_s:.1f} | {ready:.2f} | {processor:.2f} "
            f"| {first:.2f} | {token:.2f} | {anonymous} | {at_first.tokens[:8]} |"
        )
    return "\n".join(lines)


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of weights.")] = "2GiB",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers, as wide as the size allows.")] = None,
    before: Annotated[
        Path | None, typer.Option(help="A checkout of another revision, measured beside this one.")
    ] = None,
    cap: Annotated[str, typer.Option(help="Bytes of memory, or a part of the weights.")] = "35%",
    limit: Annotated[
        str, typer.Option(help="Bytes of the cgroup, or a part of the weights; 0: none.")
    ] = "60%",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that are generated.")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is made.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    way: Annotated[str | None, typer.Option(hidden=True)] = None,
    group: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure all ways of generating in turn.

    Example: python -m benchmarks.calls.generating --size 4GiB --cap 2GB --json generating.json
    """
    if way is not None:
        assert folder is not None
        typer.echo(json.dumps(asdict(measure_here(way, folder, int(cap), tokens, group))))
        return
    ways = list(LOADERS)
    if before is not None:
        os.environ[CHECKOUT] = str(before.resolve() / "src")
        ways.append(BEFORE)
    results: dict[str, dict[str, list[Generated]]] = {}
    with checkpoint(folder, parse_size(size), layers) as made:
        total = sum(path.stat().st_size for path in shards(made))
        nbytes = parse_size(cap, total=total)
        most = 0 if limit == "0" else parse_size(limit, total=total, name="limit")
        states: dict[str, Callable[[str, Path, int, int], Generated]] = {"warm": run_warm}
        if most:
            states[f"cgroup of {format_size(most)}, cold"] = partial(run_small, limit=most)
        for state, measure in states.items():
            found: dict[str, list[Generated]] = {one: [] for one in ways}
            for number in range(rounds):
                for one in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    found[one].append(measure(one, made, nbytes, tokens))
            results[state] = found
            typer.echo(f"{size} of weights, {format_size(nbytes)} for them, {state}:\n\n{render(found)}\n")
    if json_path:
        facts = {
            "machine": describe_machine(),
            "torch": torch.__version__,
            "size": size,
            "layers": layers,
            "cap": nbytes,
            "results": {
                state: {one: [asdict(each) for each in rows] for one, rows in found.items()}
                for state, found in results.items()
            },
        }
        json_path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
