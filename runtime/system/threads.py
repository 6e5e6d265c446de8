"""Starts threads that read and that somebody waits for, and calms the OpenMP team that computes meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.schedule.facts.errors import StreamError

READERS = 3
"""The number of reading threads: two did not keep the disk busy during compute, four were no faster."""

_SHARED_OUT = 1 << 17
"""The number of elements for which torch uses several threads: it gives each of them 32,768 or more."""


class ReaderThreads:
    """Holds `count` daemon threads that each run `read` once, when `start` has started them.

    They are daemons because a program that ends should not wait for weights that nobody will use.
    """

    def __init__(self, count: int, read: Callable[[], None], name: str) -> None:
        self._threads = [
            threading.Thread(target=read, name=f"penstock-{name}-{i}", daemon=True) for i in range(count)
        ]

    def start(self, stop: Callable[[], None]) -> None:
        """Start all threads; where the system refuses one, `stop` the others and raise StreamError."""
        try:
            for thread in self._threads:
                thread.start()
        except BaseException as error:
            stop()
            if isinstance(error, RuntimeError):
                raise StreamError(
                    f"the system refused one of {len(self._threads)} reading threads ({error}): raise its "
                    "limit on threads, or load with fewer readers"
                ) from error
            raise

    def join(self) -> None:
        """Wait for the threads that have started."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def includes_caller(self) -> bool:
        """Tells whether the calling thread is one of these, which cannot wait for themselves."""
        return threading.current_thread() in self._threads


class WorkerPool(ThreadPoolExecutor):
    """A pool of threads that can tell whether the caller is one of them."""

    def __init__(self, count: int, name: str) -> None:
        # The threads must not refer to the pool: it ends them when it is collected as garbage.
        self._own = own_threads = set[threading.Thread]()
        super().__init__(
            count,
            thread_name_prefix=f"penstock-{name}",
            initializer=lambda: own_threads.add(threading.current_thread()),
        )

    @property
    def includes_caller(self) -> bool:
        """Tells whether the calling thread is one of the pool's, which cannot wait for themselves."""
        return threading.current_thread() in self._own


class ParkedTeam:
    """Keeps a second OpenMP team asleep on a thread of its own, from the beginning until `wake`.

    Where torch uses one thread only, there is no team to calm, and none is started.

    Between two kernels the threads of a team spin for some milliseconds before they sleep (300,000 turns in
    libgomp). On a machine whose cores are all in the team, they take the processor from the threads that read
    weights. Where there are more threads in teams than cores, libgomp lets them spin for 100 turns only, and
    one more team is enough for that. The teams that compute keep their size, so the results are the same.
    But a thread that sleeps has to be woken for each kernel: where nobody reads, spinning is faster (a token
    of a model of 150 MB in 16 layers took 32 ms instead of 43).
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._leave = threading.Event()
        self.park()

    def park(self) -> None:
        """Start the thread and its team, unless they are there. Raises StreamError if the system refuses."""
        if self._thread is not None or torch.get_num_threads() == 1:
            return
        parked, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=_park, args=(parked, self._leave), name="penstock-parked", daemon=True
        )
        try:
            self._thread.start()
            parked.wait()
        except RuntimeError as error:
            self._thread = None
            raise StreamError(
                f"the system refused a thread ({error}): raise its limit on threads, or compute on one "
                "(torch.set_num_threads(1))"
            ) from error
        except BaseException:
            self.wake()
            raise

    def wake(self) -> None:
        """End the thread and its team, if they are there; in a forked child they are not."""
        thread, self._thread = self._thread, None
        self._leave.set()
        if thread is not None and thread.ident is not None and os.getpid() == self._owner:
            thread.join()


def _park(parked: threading.Event, leave: threading.Event) -> None:
    try:
        with torch.inference_mode():
            torch.ones(_SHARED_OUT).add_(1)
    except RuntimeError:
        return  # There was no memory for the team: computing works without it and is only slower.
    finally:
        parked.set()
    leave.wait()
