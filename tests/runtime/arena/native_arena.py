"""Arenas of the native engine behind the interface of Python's, for tests that run over both."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.native.library import File, Options
from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.arena.reading import WeightArena
from penstock.runtime.files.source import Source
from penstock.runtime.stream.native import NativeStreamer
from penstock.runtime.system.memory import resident_bytes
from penstock.schedule.facts.model import Schedule, Storage, Trace, WeightFile
from penstock.schedule.plan import Plan

NOTHING = Trace("forward", 0, "", (), 0, 0, "modelled")


def payload_of(files: Sequence[WeightFile], storages: Sequence[Storage]) -> bytes:
    """What the native engine reads of a payload."""
    facts = {"files": map(asdict, files), "storages": map(asdict, storages)}
    return json.dumps({name: list(some) for name, some in facts.items()}).encode()


def files_of(source: Source) -> list[WeightFile]:
    return [WeightFile(str(f.path), f.nbytes, f.mtime_ns, 0, "", "") for f in source.files]


def options_of(source: Source, **options: Any) -> Options:
    """Options by which the native engine reads the files of a source as the source does."""
    opened = [File(file.fd, file.mtime_ns) for file in source.files]
    how = {"readers": 1, "buffered": source.mode == "buffered", "opened": (File * len(opened))(*opened)}
    return Options(**(how | options))


class NativeArena(NativeStreamer):
    """An arena of the native engine, filled and dropped range by range."""

    def __init__(
        self,
        plan: Plan,
        storages: Sequence[Storage],
        source: Source,
        *,
        poison: bool = False,
        room: int = 0,
        small: int = 0,
    ) -> None:
        """With `room`, the system has so many bytes for data and page cache.

        What is mapped at less than `small` bytes a second is taken to be held page by page.
        """
        plan = replace(plan, schedules=(Schedule(0, (), (), 0),), traces=(NOTHING,))
        options = options_of(source, poison=poison, available=room, small_folios=small)
        super().__init__(Path("nowhere"), payload_of(files_of(source), storages), plan, options)

    def fill(self, start: int, stop: int) -> int:
        brought = ctypes.c_int64()
        self._done(self._library.ps_fill(self._open(), start, stop, ctypes.byref(brought)))
        return brought.value

    def fill_ready(self, start: int, stop: int) -> int | None:
        brought = ctypes.c_int64()
        self._done(self._library.ps_fill_ready(self._open(), start, stop, ctypes.byref(brought)))
        return None if brought.value < 0 else brought.value

    def drop(self, start: int, stop: int) -> None:
        self._done(self._library.ps_drop(self._open(), start, stop))

    def check(self) -> None:
        self._done(self._library.ps_check(self._open()))

    def mapped_bytes(self) -> int:
        return sum(resident_bytes(*ends) for ends in self.memory()) if self._engine else 0

    def close(self) -> None:
        super().close()
        self.free()


def open_with(
    engine: str, plan: Plan, storages: Sequence[Storage], source: Source, **options: Any
) -> WeightArena:
    """Opens the arena that a plan asks for, in Python or of the native engine."""
    opened: Any = (NativeArena if engine == "native" else open_arena)(plan, storages, source, **options)
    return opened


def address_of(arena: Any) -> int:
    """The address of an arena's first byte."""
    return int(arena.memory()[0][0] if isinstance(arena, NativeArena) else arena._memory.address)
