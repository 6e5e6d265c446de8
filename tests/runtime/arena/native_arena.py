"""Arenas of the native engine behind the interface of Python's, for tests that run over both."""

import ctypes
import json
from dataclasses import asdict, replace
from pathlib import Path

from penstock.native.library import File, Options
from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.stream.native import NativeStreamer
from penstock.runtime.system.memory import resident_bytes
from penstock.schedule.facts.model import Schedule, Trace, WeightFile

NOTHING = Trace("forward", 0, "", (), 0, 0, "modelled")


def payload_of(files, storages):
    """What the native engine reads of a payload."""
    facts = {"files": map(asdict, files), "storages": map(asdict, storages)}
    return json.dumps({name: list(some) for name, some in facts.items()}).encode()


def files_of(source):
    return [WeightFile(str(f.path), f.nbytes, f.mtime_ns, 0, "", "") for f in source.files]


def options_of(source, **options):
    """Options by which the native engine reads the files of a source as the source does."""
    opened = [File(file.fd, file.mtime_ns) for file in source.files]
    how = {"readers": 1, "buffered": source.mode == "buffered", "opened": (File * len(opened))(*opened)}
    return Options(**(how | options))


class NativeArena(NativeStreamer):
    """An arena of the native engine, filled and dropped range by range."""

    def __init__(self, plan, storages, source, *, poison=False, room=0, small=0):
        """With `room`, the system has so many bytes for data and page cache.

        What is mapped at less than `small` bytes a second is taken to be held page by page.
        """
        plan = replace(plan, schedules=(Schedule(0, (), (), 0),), traces=(NOTHING,))
        options = options_of(source, poison=poison, available=room, small_folios=small)
        super().__init__(Path("nowhere"), payload_of(files_of(source), storages), plan, options)

    def fill(self, start, stop):
        brought = ctypes.c_int64()
        self._done(self._library.ps_fill(self._open(), start, stop, ctypes.byref(brought)))
        return brought.value

    def fill_ready(self, start, stop):
        brought = ctypes.c_int64()
        self._done(self._library.ps_fill_ready(self._open(), start, stop, ctypes.byref(brought)))
        return None if brought.value < 0 else brought.value

    def drop(self, start, stop):
        self._done(self._library.ps_drop(self._open(), start, stop))

    def check(self):
        self._done(self._library.ps_check(self._open()))

    def mapped_bytes(self):
        return sum(resident_bytes(*ends) for ends in self.memory()) if self._engine else 0

    def close(self):
        super().close()
        self.free()


def open_with(engine, plan, storages, source, **options):
    """Opens the arena that a plan asks for, in Python or of the native engine."""
    opened = (NativeArena if engine == "native" else open_arena)(plan, storages, source, **options)
    return opened


def address_of(arena):
    """The address of an arena's first byte."""
    return int(arena.memory()[0][0] if isinstance(arena, NativeArena) else arena._memory.address)
