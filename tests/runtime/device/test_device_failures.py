"""What fails midway on a device: the error reaches the caller, closing is clean, and the next load works."""

import gc
import resource
import threading
from contextlib import suppress

import pytest
import torch

import penstock
from penstock.runtime.device.simulated import RaceError, SimDevice
from penstock.runtime.device.streamer import DeviceStreamer, PassOrder
from penstock.runtime.device.weights import DeviceWeights, load_resident
from penstock.runtime.files.source import FileRange
from penstock.runtime.loading import load_module
from penstock.runtime.memory_split import MemorySplit
from penstock.runtime.options import LoadRequest
from penstock.runtime.stream.loaded import Resources
from tests.runtime.device.cpu_device import CpuDevice
from tests.runtime.device.device_runs import Memory, case, disk_cases


class LostError(RuntimeError):
    """What a driver says of a device that fell off the bus."""


class FailingSim(SimDevice):
    """Raises in one of its methods from the call `at` on."""

    method, at, calls = "", 0, 0

    def fail(self, method, at):
        self.method, self.at, self.calls = method, at, 0

    def _count(self, method):
        if method == self.method:
            self.calls += 1
            if self.calls >= self.at:
                raise LostError("the device fell off the bus")

    def copy(self, *args):
        self._count("copy")
        super().copy(*args)

    def close(self):
        with suppress(RaceError):  # nothing runs on a lost device any more
            super().close()

    def record(self, *args):
        self._count("record")
        return super().record(*args)


@pytest.mark.parametrize("method", ["copy", "record"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_device_that_fails_in_a_pass_is_closed_cleanly(stack, method, at):
    program = stack.open()
    plan = program.plan("50%", device="sim:t4")
    device = FailingSim(plan.hardware)
    module = load_module(program, plan, LoadRequest(), device=device)
    with torch.no_grad():
        assert torch.equal(module(stack.tokens), stack.expected)
        device.fail(method, at)
        with pytest.raises(LostError, match="fell off the bus"):
            module(stack.tokens)
        with pytest.raises((LostError, penstock.StreamError), match="fell off the bus"):
            module(stack.tokens)
        module.close()
        with program.load(plan=plan, device="sim:t4") as again:
            assert torch.equal(again(stack.tokens), stack.expected)


def test_closing_waits_for_copies_on_their_way():
    one = disk_cases()[0]
    device = CpuDevice()
    source = one.source
    slow = threading.Event()
    original = source.read_into
    object.__setattr__(source, "read_into", lambda *place: (slow.wait(0.002), original(*place))[1])
    weights = DeviceWeights(one.plan, one.storages, device, source)
    streamer = DeviceStreamer(one.plan, one.storages, device, weights)
    streamer.begin(0)
    streamer.acquire(0, streamer.methods[0].probed[0])
    streamer.close()
    device.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
    assert left == []


class OneHelper(threading.Thread):
    """A thread of which at most a few are started to close a module: the first must be enough."""

    started = 0

    def start(self):
        if self.name == "penstock-close":
            OneHelper.started += 1
            if OneHelper.started > 5:
                return
        super().start()


def open_resources(device, monkeypatch):
    """What a module on a device closes, and what is set then; no more than one thread may help."""
    one = disk_cases()[0]
    weights = DeviceWeights(one.plan, one.storages, device, one.source)
    streamer = DeviceStreamer(one.plan, one.storages, device, weights)
    closed = threading.Event()
    monkeypatch.setattr(OneHelper, "started", 0)
    monkeypatch.setattr(threading, "Thread", OneHelper)
    return Resources(streamer, (device.close, closed.set)), closed


def test_a_module_collected_on_the_reader_of_another_is_closed_there(monkeypatch):
    """A simulated device has no threads: whatever the caller's is called, nobody waits for himself."""
    resources, closed = open_resources(SimDevice(), monkeypatch)
    reader = OneHelper(target=resources.close, name="penstock-reader-0")
    reader.start()
    reader.join(60)
    assert (closed.is_set(), OneHelper.started) == (True, 0)


def test_a_module_collected_on_its_own_disk_thread_is_closed_by_one_helper(monkeypatch):
    device = CpuDevice()
    resources, closed = open_resources(device, monkeypatch)
    device._disks[0].wait(resources.close)
    assert closed.wait(60)
    assert OneHelper.started == 1


@pytest.mark.parametrize("host", [None, 256])
def test_thousands_of_passes_hold_no_more_memory(host):
    one = case("small", [2, 1, 3, 2], [[[0], [1], [2]]], 0.2, [(0, "in order")], host=host)
    device = CpuDevice()
    source = one.source
    weights = DeviceWeights(one.plan, one.storages, device, source)
    streamer = DeviceStreamer(one.plan, one.storages, device, weights)
    method = streamer.methods[0]
    assert (weights.host.ring.numel() > 0) == (host is not None)
    held = []
    for number in range(1_500):
        streamer.begin(0)
        for step in method.probed:
            streamer.acquire(0, step)
            streamer.release(0, step)
        streamer.end(0)
        if number in (500, 1_000, 1_499):
            gc.collect()
            held.append((len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    streamer.close()
    device.close()
    (objects, peak), (_, peak_later), (objects_last, peak_last) = held
    assert objects_last - objects < 500  # one in two passes; other tests' garbage comes and goes
    assert min(peak_later - peak, peak_last - peak_later) < 512  # KiB; what comes once is not the passes'


def test_running_out_of_memory_in_a_pass_names_the_part_that_outgrew_its_share(stack, monkeypatch):
    program = stack.open()
    module = program.load(device_memory="20MiB", device="sim:t4")

    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(DeviceStreamer, "acquire", fail)
    with (
        module,
        torch.no_grad(),
        pytest.raises(penstock.StreamError, match=r"out of memory in a pass: .* 20.00 MiB .* activations"),
    ):
        module(stack.tokens)
    split = MemorySplit(total=1000, activations=100, workspace=50, reserved=10, others=40)
    assert split.outgrown(200, 40) == (
        "activations, workspace and what the caller keeps took 200 B and more, of a share of 160 B"
    )
    assert split.outgrown(160, 90).startswith("what other processes hold took 90 B")


class Interrupted(SimDevice):
    """A device at which interrupts come before an event is recorded."""

    interrupts = 0

    def record(self, stream):
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return super().record(stream)


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_interrupt_before_the_end_of_a_pass_is_recorded_leaves_no_kernel_behind(goes_on):
    device = Interrupted()
    memory, order = device.allocate(64, "weights"), PassOrder(device)

    def interrupted():
        with order.turn():
            device.kernels_touch(memory, 0, 64, "a kernel")
            device.interrupts = 1

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    if goes_on:  # on another stream, whose kernels overwrite what those of the first pass read
        with device.kernels_on(device.open_kernels("2")), order.turn():
            device.kernels_touch(memory, 0, 64, "another kernel", writes=True)
    order.close()
    device.close()  # raises RaceError where a kernel may still use the memory that it gives back


def test_an_interrupt_while_weights_are_loaded_is_not_hidden_by_what_it_leaves():
    class Interrupting(Memory):
        def read_into(self, file, offset, address, nbytes):
            raise KeyboardInterrupt

    device = SimDevice()
    source = Interrupting(bytes(8192))
    disk, target = device.open_disk(source), device.allocate(8192, "a test")
    work = [(target, FileRange(at, at + 4096, 0, at, at)) for at in (0, 4096)]
    with pytest.raises(KeyboardInterrupt):
        load_resident(device, disk, device.allocate_host(8192), work)
    device.close()
