"""Streams models from disk under a byte budget, beside the peers, memory and the bare disk.

This is the method:

- Every competitor runs in a process of its own, loaded once per case. One computes at a time; once a
  round each runs a train of passes, in an order that rotates from round to round. Ratios are
  taken within a round.
- A train is one pass that does not count, then `--passes` that do, back to back: the first pass makes up for
  the idle time before it, in which penstock fills its budget for the next call.
- Warm: the page cache holds every file that the competitor reads, as its own first pass, which does not
  count, has left it there; what that pass has not read is read before the clock starts.
- Cold: before every pass the competitor's files leave the page cache; mincore says how much is left,
  the process's own I/O count says what the disk delivered. The peers' mappings are dropped too. What
  penstock's arena has mapped stays mapped, because it is held within the budget, as an anonymous copy
  would be. The clock stands still meanwhile; what penstock reads on in that gap is charged to the next
  pass at the pass's own rate, up to the whole gap.
- cgroup: a memory cgroup holds each process and its page cache: as many bytes as the bare process takes,
  which has the libraries and no weights, and a quarter of the weights. The plain module in memory and the
  bare disk stay outside: they set the limit.
- resident: the budget is all weights; only the plain module runs beside it.
- The limit: the longer of the plain module's time in that round, and the bytes that must move (all
  weights but the budget, and never more than the disk delivered) at the rate at which the bare disk
  was read in that round. It is read in two ways, each in the best of several counts of threads and
  sizes of blocks: O_DIRECT, and populating a mapping. The faster of the two in that round counts.
- Memory: the peak since the weights were loaded, over the process with all libraries in it and no
  weights. Total is the kernel's own high-water mark, file mappings included; anonymous is sampled every
  50 ms.
- Weights are drawn alike for everyone and lie on page boundaries of one safetensors file. Offload
  folders and artifacts are named after the shapes, and made by this run.

Linux only. Peers: `pip install '.[bench]'`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

# Run as a script from any folder; the processes that it starts import the same package.
from benchmarks.disk.cases import MODELS
from benchmarks.disk.competitors import PEERS
from benchmarks.disk.rounds import STATES, Bench, Case, Options, list_cases
from benchmarks.disk.summary import summarise
from benchmarks.disk.tables import draw, render
from benchmarks.machine import describe_machine, read_available_memory
from penstock.runtime.options import ENGINES
from penstock.schedule.facts.errors import BudgetError
from penstock.schedule.facts.sizes import format_size, parse_size

EXAMPLES = """Examples:

python -m benchmarks.disk --json disk.json

python -m benchmarks.disk --size 512MiB --rounds 2 --models linears --tokens 8 --states cold

python -m benchmarks.disk --render benchmarks/results/disk-4GiB.json --plot docs/disk.svg
"""


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of weights of each model.")] = "4GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each every competitor runs once.")] = 5,
    passes: Annotated[int, typer.Option(min=1, help="Passes that count, in each round.")] = 2,
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = "linears,llama",
    tokens: Annotated[str, typer.Option(help="Tokens that a pass reads.")] = "8,256",
    budgets: Annotated[str, typer.Option(help="Of penstock: sizes, or shares of the weights.")] = "12.5%,50%",
    states: Annotated[str, typer.Option(help="Some of the states.")] = ",".join(STATES),
    peers: Annotated[str, typer.Option(help="Some of the peers, or none.")] = ",".join(PEERS),
    engines: Annotated[str, typer.Option(help="To execute penstock's plans: auto, native, python.")] = "auto",
    work: Annotated[Path | None, typer.Option(help="Folder for weights; else a temporary one.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write samples and figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (SVG or PNG) here.")] = None,
    rendered: Annotated[Path | None, typer.Option("--render", help="Only print this JSON.")] = None,
) -> None:
    """Measure streaming from disk against the peers, memory and the disk itself.

    The exit status is 1 if penstock failed or its output differs from the plain module's, and 2
    for impossible options. Lists are separated by commas.
    """
    if rendered is not None:
        result = json.loads(rendered.read_text(encoding="utf-8"))
    else:
        try:
            cases = list_cases(
                _split(models, MODELS),
                [int(count) for count in _split(tokens)],
                _split(states, STATES),
                budgets=_split(budgets),
                peers=_split_peers(peers),
            )
            nbytes = parse_size(size, name="--size")
        except (ValueError, BudgetError) as error:
            raise typer.BadParameter(str(error)) from None
        with _open_work(work) as folder:
            options = Options(nbytes, rounds, passes, folder, tuple(_split(engines, ENGINES)))
            _check_room(options, cases)
            result = measure(options, cases, json_path=json_path)
    if plot is not None:
        draw(result, plot)
    typer.echo(render(result))
    if any(_is_wrong(case) for case in result["cases"]):
        raise typer.Exit(1)


def measure(options: Options, cases: Sequence[Case], *, json_path: Path | None) -> dict[str, Any]:
    """Run the cases, model by model; with `json_path` what is known so far is always on disk."""
    bench = Bench(options, lambda line: typer.echo(line, err=True))
    result: dict[str, Any] = {
        "format": 1,
        "hardware": describe_machine(),
        "options": dataclasses.asdict(options) | {"work": None},
        "cases": [],
    }
    try:
        for case in cases:
            measured = bench.run(case)
            result["readers"] = bench.readers
            result["cases"].append(measured | {"rows": summarise(measured)})
            if json_path is not None:
                json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            if case is [other for other in cases if other.model == case.model][-1]:
                bench.remove(case.model)
    finally:
        for model in {case.model for case in cases}:
            bench.remove(model)
    return result


def _split_peers(text: str) -> tuple[str, ...]:
    """The peers that are asked for; raises ValueError for one that is not installed."""
    chosen = _split(text, PEERS) if text else ()
    for peer in chosen:
        if peer != "mmap" and importlib.util.find_spec(peer) is None:
            raise ValueError(f"{peer} is not installed: pip install '.[bench]', or leave it out")
    return chosen


def _split(text: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The parts of a list; raises ValueError for one that is not among those known."""
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if known and part not in known:
            raise ValueError(f"{part!r} is none of {', '.join(known)}")
    return parts


@contextlib.contextmanager
def _open_work(work: Path | None) -> Iterator[Path]:
    """The folder for weights; a temporary one, removed at the end, if none is given."""
    folder = work or Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder.resolve()
    finally:
        if work is None:
            shutil.rmtree(folder)


def _check_room(options: Options, cases: Sequence[Case]) -> None:
    """Refuse a size that the disk or the memory cannot hold, before any file is written."""
    copies = 1 + len({peer for case in cases for peer in case.peers} - {"mmap"})
    copies += max(len(case.budgets) for case in cases) * len(options.engines)
    free = shutil.disk_usage(options.work).free
    # The plain module, what penstock may hold, and one competitor's files in the page cache.
    shares = [sum(parse_size(b, total=options.nbytes) for b in case.budgets) for case in cases]
    needs = [
        ("disk", int(1.05 * copies * options.nbytes), free, f"at {options.work}"),
        ("memory", 2 * options.nbytes + max(shares), read_available_memory(), "available"),
    ]
    for kind, need, there, where in needs:
        if need > there:
            raise typer.BadParameter(
                f"this needs {format_size(need)} of {kind} and there are {format_size(there)} {where}: "
                "choose a smaller --size"
            )


def _is_wrong(case: dict[str, Any]) -> bool:
    failed = any(name.startswith("penstock") for name in case["failures"])
    return failed or any(row["equal"] is False for row in case["rows"] if row["kind"] == "penstock")


application = typer.Typer(add_completion=False, rich_markup_mode=None)
application.command(epilog=EXAMPLES)(main)

if __name__ == "__main__":
    application()
