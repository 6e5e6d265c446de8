"""What is shown while a kind of call is exported, which takes seconds for each, and how long that took."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from penstock.schedule.facts.sizes import format_time


def seconds_since(begun: float) -> str:
    """How long it is, for the log, since a time of `time.monotonic`."""
    return format_time((monotonic() - begun) * 1e9)


@contextmanager
def shown(what: str) -> Iterator[None]:
    """Show on stderr what is prepared, and for how long already.

    Nothing is shown where stderr is no terminal, nor with PENSTOCK_LOG, which says the same in lines.
    """
    if os.environ.get("PENSTOCK_LOG") or not sys.stderr.isatty():
        yield
        return
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    words = progress.TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (progress.TimeElapsedColumn(), progress.BarColumn(bar_width=12), words)
    console = Console(stderr=True)
    with progress.Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        bar.add_task(what, total=None)
        yield
