"""Output of the command line, and its answer to Ctrl-C."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from textwrap import fill
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal

from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock._logging import shown
from penstock.runtime.system.announcing import announced

if TYPE_CHECKING:
    from penstock.runtime.files.artifact_files import Progress


STATUS = 128 + signal.SIGINT
"""The exit status of a command that was interrupted, by the convention of shells."""


@contextmanager
def answered() -> Iterator[None]:
    """Say "stopping ..." on stderr as soon as Ctrl-C is pressed, and exit with STATUS at the end.

    Python raises KeyboardInterrupt in the main thread only between two Python instructions, so a solver or a
    kernel may delay it. The wakeup descriptor receives a signal at once. A library that is interrupted while
    it is imported may raise any error, so the status does not depend on the error. Use this in the main
    thread.
    """
    pressed = Event()
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    thread = Thread(target=_answer, args=(heard, pressed), name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)  # ends the thread
        thread.join()
        os.close(heard)
        if pressed.is_set():
            sys.exit(STATUS)


@contextmanager
def left_to_body() -> Iterator[None]:
    """Leave Ctrl-C to the body, as KeyboardInterrupt, within `answered`."""
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _answer(heard: int, pressed: Event) -> None:
    """Wait for SIGINT on the descriptor `heard`, then set `pressed` and say so; end when it is closed."""
    while numbers := os.read(heard, 1):
        if numbers[0] == signal.SIGINT:
            pressed.set()
            _say("penstock: stopping ...")
            return


def _say(sentence: str) -> None:
    """Print on the process's own stderr, on a new line where a terminal shows a spinner and `^C`."""
    if sys.__stderr__ is not None:
        begin = "\n" if sys.__stderr__.isatty() else ""
        print(f"{begin}{sentence}", file=sys.__stderr__, flush=True)


_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|[mun]?s|%)\b|%)")
"""The space between a number and its unit."""

_SHORTEST = 12
"""The least number of characters of a text column in a table that is too wide."""


@contextmanager
def byte_progress(title: str) -> Iterator[Progress]:
    """Draw a bar on stderr for `title`, then one for each task; without a terminal, announce long work."""
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
        announced(None if console.is_terminal else title),
    ):
        beginning = bar.add_task(title, total=None)

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                bar.update(beginning, visible=False)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr for work without a known length; yields a function that changes its text.

    Without a terminal there is none, and long work is announced.
    """
    console = Console(file=sys.stderr)
    with console.status(title) as status, announced(None if console.is_terminal else title):
        yield status.update


@contextmanager
def quiet() -> Iterator[None]:
    """Drop log messages and torch's stderr, and send a model's stdout to stderr, while work runs."""
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


def command() -> str:
    """The command that runs, as it can be typed again."""
    return shlex.join(["penstock", *sys.argv[1:]])


def print_json(facts: Any) -> None:
    """Print facts on stdout as indented JSON."""
    json.dump(facts, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_sentences(sentences: Iterable[str], indent: str = "") -> None:
    """Print each sentence, wrapped between words at the terminal's width; a unit stays with its number."""
    for sentence in sentences:
        lines = fill(
            _UNIT.sub("\N{NO-BREAK SPACE}", sentence),
            width(),
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        print_text(lines.replace("\N{NO-BREAK SPACE}", " "))


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print a titled list of two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(escape(name), escape(value))
    _print_titled(title, table)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with numbers aligned on the right.

    A table that is too wide has no frame; its headings break between words, and names in its first column at
    dots. If a name would break into more than two lines, names have lines of their own above other values.
    """
    cells = [list(row) for row in rows]
    table = Table(pad_edge=False)
    for k, column in enumerate(columns):
        table.add_column(column, justify=_justify([row[k] for row in cells]) if k else "left")
    framed = sum(_widest([column, *values]) + 3 for column, *values in zip(columns, *cells, strict=True)) - 1
    if framed > width():
        if stacked := _stacked(columns, cells):
            return print_text("\n".join([*([title] if title else []), *stacked]))
        table.box, table.show_edge = box.SIMPLE_HEAD, False
        _narrow(table, columns, cells)
    for row in cells:
        table.add_row(*map(escape, row))
    _print_titled(title, table)


def _print_titled(title: str, table: Table) -> None:
    """Print a title above a table; rich itself would wrap the title at the table's width."""
    console = Console()
    if title:
        console.print(Text(title, "italic"))
    console.print(table)


def _justify(values: Sequence[str]) -> Literal["left", "right"]:
    return "right" if any(value[:1].isdigit() for value in values) else "left"


def _widest(values: Sequence[str]) -> int:
    return max(len(line) for value in values for line in value.split("\n"))


def _narrow(table: Table, columns: Sequence[str], cells: list[list[str]]) -> None:
    """Make columns narrower, so that the table fits the terminal if values and words of headings allow it."""
    least = [_widest(column.split() or [""]) for column in columns]
    widths = [max(width, _widest(["", *(row[k] for row in cells)])) for k, width in enumerate(least)]
    spare = width() - sum(widths) - len(widths) + 1
    table.padding = (0, 1 if spare >= len(widths) else 0, 0, 0)
    texts = [k for k, column in enumerate(table.columns) if column.justify == "left"]
    # The column of names, which break at dots, is narrowed first, and then the widest columns of other text.
    for k in sorted(texts, key=lambda k: (k > 0, -widths[k])):
        narrower = max(least[k], _SHORTEST, widths[k] + min(0, spare))
        spare += max(0, widths[k] - narrower)
        widths[k] = min(widths[k], narrower)
    for row in cells:
        row[0] = "\n".join(_at_dots(row[0], widths[0]))
    for column, most in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap, column.overflow = most, False, "fold"


def _stacked(columns: Sequence[str], cells: list[list[str]]) -> list[str]:
    """The lines of a table whose names stand above other values; none if that is not needed, or no help."""
    widths = [_widest([column, *(row[k] for row in cells)]) for k, column in enumerate(columns)]
    left = width() - sum(widths[1:]) - len(widths) + 1
    broken = max((len([*_at_dots(row[0], max(_SHORTEST, left))]) for row in cells), default=0)
    if broken <= 2 or left < 2 or any("\n" in value for row in cells for value in row):
        return []
    right = [_justify([row[k] for row in cells]) == "right" for k in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        padded = zip(values, widths, right, strict=True)
        aligned = [value.rjust(most) if is_number else value.ljust(most) for value, most, is_number in padded]
        return ("  " + " ".join(aligned[1:])).rstrip()

    lines = [columns[0], line(columns), "\u2500" * (1 + sum(widths[1:]) + len(widths))]
    for row in cells:
        lines += [row[0], line(row)]
    return lines


def _at_dots(name: str, most: int) -> Iterator[str]:
    """Yield the lines of a name, broken behind dots, of at most `most` characters if its parts allow it."""
    line = ""
    for part in re.findall(r"[^.]*\.?", name):
        if line and len(line) + len(part) > most:
            yield line
            line = ""
        line += part
    yield line
