"""The native engine's shared library: found beside this file, loaded once, its functions by ctypes.

Wheels bring the library. From sources it is built when penstock is installed, where a C++ compiler and
nlohmann's JSON headers are; without them everything runs on Python's own streamer, and the log says so once.
`native/penstock.h` says what each function does.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import NoReturn

from penstock.schedule.facts.errors import PayloadError, PenstockError, PlanError, SourceError, StreamError

WAITING = 5
_VERSION = 6
_ERRORS: dict[int, type[PenstockError]] = {1: PayloadError, 2: PlanError, 3: SourceError, 4: StreamError}
_ERROR_BYTES = 4096

_log = logging.getLogger(__name__)


class File(ctypes.Structure):
    """`ps_file`: the descriptor of an open weight file, and its times of modification and change in ns."""

    _fields_ = (("fd", c_int32), ("mtime_ns", c_int64), ("ctime_ns", c_int64))


class Spill(ctypes.Structure):
    """`ps_spill`: the descriptors, the block, the size and the folder of the file for what leaves."""

    _fields_ = (
        ("fd", c_int32),
        ("direct_fd", c_int32),
        ("block", c_int64),
        ("nbytes", c_int64),
        ("folder", c_char_p),
    )


class Options(ctypes.Structure):
    """`ps_options`, in the header's words."""

    _fields_ = (
        ("readers", c_int32),
        ("buffered", c_int32),
        ("drop_early", c_int32),
        ("poison", c_int32),
        ("debug", c_int32),
        ("patience_ms", c_int32),
        ("read", c_void_p),
        ("context", c_void_p),
        ("opened", POINTER(File)),
        ("available", c_int64),
        ("log", c_void_p),
        ("small_folios", c_int64),
        ("spill", POINTER(Spill)),
    )


class Statistics(ctypes.Structure):
    """`ps_statistics`, in bytes, counts and nanoseconds."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("bytes_moved", "bytes_read", "misses", "stall_ns"),
            *("held_bytes", "peak_bytes", "bytes_written"),
        )
    )


class Change(ctypes.Structure):
    """`ps_change`: what was done with a unit of a storage, and the granules that were read for it."""

    _fields_ = (
        ("kind", c_int32),
        ("storage", c_int32),
        ("unit", c_int64),
        ("first", c_int64),
        ("stop", c_int64),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Returns the library; None, and a line in the log, where there is none for this machine and version."""
    reason = "it was not built when penstock was installed"
    for path in sorted(Path(__file__).parent.glob("_engine*.so")):
        try:
            loaded = ctypes.CDLL(str(path))
            if loaded.ps_version() == _VERSION:
                return _declared(loaded)
            reason = f"{path} is of another version"
        except (OSError, AttributeError) as error:
            reason = str(error)
    _log.warning("there is no native engine (%s): Python's streamer runs every plan on a CPU", reason)
    return None


def open_engine(payload: bytes, plan: str, folder: Path, options: Options) -> c_void_p:
    """Opens an engine. Raises the error of penstock's own tree that the library's status stands for."""
    loaded = library()
    if loaded is None:
        raise StreamError(
            "the native engine is not installed: install penstock from a wheel, or where g++ and "
            "nlohmann-json3-dev are, or leave engine='auto'"
        )
    engine = c_void_p()
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    status = loaded.ps_open(
        payload,
        plan.encode(),
        str(folder).encode(),
        ctypes.byref(options),
        ctypes.byref(engine),
        error,
        len(error),
    )
    if status:
        refuse(status, error.value)
    return engine


def refuse(status: int, text: bytes) -> NoReturn:
    """Raises the error that a status stands for, with the library's sentence."""
    raise _ERRORS.get(status, StreamError)(text.decode(errors="replace"))


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    engine, step, places = c_void_p, c_int32, POINTER(c_void_p)
    units = (engine, c_int32, step, c_void_p, c_int64)
    signatures: dict[str, tuple[object, ...]] = {
        "ps_open": (c_char_p, c_char_p, c_char_p, POINTER(Options), POINTER(c_void_p), c_char_p, c_size_t),
        "ps_probed": (engine, c_int32, POINTER(c_int32), c_int32),
        **dict.fromkeys(("ps_begin", "ps_end"), (engine, c_int32)),
        **dict.fromkeys(("ps_acquire", "ps_release"), (engine, c_int32, step)),
        **dict.fromkeys(("ps_abort", "ps_wait", "ps_check"), (engine,)),
        **dict.fromkeys(("ps_fill", "ps_fill_ready"), (engine, c_int64, c_int64, POINTER(c_int64))),
        "ps_drop": (engine, c_int64, c_int64),
        "ps_units_ask": (*units, c_void_p, POINTER(c_int64)),
        "ps_units_hold": (*units, c_int32),
        "ps_units_release": units,
        "ps_memory": (engine, places, places, c_int32),
    }
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, c_int
    for name in ("ps_storage", "ps_units_storage"):
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = (engine, c_int32), c_void_p
    for name in ("ps_stats", "ps_units_stats"):
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = (engine, POINTER(Statistics)), None
    changes = loaded.ps_units_changes
    changes.argtypes, changes.restype = (engine, POINTER(Change), c_int64), c_int64
    loaded.ps_error.argtypes, loaded.ps_error.restype = (engine,), c_char_p
    loaded.ps_guard.argtypes, loaded.ps_guard.restype = (c_void_p, c_int64), c_int32
    loaded.ps_guard_hit.argtypes, loaded.ps_guard_hit.restype = (c_int32,), c_int32
    loaded.ps_unguard.argtypes, loaded.ps_unguard.restype = (c_int32,), None
    for name in ("ps_stop", "ps_close"):
        getattr(loaded, name).argtypes, getattr(loaded, name).restype = (engine,), None
    return loaded
