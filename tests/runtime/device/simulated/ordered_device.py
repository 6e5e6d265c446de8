"""A simulated device that runs its streams in other orders, and one that checks what CUDA graphs ask for."""

import random
from contextlib import contextmanager
from typing import Literal

from penstock.runtime.device.simulated import SimDevice, SimDisk
from penstock.schedule.facts.errors import StreamError

Policy = Literal["earliest", "latest", "random", "lagging"]


class OrderedDevice(SimDevice):
    """Runs what is enqueued at once, late (when it is waited for), at random, or late on one stream only."""

    def __init__(self, hardware=None, *, policy, seed=0):
        super().__init__(hardware)
        self._policy, self._seed, self._chance = policy, seed, random.Random(seed)

    def _enqueue(self, stream, run):
        super()._enqueue(stream, run)
        if stream.of_kernels or self._is_late(stream):
            return
        count = len(stream.waiting)
        for _ in range(self._chance.randint(0, count) if self._policy == "random" else count):
            self._step(stream)

    def _is_late(self, stream):
        """Whether a stream runs only when it is waited for. Of all, the last one lags, or one before."""
        lagging = self._streams[-1 - self._seed % len(self._streams)]
        return stream is lagging if self._policy == "lagging" else self._policy == "latest"


class CapturedDevice(SimDevice):
    """Applies the rules of CUDA graphs to what is enqueued in `capture`, and takes it back at the end.

    What is captured is called on a stream of its own, as torch does it. Another takes part once it waits for
    an event of the capture, which must not wait for any other, and the kernels have to wait for all that it
    has done in the end. Reads from a disk cannot be captured.
    """

    def __init__(self, hardware):
        super().__init__(hardware)
        self._captures = self._now = 0  # how many there were, and which one goes on, 0 where none does
        self._of_stream = {}
        self._of_event = {}
        self._last = {}
        self._graph = self.open_kernels("graph")
        self._memories = []

    def allocate(self, nbytes, purpose):
        self._memories.append(super().allocate(nbytes, purpose))
        return self._memories[-1]

    @contextmanager
    def capture(self):
        self.finish()
        before, detector = [memory.clone() for memory in self._memories], self.detector.copy()
        self._captures += 1
        self._now = self._of_stream[self._graph.name] = self._captures
        try:
            with self.kernels_on(self._graph):
                yield
            known = self.detector.clock_of(self._graph.name)
            for name, capture in self._of_stream.items():
                if capture == self._now and known.get(name, 0) < self._last.get(name, 0):
                    raise StreamError(f"the capture ends while {name} has work that nothing waits for")
        finally:
            self._now = 0
            self._of_stream.clear()
            self.finish()
            for memory, bytes_before in zip(self._memories, before, strict=True):
                memory.copy_(bytes_before)
            self.detector = detector

    @property
    def capturing(self):
        return self._now != 0

    def record(self, stream):
        event = super().record(stream)
        self._of_event[id(event)] = (0 if isinstance(stream, SimDisk) else self._now), event
        return event

    def wait(self, stream, event):
        capture = self._of_event[id(event)][0]
        if capture != self._now:
            raise StreamError("a capture waits for an event from outside it, or the other way round")
        for one in stream.lanes if isinstance(stream, SimDisk) else (stream,):
            self._of_stream[one.name] = capture
        super().wait(stream, event)

    def _operation(self, stream):
        if self._of_stream.get(stream.name, 0) != self._now:
            raise StreamError(f"{stream.name} is used in a capture that it takes no part in")
        super()._operation(stream)

    def _enqueue(self, stream, run):
        self._last[stream.name] = self.detector.clock_of(stream.name)[stream.name]
        super()._enqueue(stream, run)
