"""Private memory that is taken before it is needed, in huge pages as long as these come fast."""

from __future__ import annotations

import ctypes
import errno
import time

from penstock.runtime.system.memory import MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, advise, hint
from penstock.schedule.facts.errors import StreamError

_SLOW = 1e9
"""Bytes per second: a disk brings more."""

_PATIENCE = 4


class FreshMemory:
    """Takes memory that nobody has touched, piece by piece, from any thread.

    Huge pages mostly come faster than small ones, and cost fewer misses of the TLB later. But what a virtual
    machine has free in whole huge pages its host may have taken back: 514 MiB then took 0.7 s where small
    pages took 0.13, and reads at the same time ran at a fifth of their speed. So after some pieces that came
    slowly, small ones are asked for; direct reads fill both as fast, once they are there.
    """

    def __init__(self) -> None:
        self._slow = 0

    def take(self, address: int, nbytes: int) -> None:
        """Have memory for whole pages behind `address`; StreamError when there is not enough."""
        huge = self._slow < _PATIENCE
        hint(address, nbytes, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
        began = time.thread_time()  # not what other threads had meanwhile
        _populate(address, nbytes)
        if huge:
            slow = nbytes < _SLOW * (time.thread_time() - began)
            self._slow = self._slow + 1 if slow else 0


def _populate(address: int, nbytes: int) -> None:
    try:
        advise(address, nbytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise StreamError(
                f"{nbytes} bytes of memory for weights could not be had ({error.strerror}): lower the "
                "budget or free memory"
            ) from error
        ctypes.memset(address, 0, nbytes)
