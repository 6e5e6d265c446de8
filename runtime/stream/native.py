"""The streamer of the native engine: Python's `streamer.py` in C++, with readers that need no interpreter."""

from __future__ import annotations

import ctypes
import os
from ctypes import pointer
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.native.library import WAITING, File, Options, Spill, Statistics, library, open_engine, refuse
from penstock.runtime.arena.reading import tensor_at
from penstock.runtime.files.source import Source
from penstock.runtime.stream.engine import Counters
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Part
from penstock.schedule.plan import Plan

if TYPE_CHECKING:
    import torch

    from penstock.runtime.options import LoadRequest

_PATIENCE_MS = 50
"""How long a call waits before Python may handle signals."""


class NativeStreamer:
    """Streams the weights of one plan into an arena of the engine's own. See `StreamEngine` for passes.

    `folder` is the artifact's, `payload` its JSON. Raises PayloadError, PlanError, SourceError or
    StreamError, at once or in a pass, as Python's streamer does.
    """

    in_reader = False  # the readers run no Python, so that nothing is collected on them

    def __init__(self, folder: Path, payload: bytes, plan: Plan, options: Options) -> None:
        options.patience_ms = _PATIENCE_MS
        self._owner = os.getpid()
        self._engine: ctypes.c_void_p | None = open_engine(payload, plan.to_json(), folder, options)
        native = library()
        assert native is not None  # or nothing could have been opened
        self._library = native
        self._probed = {s.graph: self._probed_steps(s.graph) for s in plan.schedules}
        self._last = {name: Statistics() for name in ("ps_stats", "ps_units_stats")}

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        now = self.statistics("ps_stats")
        return Counters(now.bytes_moved, now.bytes_read, now.misses, now.stall_ns, now.bytes_written)

    @property
    def held_bytes(self) -> int:
        """Bytes of the layout that are filled or being filled, and not dropped."""
        return int(self.statistics("ps_stats").held_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that `held_bytes` has been."""
        return int(self.statistics("ps_stats").peak_bytes)

    def probed(self, graph: int) -> tuple[int, ...]:
        """Returns the steps of a method at which the plan acts, ascending."""
        return self._probed[graph]

    def view(self, part: Part, nbytes: int | None = None) -> torch.Tensor:
        """Returns the strided tensor at the one address of a part. It must not be used after `free`.

        Its storage has the `nbytes` of the part's, or what the part reaches.
        """
        address = self._library.ps_storage(self._open(), part.storage)
        if not address:
            raise StreamError(f"storage {part.storage} is not in the arena")
        return tensor_at(address, part, nbytes)

    def begin(self, graph: int) -> None:
        self._done(self._library.ps_begin(self._open(), graph))

    def acquire(self, graph: int, step: int) -> None:
        status = self._library.ps_acquire(self._open(), graph, step)
        if status:
            self._done(status)

    def release(self, graph: int, step: int) -> None:
        status = self._library.ps_release(self._open(), graph, step)
        if status:
            self._done(status)

    def end(self, graph: int) -> None:
        self._done(self._library.ps_end(self._open(), graph))

    def abort(self) -> None:
        if self._engine:
            self._done(self._library.ps_abort(self._engine))

    def close(self) -> None:
        """Stop the readers and wait for them. A second call does nothing."""
        if self._engine is not None:
            self._library.ps_stop(self._engine)

    def free(self) -> None:
        """Give the arena and the files back, once nothing reads the arena any more."""
        for name in self._last:
            self.statistics(name)
        engine, self._engine = self._engine, None
        if engine is not None:
            self._library.ps_close(engine)

    # For what else the engine does (`sparse/native.py`).

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the library on the engine, and wait until it is done. Raises its error."""
        self._done(getattr(self._library, function)(self._open(), *arguments))

    def address_of_units(self, storage: int) -> int:
        """The address of the first byte of a storage whose units are in the pool."""
        address = self._library.ps_units_storage(self._open(), storage)
        if not address:
            raise StreamError(f"storage {storage} is not in the pool")
        return int(address)

    def memory(self) -> list[tuple[int, int]]:
        """The address ranges of which weights take pages: the arena's, then the pool's."""
        starts, stops = (ctypes.c_void_p * 3)(), (ctypes.c_void_p * 3)()
        count = self._library.ps_memory(self._open(), starts, stops, 3)
        return [(starts[k] or 0, stops[k] or 0) for k in range(count)]

    def statistics(self, function: str) -> Statistics:
        """Returns counters, the arena's by `ps_stats` or the pool's by `ps_units_stats`.

        They are those of the engine's end once it is freed. In a forked child the engine's lock may be held
        for ever, by a thread that is not there.
        """
        if self._engine is not None and os.getpid() == self._owner:
            getattr(self._library, function)(self._engine, ctypes.byref(self._last[function]))
        return self._last[function]

    def _open(self) -> ctypes.c_void_p:
        if self._engine is None:
            raise StreamError("the weights' memory has been closed; load the program again")
        return self._engine

    def _done(self, status: int) -> None:
        while status == WAITING:
            status = self._library.ps_wait(self._engine)
        if status:
            refuse(status, self._library.ps_error(self._engine))

    def _probed_steps(self, graph: int) -> tuple[int, ...]:
        count = self._library.ps_probed(self._engine, graph, None, 0)
        steps = (ctypes.c_int32 * max(count, 0))()
        self._library.ps_probed(self._engine, graph, steps, len(steps))
        return tuple(steps)


def engine_options(source: Source, options: LoadRequest, *, drop_early: bool) -> Options:
    """What the native engine is told: it reads the files that are open here, as they are read here."""
    files = [File(file.fd, file.mtime_ns, file.contents.ctime_ns) for file in source.files if file.contents]
    spill = None
    if (file := source.spill) is not None:
        spill = Spill(file.fd, file.direct_fd, file.block, file.nbytes, str(file.path).encode())
    return Options(
        readers=options.readers,
        buffered=source.mode == "buffered",
        drop_early=drop_early,
        poison=options.poison,
        debug=options.check_reads,
        opened=(File * len(files))(*files),
        spill=pointer(spill) if spill else None,
    )
