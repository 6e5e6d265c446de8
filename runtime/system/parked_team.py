"""A second team of OpenMP threads, asleep, which has those that compute sleep sooner while they wait.

Between two kernels the threads of a team spin for some milliseconds before they sleep (300,000 turns in
libgomp). On a machine whose cores are all in the team they take the processor from the threads that read
weights. Where there are more threads in teams than cores, libgomp lets them spin for 100 turns only: so one
more team, of a thread that waits, is all it takes. No team has another size, so what is computed is the same.
"""

from __future__ import annotations

import os
import threading

import torch

from penstock.schedule.facts.errors import StreamError

_PARALLEL = 1 << 17
"""Elements that torch shares out among threads: it does from 32,768 for each on."""


class ParkedTeam:
    """A thread that has had a team of its own, until `close`. No thread where torch computes on one."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._parked, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._park, name="penstock-parked", daemon=True)
        if torch.get_num_threads() == 1:
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StreamError(
                f"the system refused a thread ({error}): raise its limit on threads, or compute on one "
                "(torch.set_num_threads(1))"
            ) from error
        try:
            self._parked.wait()
        except BaseException:
            self._leave.set()
            raise

    def close(self) -> None:
        """End the thread and its team; may be called again, and does nothing in a forked child."""
        self._leave.set()
        if self._thread.ident is not None and os.getpid() == self._owner:
            self._thread.join()

    def _park(self) -> None:
        try:
            with torch.inference_mode():
                torch.ones(_PARALLEL).add_(1)
        except RuntimeError:
            return  # no memory for it: nothing is wrong without a team, only slower
        finally:
            self._parked.set()
        self._leave.wait()
