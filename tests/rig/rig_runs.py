"""Plans run on the rig without a model: what each step's kernels find is kept there, and compared at the end.

So nothing but the streamer's own waits orders anything: a kernel that runs too early, or a copy that comes
too early, shows as wrong bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.runtime.device.accelerator import AcceleratorDevice
from penstock.runtime.device.memory import DeviceWeights
from penstock.runtime.device.pass_order import PassOrder
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.stream.interface import Streamer
from tests.rig import machine
from tests.runtime.device.device_runs import Case, CountError, Parts, WrongBytesError


@dataclass
class RigRun:
    """A case on the rig, in the order that is set. `parts` may alter what the runtime is given."""

    case: Case
    parts: Parts = field(default_factory=Parts)

    def go(self) -> int:
        """Run all passes, and return the bytes moved. Raises WrongBytesError for what a step found."""
        one, parts = self.case, self.parts
        device = AcceleratorDevice("rig")
        given = parts.device(device)
        self.found: list[tuple[int, torch.Tensor, torch.Stream]] = []
        streams = [torch.accelerator.current_stream(), *(torch.Stream("rig") for _ in range(1, one.streams))]
        try:
            self.weights = DeviceWeights(
                parts.plan_of_weights(one.plan), one.storages, given, parts.source(one.source)
            )
            plan = parts.plan_of_streamer(one.plan)
            inner = DeviceStreamer(plan, one.storages, given, self.weights, poison=True)
            streamer = parts.streamer(inner)
            for storage in one.plan.outside:
                self._keep(storage)
            order, blocked = PassOrder(given), machine.blocked()
            for number, (graph, how) in enumerate(one.passes):
                parts.begin_pass(how)
                with streams[number % len(streams)], order.turn():
                    self._run(streamer, graph, how)
            if not self.weights.host.ring.numel() and machine.blocked() != blocked:  # its threads wait, too
                raise CountError(f"{one.name}: the host waited, {machine.blocked()} instead of {blocked}")
            self._compare()
            if bool(streamer.counters.misses) != any(how == "backwards" for _, how in one.passes):
                raise CountError(f"{one.name}: {streamer.counters.misses} misses")
            streamer.close()
            order.close()
            return streamer.counters.bytes_moved
        finally:
            torch.ops.rig.set_policy("soon", 0)
            torch.accelerator.synchronize()
            device.close()

    def _run(self, streamer: Streamer, graph: int, how: str) -> None:
        probed, count = streamer.probed(graph), len(self.case.plan.traces[graph].steps)
        steps = {
            "in order": list(range(count)),
            "backwards": list(reversed(probed)),
            "raises": list(probed[: len(probed) // 2]),
        }[how]
        streamer.begin(graph)
        for step in steps:
            if step in probed:
                streamer.acquire(graph, step)
            for storage in self.case.plan.traces[graph].steps[step].reads:
                self._keep(storage)
            if step in probed:
                streamer.release(graph, step)
        if how == "raises":
            streamer.acquire(graph, probed[len(probed) // 2])
            streamer.abort()
        else:
            streamer.end(graph)

    def _keep(self, storage: int) -> None:
        """Have a kernel read a storage where the plan has it."""
        place = self.weights.ranges_of(storage)
        if self.case.storages[storage].nbytes:
            if place is None:
                raise WrongBytesError(f"{self.case.name}: storage {storage} is nowhere")
            kept = place[0][place[1] : place[2]].clone()
            self.found.append((storage, kept, torch.accelerator.current_stream()))

    def _compare(self) -> None:
        contents: Any = memoryview(self.case.source.contents)
        for storage, kept, stream in self.found:
            extents = self.case.storages[storage].extents
            expected = b"".join(contents[e.file_offset : e.file_offset + e.nbytes] for e in extents)
            with stream:
                same = bytes(kept.cpu().numpy().data) == expected
            if not same:
                raise WrongBytesError(f"{self.case.name}: storage {storage} is not what the file has")


def run_everywhere(parts: Parts, cases: Any, orders: Any = machine.ORDERS) -> None:
    """All cases in all orders; raises what the first to fail raises."""
    for order in orders:
        for one in cases:
            with machine.ordered(*order):
                RigRun(one, parts).go()
