"""Plans run on the rig without a model: what each step's kernels find is kept there, and compared at the end.

So nothing but the streamer's own waits orders anything: a kernel that runs too early, or a copy that comes
too early, shows as wrong bytes. It is compared when all is closed, so that closing too early shows, too.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import torch

from penstock.runtime.arena.reading import POISON
from penstock.runtime.device.accelerator import AcceleratorDevice, DiskEvent, DiskStream
from penstock.runtime.device.opening import open_accelerator
from penstock.runtime.device.streamer import DeviceStreamer, PassOrder
from penstock.runtime.device.weights import DeviceWeights
from tests.rig import machine
from tests.runtime.device.device_runs import (
    POLICIES,
    BrokenError,
    Case,
    CountError,
    Parts,
    WrongBytesError,
    cases,
    totals_of,
)


class LateDisk(DiskStream):
    """Reads what somebody waits for and no earlier, the newest first: reads have no order but by waits."""

    def __init__(self, source):
        super().__init__(source)
        self._late = []
        self._lock = threading.Lock()

    def record(self):
        return LateEvent(self, super().record().submitted)

    def demand(self, reads):
        with self._lock:
            for read, work in reversed([one for one in self._late if one[0] in reads]):
                self._guarded(work)
                read.set_result(None)
            self._late = [one for one in self._late if not one[0].done()]

    def _submit(self, target, reads):
        with self._lock:
            new = [(Future[None](), self._reader(target, one)) for one in reads]
            self._late += new
        self._reads = [read for read in self._reads if not read.done()] + [read for read, _ in new]


class LateEvent(DiskEvent):
    """An event of a late disk."""

    def synchronize(self):
        stream = self.stream
        stream.demand(self.submitted.result())
        super().synchronize()


class PromptDisk(DiskStream):
    """Reads as early as waits allow: what is enqueued is read before anything else is."""

    def read(self, target, reads):
        super().read(target, reads)
        wait(self.record().submitted.result())


DISKS_OF_ORDERS = {"late": (LateDisk, PromptDisk)}
"""Disks that make all faults of order certain to show in an order of the rig's, beside the system's disk."""


class DeviceWithDisk(AcceleratorDevice):
    """The rig with another disk behind it than the system's."""

    def __init__(self, name, disk):
        super().__init__(name)
        self._disk = disk

    def open_disk(self, source):
        self._disks.append(self._disk(source))
        return self._disks[-1]


@cache
def plan_of(program, budget, **options):
    """A plan for the rig as if it were as fast as an H200, made once for all orders."""
    return program.plan(budget, device="rig", hardware="h200", **options)


@dataclass
class RigRun:
    """A case on the rig, in the order that is set, or on the accelerator of another name.

    `parts` may alter what the runtime is given. The disk is the system's, which may have read or not, unless
    it is another. `blocked` tells how often the host has waited for the device so far.
    """

    case: Case
    parts: Parts = field(default_factory=Parts)
    name: str = "rig"
    disk: type[DiskStream] | None = None
    blocked: Callable[[], object] = machine.blocked

    def go(self):
        """Run all passes, and return the bytes moved. Raises WrongBytesError for what a step found."""
        one, parts = self.case, self.parts
        device = DeviceWithDisk(self.name, self.disk) if self.disk else open_accelerator(self.name)
        given = parts.device(device)
        self.found = []
        streams = [
            torch.accelerator.current_stream(),
            *(torch.Stream(self.name) for _ in range(1, one.streams)),
        ]
        try:
            self.weights = DeviceWeights(
                parts.plan_of_weights(one.plan), one.storages, given, parts.source(one.source)
            )
            self._compare_host()
            plan = parts.plan_of_streamer(one.plan)
            inner = DeviceStreamer(plan, one.storages, given, self.weights, poison=True)
            streamer = parts.streamer(inner)
            for storage in one.plan.outside:
                self._keep(storage)
            order, blocked = PassOrder(given), self.blocked()
            for number, (graph, how) in enumerate(one.passes):
                parts.begin_pass(how)
                with suppress(BrokenError), streams[number % len(streams)], order.turn():
                    self._run(streamer, graph, how)
            if not self.weights.host.ring.numel() and self.blocked() != blocked:  # its threads wait, too
                raise CountError(f"{one.name}: the host waited, {self.blocked()} instead of {blocked}")
            streamer.close()
            order.close()
            device.close()
            self.weights.close()
            # Whoever gets that memory next writes to it on the stream which it was made on.
            torch.empty_like(self.weights.arena).fill_(POISON)
            self._compare()
            if bool(streamer.counters.misses) != any(how == "backwards" for _, how in one.passes):
                raise CountError(f"{one.name}: {streamer.counters.misses} misses")
            return streamer.counters.bytes_moved
        finally:
            device.finish()
            device.close()

    def _run(self, streamer, graph, how):
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
            for storage in self.case.plan.traces[graph].steps[step].writes:
                self._write(storage)
            if step in probed:
                streamer.release(graph, step)
        if how == "raises":
            streamer.acquire(graph, probed[len(probed) // 2])
            streamer.abort()
            raise BrokenError
        streamer.end(graph)

    def _keep(self, storage):
        """Have a kernel read a storage where the plan has it."""
        place = self.weights.ranges_of(storage)
        if self.case.storages[storage].nbytes:
            if place is None:
                raise WrongBytesError(f"{self.case.name}: storage {storage} is nowhere")
            kept = place[0][place[1] : place[2]].clone()
            self.found.append((storage, kept, torch.accelerator.current_stream()))

    def _write(self, storage):
        """Have a kernel write what is produced where the plan has it."""
        memory, start, stop = self.weights.ranges_of(storage) or (None, 0, 0)
        if memory is None:
            raise WrongBytesError(f"{self.case.name}: storage {storage} is nowhere")
        memory[start:stop].fill_(storage + 1)

    def _compare_host(self):
        """What the host keeps is there as soon as the weights are loaded."""
        host = self.weights.host
        contents = memoryview(self.case.source.contents)
        for one in host.fill_slab():
            there = host.slab[one.target : one.target + one.nbytes]
            if bytes(there.clone().numpy().data) != contents[one.offset : one.offset + one.nbytes]:
                raise WrongBytesError(f"{self.case.name}: the host's weights are not what the file has")

    def _compare(self):
        contents = memoryview(self.case.source.contents)
        for storage, kept, stream in self.found:
            one = self.case.storages[storage]
            expected = b"".join(contents[e.file_offset : e.file_offset + e.nbytes] for e in one.extents)
            if one.kind == "produced":
                expected = bytes([storage + 1]) * one.nbytes
            with stream:
                same = bytes(kept.cpu().numpy().data) == expected
            if not same:
                raise WrongBytesError(f"{self.case.name}: storage {storage} is not what the file has")


def run_everywhere(parts, some, orders=machine.ORDERS):
    """Each of some cases in some orders; raises what the first to fail raises.

    As many bytes are moved as on the simulated device, unless how many there are is up to a disk.
    """
    for one, order in product(some, orders):
        others = DISKS_OF_ORDERS.get(order[0], ()) if one.plan.host else ()
        for disk in (None, *others):
            with machine.ordered(*order):
                moved = RigRun(one, parts, disk=disk).go()
            if one in cases() and moved != totals_of(one, *POLICIES[0]).bytes_moved:
                raise CountError(f"{one.name}: {moved} bytes were moved")
