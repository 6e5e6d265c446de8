"""The output of the demo on a terminal: a spinner or bar during work, and tables without a frame."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table


@contextlib.contextmanager
def show_progress(
    console: Console, description: str, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Show that `description` is going on; yields a function that takes how much of `total` was just done.

    The display disappears at the end. Without a terminal, a plain line is printed instead.
    """
    if not console.is_terminal:
        console.print(f"  {description} ...", style="dim", highlight=False)
        yield lambda _: None
        return
    bar = [BarColumn(bar_width=30), TaskProgressColumn()] if total else []
    columns = [SpinnerColumn(), TextColumn("{task.description}"), *bar, TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.advance(task, done)


def make_table(*columns: str) -> Table:
    """A table without a frame; the first and the last column hold text, the others hold numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(
            column, justify="left" if position in {0, len(columns) - 1} else "right", no_wrap=True
        )
    return table


def shorten(nbytes: int) -> str:
    """A number of bytes for a table, with three or four digits: `527 MiB`, `2.06 GiB`."""
    value, unit = nbytes / (1 << 20), "MiB"
    if value >= 1000:
        value, unit = value / 1024, "GiB"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
