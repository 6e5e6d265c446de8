"""Results files: lines of JSON that are on the disk at once, which steps they finish, and their table."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a results file, without one that a killed run has left incomplete."""
    return [json.loads(text) for text in path.read_text().splitlines(keepends=True) if text.endswith("}\n")]


def append_line(path: Path, line: Line) -> None:
    """Append a line to a results file and wait until the disk has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        torn = file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n"
        file.write(b"\n" * bool(torn) + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def finished_steps(lines: Iterable[Line]) -> set[str]:
    """Return the names of the steps whose outcome is "done"."""
    return {line["step"] for line in lines if line.get("outcome") == "done"}


def card_of(lines: Iterable[Line]) -> str | None:
    """Return which device lines are of, by its model, and their scale; None without a line that tells it."""
    for line in lines:
        if line["step"] == "machine" and "product" in line:
            return f"{line['product'].partition(', ')[0]} at scale {line['scale']:g}"
    return None


def make_table(runs: Sequence[Sequence[Line]], steps: Iterable[str]) -> str:
    """Return Markdown with tables for each step, from the run that finished it or has most lines of it."""
    tables = []
    for step in steps:
        attempts = [[line for line in run if line.get("step") == step] for run in runs]
        attempts = [lines for lines in attempts if lines]
        if not attempts:
            continue
        lines = max(attempts, key=lambda lines: (bool(finished_steps(lines)), len(lines)))
        outcome = next((line for line in lines if "outcome" in line), {"outcome": "killed with its run"})
        heading = " ".join(str(value) for key, value in outcome.items() if key not in ("step", "wall_s"))
        wall = f", {outcome['wall_s']} s" if "wall_s" in outcome else ""
        tables.append(f"## {step}: {heading}{wall}\n")
        tables += _rows([line for line in lines if line is not outcome])
    return "\n".join(tables)


def _rows(lines: Iterable[Line]) -> list[str]:
    """Return tables of figures: one for all lines that have the same names."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for line in lines:
        names = tuple(name for name in line if name != "step")
        cells = (f"{line[name]:.4g}" if isinstance(line[name], float) else str(line[name]) for name in names)
        groups[names].append(f"| {' | '.join(cells)} |")
    return [
        row
        for names, rows in groups.items()
        for row in (f"| {' | '.join(names)} |", "|---" * len(names) + "|", *rows, "")
    ]
