"""What may happen to reads of units, on either engine: they come late, they fail, a call is interrupted."""

import ctypes
import errno
import itertools
import os
import threading
import time

from penstock.native.library import WAITING
from penstock.runtime import loading
from penstock.runtime.sparse.units import LoadedUnits
from penstock.runtime.stream import native
from penstock.runtime.stream.native import NativeStreamer
from tests.runtime.stream.cases import READ
from tests.runtime.system.page_tables import mapped_bytes


def taken(units):
    """The bytes that the process's page tables really hold for units."""
    return mapped_bytes(*units.memory)


def have_reads_pass(before, patch):
    """Have all reads of units pass `before`, in modules that are loaded from now on."""
    read, options_of = LoadedUnits.read, loading.engine_options
    kept = []  # what engines call

    def passing(self, piece):
        before(self.memory[0] + piece.start, piece.nbytes)
        return read(self, piece)

    def with_reads(source, *args, **options):
        made = options_of(source, *args, **options)

        def read_file(_, file, offset, address, nbytes):
            try:
                before(address, nbytes)
                memory = (ctypes.c_char * nbytes).from_address(address)
                return 0 if os.preadv(source.files[file].fd, [memory], offset) == nbytes else errno.EIO
            except Exception:  # it cannot pass through the engine, which only knows numbers
                return errno.EIO

        kept.append(READ(read_file))
        made.read = ctypes.cast(kept[-1], ctypes.c_void_p)
        return made

    patch.setattr(LoadedUnits, "read", passing)
    patch.setattr(loading, "engine_options", with_reads)


def interrupt_wait(turn, patch):
    """Interrupt the wait for units, the first of which is 0, in modules that are loaded from now on.

    Reads take long, and do not end before the native engine has lost its patience.
    """
    lost = threading.Event()
    lost.set()

    def late(address, nbytes):
        time.sleep(0.003)
        lost.wait()

    have_reads_pass(late, patch)
    patch.setattr(native, "_PATIENCE_MS", 1)
    wait, call, calls = LoadedUnits._wait, NativeStreamer.call, itertools.count()

    def interrupted(self, units):
        if next(calls) == turn:
            raise KeyboardInterrupt
        wait(self, units)

    def interrupted_call(self, function, *arguments):
        if function == "ps_units_hold" and next(calls) == turn:
            lost.clear()
            waiting = getattr(self._library, function)(self._open(), *arguments) == WAITING
            lost.set()
            assert waiting
            raise KeyboardInterrupt
        call(self, function, *arguments)

    patch.setattr(LoadedUnits, "_wait", interrupted)
    patch.setattr(NativeStreamer, "call", interrupted_call)
