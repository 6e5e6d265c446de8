"""Records the routes of calls: which units their reads asked for."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from penstock.runtime.sparse.base import PooledUnits
from penstock.schedule.atomic_file import replace_file, write_all
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import SourceError, StreamError
from penstock.schedule.sparse.routes import Ask, Routes, routes_from_bytes, routes_to_bytes


class Recorder:
    """What the calls of a streamed module ask for, while the recorder is open; it is a context manager.

    A call that fails is recorded as far as it came. `penstock replay` tells what other sizes of pool and
    other policies would have moved for these calls.
    """

    def __init__(self, units: PooledUnits) -> None:
        self._units = units
        self._reads = tuple(units.routed)
        self._numbers = {(read.graph, read.step): number for number, read in enumerate(self._reads)}
        self._calls: list[list[Ask]] = []

    def __enter__(self) -> Recorder:
        if self._units.recorder is not None:
            raise StreamError("another recorder is open on this module: close it first")
        self._units.recorder = self
        return self

    def __exit__(self, *error: object) -> None:
        self._units.recorder = None

    @property
    def routes(self) -> Routes:
        """The routes of all calls so far."""
        return Routes(self._reads, tuple(tuple(call) for call in self._calls))

    def save(self, path: str | PathLike[str], *, force: bool = False) -> None:
        """Write the routes to a file, which is replaced with `force` only.

        Raises SourceError where the file cannot be written, and PayloadError for more than 64 MiB of routes.
        """
        data = routes_to_bytes(self.routes)
        with replace_file(Path(path), force=force) as fd:
            write_all(fd, data)

    # What the units call.

    def begin(self) -> None:
        """Begin a call."""
        self._calls.append([])

    def ask(self, graph: int, step: int, units: Sequence[int]) -> None:
        """Note what a step of the call asks for; tiles are left out, as every call asks for all of them."""
        number = self._numbers.get((graph, step))
        if number is not None:
            self._calls[-1].append(Ask(number, tuple(units)))


def read_routes(path: Path) -> Routes:
    """The routes in a file. Raises SourceError if it cannot be read, PayloadError if it holds no routes."""
    try:
        data = read_bounded(path, "a file of routes")
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read ({error.strerror}): give a file that `recorder.save` wrote"
        ) from error
    return routes_from_bytes(data, source=str(path))
