"""What every device does alike: cpu, sim and the rig in all orders, and cuda where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from penstock.runtime.device.accelerator import AcceleratorDevice
from penstock.runtime.device.cuda import CudaDevice
from penstock.runtime.device.memory import DeviceWeights
from penstock.runtime.device.protocol import Device, FileRead, Move
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.stream.interface import Streamer
from penstock.schedule.facts.errors import SourceError, StreamError
from tests.rig import machine
from tests.runtime.device.cpu_device import CpuDevice
from tests.runtime.device.device_runs import HARDWARE, Case, Memory, WrongBytesError, cases, disk_cases
from tests.runtime.sim.faults import COPIES, READS, Fault
from tests.runtime.sim.ordered_device import OrderedDevice

DEVICES: dict[str, Callable[[], Any]] = {
    "cpu": CpuDevice,
    "sim, earliest": lambda: OrderedDevice(HARDWARE, policy="earliest"),
    "sim, latest": lambda: OrderedDevice(HARDWARE, policy="latest"),
    "sim, lagging": lambda: OrderedDevice(HARDWARE, policy="lagging"),
    "sim, random": lambda: OrderedDevice(HARDWARE, policy="random", seed=3),
    "cuda": partial(CudaDevice, "cuda"),
    **{f"rig, {order}, {seed}": partial(AcceleratorDevice, "rig") for order, seed in machine.ORDERS},
    **{
        f"rig, {order}, {seed}, ordinary memory": partial(AcceleratorDevice, "rig", page_lock=False)
        for order, seed in machine.ORDERS[1:4]
    },
}

ON_REAL_DEVICES = [name for name, fault in {**COPIES, **READS}.items() if fault.by == "bits"]
ON_REAL_DEVICES.remove("nothing is copied on demand")  # no pass here leaves the planned order


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here: `make gpu` runs this where there is one")
    order = request.param.split(", ")[1:]
    with machine.ordered(order[0], int(order[1])) if request.param.startswith("rig") else nullcontext():
        opened: Any = DEVICES[request.param]()
        yield opened
        opened.finish()  # kernels, for which closing does not wait
        opened.close()
        opened.close()


def host(device: Device, values: list[int]) -> torch.Tensor:
    memory = device.allocate_host(len(values))
    memory.copy_(torch.tensor(values, dtype=torch.uint8))
    return memory


def finish(device: Device, stream: Any) -> None:
    device.synchronize(device.record(stream))


def test_memory_is_flat_aligned_and_of_the_size_asked_for(device: Device) -> None:
    for nbytes in (0, 1, 4097):
        for memory in (device.allocate(nbytes, "a test"), device.allocate_host(nbytes)):
            assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
            assert not nbytes or memory.data_ptr() % 64 == 0
    assert device.allocate(1, "a test").device == device.torch_device


def test_a_copy_moves_what_it_names_and_nothing_else(device: Device) -> None:
    source, target = host(device, [1, 2, 3, 4, 5, 6, 7, 8]), device.allocate(8, "a test")
    copies = device.open_stream("copies")
    device.fill(copies, target, 0, 8, 9)
    device.copy(copies, target, [Move(source, 0, 4, 2), Move(source, 6, 0, 1)], "a copy")
    finish(device, copies)
    assert target.tolist() == [7, 9, 9, 9, 1, 2, 9, 9]


def test_what_the_host_has_waited_for_has_run(device: Device) -> None:
    target, copies = device.allocate(8, "a test"), device.open_stream("copies")
    device.fill(copies, target, 0, 8, 7)
    finish(device, copies)
    assert target.tolist() == [7] * 8


def test_operations_of_one_stream_run_in_order(device: Device) -> None:
    source, target = host(device, list(range(64))), device.allocate(64, "a test")
    copies = device.open_stream("copies")
    for value in range(20):
        device.fill(copies, target, 0, 64, value)
        device.copy(copies, target, [Move(source, value, value, 1)], "a copy")
    finish(device, copies)
    assert target.tolist() == [19] * 64


def test_kernels_wait_for_copies_and_copies_for_kernels(device: Device) -> None:
    source, target = host(device, [5] * 1024), device.allocate(1024, "a test")
    copies, kernels = device.open_stream("copies"), device.current_stream()
    found = []
    for value in range(5):
        device.fill(kernels, target, 0, 1024, value)
        device.wait(copies, device.record(kernels))
        device.copy(copies, target, [Move(source, 0, 0, 512)], "a copy")
        device.wait(kernels, device.record(copies))
        found.append(target.clone())
    finish(device, kernels)
    assert [one.tolist() for one in found] == [[5] * 512 + [value] * 512 for value in range(5)]


def test_a_wait_for_what_is_done_goes_on(device: Device) -> None:
    copies = device.open_stream("copies")
    event = device.record(copies)
    device.synchronize(event)
    device.wait(copies, event)
    device.wait(device.current_stream(), event)
    finish(device, copies)


@pytest.mark.parametrize("case", [*cases(), *disk_cases()], ids=lambda case: case.name)
def test_plans_run_on_every_device(device: Device, case: Case) -> None:
    """Two passes of each method, and what each step finds."""
    source: Any = case.source
    weights = DeviceWeights(case.plan, case.storages, device, source)
    streamer = DeviceStreamer(case.plan, case.storages, device, weights, poison=True)
    for trace in (*case.plan.traces, *reversed(case.plan.traces)):
        method = streamer.methods[trace.graph]
        streamer.begin(trace.graph)
        for number, step in enumerate(trace.steps):
            if number in method.probed:
                streamer.acquire(trace.graph, number)
            for storage in step.reads:
                assert found(weights, storage).tolist() == list(contents(case, source, storage))
            if number in method.probed:
                streamer.release(trace.graph, number)
        streamer.end(trace.graph)
    assert streamer.counters.misses == 0
    streamer.close()
    streamer.close()
    with pytest.raises(StreamError, match="closed"):
        streamer.begin(0)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ON_REAL_DEVICES)
def test_copies_of_wrong_bytes_are_found_on_real_devices(kind: str, name: str) -> None:
    """The faults that no order of streams can hide; those of waits need the simulated device."""
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here: `make gpu` runs this where there is one")
    fault = {**COPIES, **READS}[name]
    fault.fired = 0
    with pytest.raises(WrongBytesError):
        run_on(DEVICES[kind], fault)
    assert fault.fired


def run_on(kind: Callable[[], Any], fault: Fault) -> None:
    for one in (*cases()[:3], disk_cases()[0]):
        device = kind()
        try:
            faulty = fault.device(device)
            weights = DeviceWeights(one.plan, one.storages, faulty, fault.source(one.source))
            streamer = DeviceStreamer(one.plan, one.storages, faulty, weights, poison=True)
            run_pass(one, weights, fault.streamer(streamer))
        finally:
            device.close()


def run_pass(one: Case, weights: DeviceWeights, streamer: Streamer) -> None:
    probed = streamer.probed(0)
    for storage in one.plan.outside:
        compare(one, weights, storage)
    streamer.begin(0)
    for number, step in enumerate(one.plan.traces[0].steps):
        if number in probed:
            streamer.acquire(0, number)
        for storage in step.reads:
            compare(one, weights, storage)
        if number in probed:
            streamer.release(0, number)
    streamer.end(0)


def compare(one: Case, weights: DeviceWeights, storage: int) -> None:
    if found(weights, storage).tolist() != list(contents(one, one.source, storage)):
        raise WrongBytesError(f"{one.name}: storage {storage} is not what the file has")


def found(weights: DeviceWeights, storage: int) -> torch.Tensor:
    place = weights.ranges_of(storage)
    assert place is not None
    return place[0][place[1] : place[2]].clone()


def contents(case: Case, source: Memory, storage: int) -> bytes:
    (extent,) = case.storages[storage].extents
    return source.contents[extent.file_offset : extent.file_offset + extent.nbytes]


def test_a_disk_reads_what_it_is_asked_for_behind_what_it_waits_for(device: Device) -> None:
    source: Any = Memory(bytes(range(64)))
    disk, copies = device.open_disk(source), device.open_stream("copies")
    memory, target = device.allocate_host(8), device.allocate(16, "a test")
    for number in range(10):
        device.read(disk, memory, [FileRead(0, number, 0, 4), FileRead(0, 32 + number, 4, 4)], "a read")
        device.wait(copies, device.record(disk))
        device.copy(copies, target, [Move(memory, 0, number % 2 * 8, 8)], "a copy")
        device.wait(disk, device.record(copies))
    last = device.record(disk)
    device.synchronize(last)
    assert device.query(last)
    assert target.tolist() == [8, 9, 10, 11, 40, 41, 42, 43, 9, 10, 11, 12, 41, 42, 43, 44]


class Broken(Memory):
    """A disk that fails at the third read."""

    def read_into(self, file: int, offset: int, address: int, nbytes: int) -> None:
        if offset >= 2:
            raise SourceError("the disk is broken")
        super().read_into(file, offset, address, nbytes)


def test_an_error_of_a_read_reaches_who_waits_for_it_and_ends_all_reading(device: Device) -> None:
    source: Any = Broken(bytes(64))
    disk, memory = device.open_disk(source), device.allocate_host(64)
    for number in range(2):
        device.read(disk, memory, [FileRead(0, number, number, 1)], "a read")
    device.synchronize(device.record(disk))
    device.read(disk, memory, [FileRead(0, 2, 2, 1)], "a read")
    for _ in range(2):
        with pytest.raises(SourceError, match="broken"):
            device.wait(device.current_stream(), device.record(disk))


def test_an_error_of_a_copy_reaches_who_waits_for_it() -> None:
    device = CpuDevice()
    copies = device.open_stream("copies")
    device.copy(copies, device.allocate(1, "a test"), [Move(device.allocate_host(4), 0, 0, 4)], "too long")
    with pytest.raises(RuntimeError):
        device.synchronize(device.record(copies))
    device.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused_by_name() -> None:
    with pytest.raises(StreamError, match=r"there is no device 'cuda' here .*the device sim:h200 runs plans"):
        CudaDevice("cuda")
