"""Output of the command line: progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock._logging import shown

if TYPE_CHECKING:
    from penstock.runtime.files.stamp import Progress

_ANY_WIDTH = 10_000


@contextmanager
def byte_progress() -> Iterator[Progress]:
    """Draw a bar on stderr for each task, below what is logged; bars are left out without a terminal."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    tasks: dict[str, progress.TaskID] = {}
    console = Console(stderr=True)
    with (
        progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        shown(),
    ):

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr for work without a known length; yields a function that changes its text."""
    with Console(file=sys.stderr).status(what) as status:
        yield status.update


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what torch logs and writes to stderr, and send what a model prints to stderr.

    For work whose failures are reported in one sentence.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(sys.stderr), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def print_text(text: str) -> None:
    """Print lines on stdout as they are."""
    sys.stdout.write(text + "\n")


def width() -> int:
    """Columns of the terminal."""
    return Console().width


def print_json(facts: Any) -> None:
    """Print facts on stdout as indented JSON."""
    json.dump(facts, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a titled list of two columns."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(escape(name), escape(value))
    Console().print(table)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose columns after the first are right-aligned; one that is too wide has no frame."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    if console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum > console.width:
        table.box, table.show_edge, table.collapse_padding = box.SIMPLE_HEAD, False, True
    console.print(table)
