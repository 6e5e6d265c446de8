"""How the demo looks: a spinner or bar while something takes time, and tables without a frame."""

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
    """Show that `description` is going on; yields a function that is told how much of `total` was just done.

    The display disappears at the end. Without a terminal one plain line is printed instead.
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
    """A table without a frame; the first and the last column are text, the others numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(
            column, justify="left" if position in {0, len(columns) - 1} else "right", no_wrap=True
        )
    return table


def shorten(nbytes: int) -> str:
    """`nbytes` for a table, in three digits or four: `527 MiB`, `2.06 GiB`."""
    value, unit = nbytes / (1 << 20), "MiB"
    if value >= 1000:
        value, unit = value / 1024, "GiB"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
