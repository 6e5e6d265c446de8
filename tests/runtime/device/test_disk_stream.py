"""The disk behind a device on real threads: every read happens, in the order that waits give."""

import os
import random
import threading
import time
from typing import ClassVar

import pytest
import torch

from penstock.runtime.device.accelerator import DiskStream
from penstock.runtime.device.protocol import FileRead
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.device.weights import DeviceWeights
from penstock.schedule.facts.errors import StreamError
from tests.runtime.device.cpu_device import CpuDevice
from tests.runtime.device.device_runs import UNIT, Memory, case

CONTENTS = bytes(range(256)) * 16


def test_every_read_happens_however_threads_are_switched():
    """Thousands of reads into one memory, each after the last was looked at."""
    disk, memory = DiskStream(Memory(CONTENTS)), torch.zeros(64, dtype=torch.uint8)  # type: ignore[arg-type]
    chance = random.Random(0)
    for _ in range(3000):
        offsets = [chance.randrange(4000) for _ in range(8)]
        disk.read(memory, [FileRead(0, offset, 8 * k, 8) for k, offset in enumerate(offsets)])
        disk.record().synchronize()
        expected = b"".join(CONTENTS[offset : offset + 8] for offset in offsets)
        assert bytes(memory.tolist()) == expected
    disk.close()


def test_reads_wait_for_what_they_are_told_to():
    disk, memory = DiskStream(Memory(CONTENTS)), torch.zeros(8, dtype=torch.uint8)  # type: ignore[arg-type]
    gate = threading.Event()
    disk.wait(lambda: gate.wait() and None)
    disk.read(memory, [FileRead(0, 8, 0, 8)])
    event = disk.record()
    time.sleep(0.02)
    assert not event.query()
    assert not memory.any()
    gate.set()
    event.synchronize()
    assert memory.tolist() == list(range(8, 16))
    disk.close()


def test_a_read_is_not_done_before_it_is():
    gate = threading.Event()

    class Gated(Memory):
        def read_into(self, file, offset, address, nbytes):
            assert offset or gate.wait(20)
            super().read_into(file, offset, address, nbytes)

    disk, memory = DiskStream(Gated(CONTENTS)), torch.zeros(8, dtype=torch.uint8)  # type: ignore[arg-type]
    disk.read(memory, [FileRead(0, 0, 0, 4)])
    for _ in range(2):
        disk.read(memory, [FileRead(0, 4, 4, 4)])
        event = disk.record()
        event.submitted.result()
        assert not event.query()  # for the first read, however long ago it was enqueued
    gate.set()
    event.synchronize()
    assert event.query()
    assert memory.tolist() == list(range(8))
    disk.close()


def test_the_disk_waits_for_what_it_is_told_to_and_the_host_does_not():
    device, gate, waited = CpuDevice(), threading.Event(), list[bool]()
    event = type("Gate", (), {"synchronize": lambda self: waited.append(gate.wait(60))})()
    source = Memory(CONTENTS)
    disk = device.open_disk(source)
    device.wait(disk, event)
    gate.set()
    device.synchronize(device.record(disk))
    assert waited == [True]
    device.close()


def test_large_reads_are_cut_and_bring_the_same(monkeypatch):
    monkeypatch.setattr("penstock.runtime.device.accelerator.PIECE", 8)
    stream, memory = DiskStream(Memory(CONTENTS)), torch.zeros(40, dtype=torch.uint8)  # type: ignore[arg-type]
    stream.read(memory, [FileRead(0, 3, 5, 30)])
    stream.record().synchronize()
    assert memory.tolist() == [0] * 5 + list(range(3, 33)) + [0] * 5
    stream.close()


class Slow(Memory):
    """Every read takes a moment, and is counted."""

    reads: ClassVar[list[int]] = []

    def read_into(self, file, offset, address, nbytes):
        self.reads.append(offset)
        time.sleep(0.01)
        super().read_into(file, offset, address, nbytes)


def test_closing_does_not_read_what_nobody_wants_any_more():
    disk, memory = DiskStream(Slow(CONTENTS)), torch.zeros(2000, dtype=torch.uint8)  # type: ignore[arg-type]
    disk.read(memory, [FileRead(0, k, k, 1) for k in range(2000)])
    event = disk.record()
    disk.close()
    disk.close()
    assert len(Slow.reads) < 1000
    with pytest.raises(StreamError, match="closed"):
        event.synchronize()


def test_a_thread_that_cannot_be_started_is_an_error(monkeypatch):
    disk, memory = DiskStream(Memory(CONTENTS)), torch.zeros(8, dtype=torch.uint8)  # type: ignore[arg-type]

    def refuse(*work):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(disk._readers, "submit", refuse)
    disk.read(memory, [FileRead(0, 0, 0, 8)])
    with pytest.raises(RuntimeError, match="can't start new thread"):
        disk.record().synchronize()
    disk.close()


def streamed():
    again = [[0], [1, 2], [3], [0, 4], [5], [1, 6]]
    return case("disk", [4, 1, 6, 2, 2, 9, 3, 1], [again], 0.3, [(0, "in order")], host=6 * UNIT)


class Open:
    """A case on the CPU device, with threads that read and copy."""

    def __init__(self, one):
        self.one, self.device = one, CpuDevice()
        source = one.source
        self.weights = DeviceWeights(one.plan, one.storages, self.device, source)
        self.streamer = DeviceStreamer(one.plan, one.storages, self.device, self.weights, poison=True)

    def run(self):
        """A pass in which every step finds its weights."""
        trace = self.one.plan.traces[0]
        method = self.streamer.methods[0]
        self.streamer.begin(0)
        for number, step in enumerate(trace.steps):
            if number in method.probed:
                self.streamer.acquire(0, number)
            for storage in step.reads:
                found = self.weights.ranges_of(storage)
                assert found is not None
                (extent,) = self.one.storages[storage].extents
                expected = self.one.source.contents[extent.file_offset :][: extent.nbytes]
                assert bytes(found[0][found[1] : found[2]].tolist()) == expected
            if number in method.probed:
                self.streamer.release(0, number)
        self.streamer.end(0)

    def close(self):
        self.streamer.close()
        self.device.close()
        self.weights.close()


def test_passes_on_real_threads_find_their_weights():
    for _ in range(12):
        opened = Open(streamed())
        for _ in range(25):
            opened.run()
        assert opened.streamer.counters.misses == 0
        opened.close()


@pytest.mark.parametrize("number", range(1, 120, 7))
def test_an_interrupt_anywhere_leaves_nothing_wrong(number, monkeypatch):
    """Ctrl-C in any call of the device, before or after it did its work: the next passes start over."""
    for after in (False, True):
        opened = Open(streamed())
        opened.run()
        left = [number]

        def interrupting(call, left=left, after=after):
            def run(*args):
                left[0] -= 1
                if left[0] == 0 and not after:
                    raise KeyboardInterrupt
                result = call(*args)
                if left[0] == 0 and after:
                    raise KeyboardInterrupt
                return result

            return run

        with monkeypatch.context() as patched:
            for name in ("copy", "read", "record", "wait", "query"):
                patched.setattr(opened.device, name, interrupting(getattr(opened.device, name)))
            try:
                for _ in range(3):
                    opened.run()
            except KeyboardInterrupt:
                left[0] = -1
                opened.streamer.abort()
        for _ in range(3):
            opened.run()
        opened.close()


def test_its_threads_cannot_wait_for_themselves_and_a_forked_child_has_none():
    opened = Open(streamed())
    opened.run()
    seen = []
    opened.device._disks[0].wait(lambda: seen.append(opened.streamer.in_reader))
    opened.device._disks[0].record().synchronize()
    assert seen == [True]
    assert not opened.streamer.in_reader
    child = os.fork()
    if child == 0:
        opened.device.close()
        os._exit(0)
    for _ in range(500):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    assert (done, status) == (child, 0)
    opened.close()
    assert opened.weights.arena.untyped_storage().nbytes() == 0
    assert opened.weights.host.slab.untyped_storage().nbytes() == 0
