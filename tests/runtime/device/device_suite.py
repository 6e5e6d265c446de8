"""What every device does alike, as plain functions of an open device.

test_device.py runs them on every device of the tests, and benchmarks/gpu on the one that it measures, where
no pytest is needed. Each raises AssertionError, or what the device raises.
"""

import re
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch

from penstock.runtime.device.protocol import Device, FileRead, Move
from penstock.runtime.device.streamer import DeviceStreamer
from penstock.runtime.device.weights import DeviceWeights
from penstock.schedule.facts.errors import SourceError, StreamError
from tests.runtime.device.device_runs import Memory, WrongBytesError, cases, disk_cases
from tests.runtime.device.simulated.faults import COPIES, READS


@contextmanager
def refused(error, words):
    """Expects an error whose message has these words."""
    said = "nothing"
    try:
        yield
    except error as raised:
        said = str(raised)
    assert re.search(words, said), f"expected {error.__name__} with {words!r}, got {said}"


def host(device, values):
    memory = device.allocate_host(len(values))
    memory.copy_(torch.tensor(values, dtype=torch.uint8))
    return memory


def open_copies(device):
    """A stream of copies that runs behind what the memory allocated so far was used for before."""
    copies = device.open_stream("copies")
    device.wait(copies, device.record(device.current_stream()))
    return copies


def finish(device, stream):
    device.synchronize(device.record(stream))


def memory_is_flat_aligned_and_of_the_size_asked_for(device):
    for nbytes in (0, 1, 4097):
        for memory in (device.allocate(nbytes, "a test"), device.allocate_host(nbytes)):
            assert (memory.dtype, memory.shape) == (torch.uint8, (nbytes,))
            assert not nbytes or memory.data_ptr() % 64 == 0
    assert device.allocate(1, "a test").device == device.torch_device


def a_copy_moves_what_it_names_and_nothing_else(device):
    source, target = host(device, [1, 2, 3, 4, 5, 6, 7, 8]), device.allocate(8, "a test")
    copies = open_copies(device)
    device.fill(copies, target, 0, 8, 9)
    device.copy(copies, target, [Move(source, 0, 4, 2), Move(source, 6, 0, 1)], "a copy")
    finish(device, copies)
    assert target.tolist() == [7, 9, 9, 9, 1, 2, 9, 9]


def what_the_host_has_waited_for_has_run(device):
    target, copies = device.allocate(8, "a test"), open_copies(device)
    device.fill(copies, target, 0, 8, 7)
    finish(device, copies)
    assert target.tolist() == [7] * 8


def operations_of_one_stream_run_in_order(device):
    source, target = host(device, list(range(64))), device.allocate(64, "a test")
    copies = open_copies(device)
    for value in range(20):
        device.fill(copies, target, 0, 64, value)
        device.copy(copies, target, [Move(source, value, value, 1)], "a copy")
    finish(device, copies)
    assert target.tolist() == [19] * 64


def kernels_wait_for_copies_and_copies_for_kernels(device):
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


def a_wait_for_what_is_done_goes_on(device):
    copies = device.open_stream("copies")
    event = device.record(copies)
    device.synchronize(event)
    device.wait(copies, event)
    device.wait(device.current_stream(), event)
    finish(device, copies)


def a_disk_reads_what_it_is_asked_for_behind_what_it_waits_for(device):
    source = Memory(bytes(range(64)))
    memory, target = device.allocate_host(8), device.allocate(16, "a test")
    disk, copies = device.open_disk(source), open_copies(device)
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

    def read_into(self, file, offset, address, nbytes):
        if offset >= 2:
            raise SourceError("the disk is broken")
        super().read_into(file, offset, address, nbytes)


def an_error_of_a_read_reaches_who_waits_for_it_and_ends_all_reading(device):
    source = Broken(bytes(64))
    disk, memory = device.open_disk(source), device.allocate_host(64)
    for number in range(2):
        device.read(disk, memory, [FileRead(0, number, number, 1)], "a read")
    device.synchronize(device.record(disk))
    device.read(disk, memory, [FileRead(0, 2, 2, 1)], "a read")
    for _ in range(2):
        with refused(SourceError, "broken"):
            device.wait(device.current_stream(), device.record(disk))


def a_plan_runs(case, device):
    """Two passes of each method, and what each step finds."""
    weights, streamer = load(case, device)
    for trace in (*case.plan.traces, *reversed(case.plan.traces)):
        run_pass(case, weights, streamer, trace.graph)
    assert streamer.counters.misses == 0
    streamer.close()
    streamer.close()
    with refused(StreamError, "closed"):
        streamer.begin(0)


def a_copy_of_wrong_bytes_is_found(fault, device):
    """One of the faults that no order of streams can hide; those of waits need the simulated device."""
    fault.fired = 0
    for case in (*cases()[:3], disk_cases()[0]):
        try:
            weights, streamer = load(case, device, fault)
            for storage in case.plan.outside:
                compare(case, weights, storage)
            run_pass(case, weights, fault.streamer(streamer), 0)
        except WrongBytesError:
            assert fault.fired
            return
    raise AssertionError("no step has found wrong bytes")


def load(case, device, fault=None):
    """The weights of a case on a device, and their streamer; a fault may alter what the two are given."""
    given = fault.device(device) if fault else device
    source = fault.source(case.source) if fault else case.source
    weights = DeviceWeights(case.plan, case.storages, given, source)
    return weights, DeviceStreamer(case.plan, case.storages, given, weights, poison=True)


def run_pass(case, weights, streamer, graph):
    """Run a method, and compare at each step what it reads. Raises WrongBytesError."""
    probed = streamer.probed(graph)
    streamer.begin(graph)
    for number, step in enumerate(case.plan.traces[graph].steps):
        if number in probed:
            streamer.acquire(graph, number)
        for storage in step.reads:
            compare(case, weights, storage)
        if number in probed:
            streamer.release(graph, number)
    streamer.end(graph)


def compare(case, weights, storage):
    place = weights.ranges_of(storage)
    assert place is not None
    (extent,) = case.storages[storage].extents
    expected = case.source.contents[extent.file_offset : extent.file_offset + extent.nbytes]
    if place[0][place[1] : place[2]].clone().tolist() != list(expected):
        raise WrongBytesError(f"{case.name}: storage {storage} is not what the file has")


Check = Callable[[Device], None]

_PLAIN = (
    memory_is_flat_aligned_and_of_the_size_asked_for,
    a_copy_moves_what_it_names_and_nothing_else,
    what_the_host_has_waited_for_has_run,
    operations_of_one_stream_run_in_order,
    kernels_wait_for_copies_and_copies_for_kernels,
    a_wait_for_what_is_done_goes_on,
    a_disk_reads_what_it_is_asked_for_behind_what_it_waits_for,
    an_error_of_a_read_reaches_who_waits_for_it_and_ends_all_reading,
)

CHECKS = {
    **{check.__name__.replace("_", " "): check for check in _PLAIN},
    **{f"the plan {case.name!r} runs": partial(a_plan_runs, case) for case in cases()},
    **{f"the plan {case.name!r} runs from a disk": partial(a_plan_runs, case) for case in disk_cases()},
}
"""What holds on every device, by name."""

FAULTS = {
    f"{name}, which is found": partial(a_copy_of_wrong_bytes_is_found, fault)
    for name, fault in {**COPIES, **READS}.items()
    # No pass here leaves the planned order.
    if fault.by == "bits" and name != "nothing is copied on demand"
}
"""What shows on real devices that these checks can fail, by name."""
