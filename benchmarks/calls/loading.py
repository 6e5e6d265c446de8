"""Measures the time until a checkpoint in shards can be used, and the memory that this takes.

A Llama-shaped transformers model in bfloat16, written by transformers. Each way of loading it runs in a
process of its own, in turn, with the page cache cold or warm: time until the model is ready, until its first
output, and the most anonymous and total memory meanwhile (sampled every 10 ms, above what libraries hold).
penstock refers to the checkpoint in place: what compiling it once costs is a line of its own. The limit is
reading all bytes with as many readers as penstock has, into memory that is there, or into new memory for all.
penstock measures the machine and plans at its first load, and remembers both: that load is a column.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from benchmarks import ways
from benchmarks.calls.loading_ways import LOADERS, forget_pages, read_alone, save, warm_pages
from benchmarks.machine import describe_machine, read_memory
from penstock.schedule.facts.sizes import format_size, parse_size

LIMITS = {"the bytes alone": False, "the bytes alone, new memory": True}
WAYS = ("plain", "assign", "accelerate", "transformers", "penstock 25%", "penstock 100%", *LIMITS)
SAVING = ("save_pretrained", "save_file", "penstock convert")
COMPILE = "compile"
TOKENS = 8
VOCABULARY = 32000


@dataclass(frozen=True)
class Loaded:
    """The results of one process: seconds since it began to load, bytes, and the sha256 of its output."""

    ready_s: float
    first_output_s: float
    anonymous: int
    total: int
    output: str


class Peak:
    """The most memory that this process has while it is sampled, above what it has now."""

    def __init__(self) -> None:
        self._before = read_memory()
        self.anonymous = self.total = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._done.wait(0.01):
            now = read_memory()
            self.anonymous = max(self.anonymous, now.anonymous - self._before.anonymous)
            self.total = max(self.total, now.total - self._before.total)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def make_config(nbytes: int, layers: int | None = None) -> Any:
    """A configuration of about so many bytes: of layers of 2,048, or of so many that are narrower."""
    from transformers import LlamaConfig

    def layer(width: int) -> int:
        return 2 * (5 * width * width // 2 + 3 * width * (11 * width // 4))

    widths = range(512, 2049, 512) if layers else (2048,)
    fits = [one for one in widths if 2 * 2 * VOCABULARY * one + (layers or 0) * layer(one) <= nbytes]
    width = max(fits, default=widths[0])
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers or max(1, round((nbytes - 2 * 2 * VOCABULARY * width) / layer(width))),
        num_attention_heads=width // 128,
        num_key_value_heads=width // 512,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
        use_cache=False,
    )


def write_checkpoint(folder: Path, nbytes: int, layers: int | None = None) -> None:
    """Let the library write the checkpoint, in shards of 500 MB."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(nbytes, layers), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")


def inputs() -> dict[str, Any]:
    return {"input_ids": torch.arange(TOKENS)[None], "use_cache": False}


def compile_in_place(folder: Path) -> None:
    """The artifact that refers to the checkpoint's own bytes, from the configuration alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import penstock

    config = AutoConfig.from_pretrained(folder)
    exported = penstock.fake_export(
        lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), inputs()
    )
    penstock.compile(exported, folder / "model.penstock", weights=folder, pack=False)


def measure_here(way: str, folder: Path) -> Loaded:
    """Load and call once, in this process, libraries imported before."""
    import accelerate  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401 (registers what it returns)

    import penstock

    penstock.open  # noqa: B018 (imported now, not while the clock runs)
    if way in LIMITS:
        seconds = read_alone(folder, new_memory=LIMITS[way])
        return Loaded(seconds, seconds, 0, 0, "")
    peak = Peak()
    began = time.perf_counter()
    if way in SAVING:
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            save(way, folder, Path(made) / "saved")
            seconds = time.perf_counter() - began
        peak.stop()
        return Loaded(seconds, seconds, peak.anonymous, peak.total, "")
    with torch.no_grad():
        model = LOADERS[way](folder)
        ready = time.perf_counter() - began
        output = model(**inputs()).logits
    first = time.perf_counter() - began
    peak.stop()
    digest = hashlib.sha256(output.float().numpy().tobytes()).hexdigest()
    return Loaded(ready, first, peak.anonymous, peak.total, digest)


@contextmanager
def checkpoint(folder: Path | None, nbytes: int, layers: int | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder) as made:
        typer.echo(f"writing {format_size(nbytes)} of weights", err=True)
        write_checkpoint(Path(made), nbytes, layers)
        yield Path(made)


def run_apart(way: str, folder: Path) -> Loaded:
    own = ("--way", way, "--folder", str(folder))
    cache = str(folder / "cache")  # empty at first
    return Loaded(**ways.run_apart("benchmarks.calls.loading", *own, XDG_CACHE_HOME=cache))


def render(rows: dict[str, list[Loaded]], title: str) -> str:
    lines = [
        f"{title}:",
        "",
        "| way | ready at first, s | ready, s | first output, s | anonymous | total | output |",
        "|---" * 7 + "|",
    ]
    for way, found in rows.items():
        ready, first = (median(getattr(one, name) for one in found) for name in ("ready_s", "first_output_s"))
        anonymous, total = (max(getattr(one, name) for one in found) for name in ("anonymous", "total"))
        lines.append(
            f"| {way} | {found[0].ready_s:.2f} | {ready:.2f} | {first:.2f} "
            f"| {format_size(anonymous)} | {format_size(total)} | {found[0].output[:8]} |"
        )
    return "\n".join(lines)


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of weights.")] = "2GiB",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is made.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    way: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure all ways of loading in turn.

    Example: python -m benchmarks.calls.loading --size 4GiB --json benchmarks/results/loading.json
    """
    if way is not None:
        assert folder is not None
        if way == COMPILE:
            compile_in_place(folder)
            typer.echo("{}")
            return
        typer.echo(json.dumps(asdict(measure_here(way, folder))))
        return
    with checkpoint(folder, parse_size(size)) as made:
        began = time.perf_counter()
        ways.run_apart("benchmarks.calls.loading", "--way", COMPILE, "--folder", str(made))
        compiled = time.perf_counter() - began
        results: dict[str, dict[str, list[Loaded]]] = {}
        for state, prepare in (("cold", forget_pages), ("warm", warm_pages)):
            found: dict[str, list[Loaded]] = {one: [] for one in WAYS}
            for number in range(rounds):
                for one in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    prepare(made)
                    found[one].append(run_apart(one, made))
            results[state] = found
            typer.echo(render(found, f"{size}, {state}") + "\n")
        found = {one: [] for one in SAVING}
        for number in range(rounds):
            for one in SAVING[number % len(SAVING) :] + SAVING[: number % len(SAVING)]:
                warm_pages(made)
                found[one].append(run_apart(one, made))
        results["saving"] = found
        typer.echo(render(found, f"{size}, saved") + "\n")
        typer.echo(f"compiling in place, once: {compiled:.1f} s")
    if json_path:
        facts = {
            "machine": describe_machine(),
            "torch": torch.__version__,
            "size": size,
            "compile_s": compiled,
            "results": {
                state: {one: [asdict(loaded) for loaded in found] for one, found in rows.items()}
                for state, rows in results.items()
            },
        }
        json_path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
