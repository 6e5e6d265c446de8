"""Tells a simulated device what the kernels of a program read, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.device.memory import DeviceWeights
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.sim.device import SimDevice
from penstock.runtime.stream.interface import Counters
from penstock.schedule.facts.model import Step, Trace


class SimStreamer:
    """Stands between a program's probes and its streamer, and touches what a step's kernels read or write.

    The trace and the places of weights say which bytes these are, independently of the streamer. So bytes
    that the streamer did not bring, or overwrites too early, are found.
    """

    def __init__(
        self, streamer: DeviceStreamer, device: SimDevice, weights: DeviceWeights, traces: Sequence[Trace]
    ) -> None:
        self._streamer, self._device, self._weights = streamer, device, weights
        self._traces = {trace.graph: trace for trace in traces}
        self._reached = 0  # steps of this pass whose kernels are enqueued

    @property
    def counters(self) -> Counters:
        """The streamer's counters."""
        return self._streamer.counters

    def probed(self, graph: int) -> tuple[int, ...]:
        """The steps at which the plan acts in a pass of method `graph`, ascending."""
        return self._streamer.probed(graph)

    @property
    def in_reader(self) -> bool:
        """Tells whether the caller is one of the streamer's own threads."""
        return self._streamer.in_reader

    def begin(self, graph: int) -> None:
        self._device.compute(self._traces[graph].gap_ns)
        self._reached = 0
        self._streamer.begin(graph)

    def acquire(self, graph: int, step: int) -> None:
        steps = self._traces[graph].steps
        self._pass_over(graph, step)
        self._device.compute(steps[step].lead_ns)
        self._device.launch()
        self._streamer.acquire(graph, step)
        self._touch(steps[step])

    def release(self, graph: int, step: int) -> None:
        this = self._traces[graph].steps[step]
        self._device.compute(this.read_ns)
        self._touch(this)  # until now
        self._reached = max(self._reached, step + 1)
        self._streamer.release(graph, step)

    def end(self, graph: int) -> None:
        trace = self._traces[graph]
        self._pass_over(graph, len(trace.steps))
        self._device.compute(trace.tail_ns)
        self._streamer.end(graph)

    def abort(self) -> None:
        self._streamer.abort()

    def close(self) -> None:
        self._streamer.close()

    def _pass_over(self, graph: int, step: int) -> None:
        """Run the steps without probes before `step`: their weights always stay."""
        probed = self._streamer.probed(graph)
        for number in range(self._reached, step):
            if number not in probed:
                this = self._traces[graph].steps[number]
                self._touch(this)
                self._device.compute(this.lead_ns + this.read_ns)

    def _touch(self, step: Step) -> None:
        for storage in (*step.reads, *step.writes):
            place = self._weights.ranges_of(storage)
            if place is not None:
                memory, start, stop = place
                writes = storage in step.writes
                label = f"step {step.name!r} {'writing' if writes else 'reading'} storage {storage}"
                self._device.kernels_touch(memory, start, stop, label, writes=writes)
