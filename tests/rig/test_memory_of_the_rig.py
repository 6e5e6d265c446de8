"""Memory on both sides of a device: what is page-locked, how it is aligned, copied and given back."""

import gc
import mmap
import runpy
import threading
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.device import accelerator, streamer
from penstock.runtime.device.accelerator import AcceleratorDevice, CudaDevice, PageableStream
from penstock.runtime.device.protocol import FileRead, Move
from penstock.runtime.device.weights import load_resident
from penstock.runtime.files.source import FileRange
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.runtime.system.memory import HUGE_PAGE
from tests.rig import machine
from tests.rig.rig_runs import plan_of
from tests.runtime.device.device_runs import Memory
from tests.runtime.system.page_tables import flags_at

VALUES = torch.randn(2, 100)


class Uneven(nn.Module):
    """Weights whose sizes are no multiple of anything."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(100, 101 - k) for k in range(6))

    def forward(self, x):
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("uneven") / "uneven.penstock"
    return penstock.compile(export(Uneven().requires_grad_(False), (VALUES,)), path)


class Registering(CudaDevice):
    """The rig, whose host memory is registered as CUDA's is. Streams and events are torch's common ones."""

    current_stream = AcceleratorDevice.current_stream
    capturing = AcceleratorDevice.capturing
    _new_stream = AcceleratorDevice._new_stream
    _event = AcceleratorDevice._event


class Runtime:
    """The two calls of CUDA's runtime that register memory, on the rig."""

    refuses = 0
    devices: ClassVar[list[int]] = []  # those that were current as memory was registered
    unknown: ClassVar[list[int]] = []  # what was unregistered and had not been registered

    @classmethod
    def cudaHostRegister(cls, address, nbytes, flags):  # noqa: N802 (the runtime's name)
        cls.devices.append(torch.accelerator.current_device_index())
        return cls.refuses or (0 if torch.ops.rig.lock(address, nbytes) else 712)

    @classmethod
    def cudaHostUnregister(cls, address):  # noqa: N802 (the runtime's name)
        if torch.ops.rig.unlock(address):
            return 0
        cls.unknown.append(address)
        return 713


@pytest.fixture
def registering(monkeypatch):
    monkeypatch.setattr(accelerator, "_runtime", lambda: Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.accelerator.device_index(device.index))
    monkeypatch.setattr(Runtime, "refuses", 0)
    monkeypatch.setattr(Runtime, "devices", [])
    yield Registering
    assert Runtime.unknown == []


def load(program, share, device):
    return load_module(program, plan_of(program, share), LoadRequest(device="rig"), device=device)


@pytest.mark.parametrize("share", ["50%", "100%"])
def test_nothing_is_copied_from_memory_that_is_not_locked(program, order, share):
    with torch.no_grad(), load(program, share, AcceleratorDevice("rig")) as streamed:
        streamed(VALUES.to("rig"))
        assert machine.blocked().get("a pageable copy to the device", 0) == 1  # that of the input


@pytest.mark.parametrize("share", ["50%", "100%"])
def test_memory_is_registered_to_the_page_and_none_is_left(program, order, registering, share):
    before = torch.ops.rig.locked_bytes()
    for closes in (True, False):
        with torch.no_grad():
            streamed = load(program, share, registering("rig"))
            streamed(VALUES.to("rig"))
        pinned = streamed.stats.pinned_bytes
        assert pinned == (streamed.plan.streamed_bytes if share == "50%" else 0)
        assert pinned <= torch.ops.rig.locked_bytes() - before < pinned + accelerator.PAGE
        if closes:
            streamed.close()
            assert torch.ops.rig.locked_bytes() == before
        del streamed
        gc.collect()
        assert torch.ops.rig.locked_bytes() == before


def test_a_device_that_is_dropped_leaves_nothing_registered(late, registering):
    before = torch.ops.rig.locked_bytes()
    device = registering("rig")
    memory = [device.allocate_host(nbytes) for nbytes in (1, 5000, 2 * HUGE_PAGE)]
    assert [one.data_ptr() % accelerator.PAGE for one in memory] == [0, 0, 0]
    assert [one.is_pinned() for one in memory] == [True, True, True]  # or no graph could copy from it
    assert "hg" in flags_at(memory[2].data_ptr() + HUGE_PAGE)
    ranges = sorted((one.untyped_storage().data_ptr(), one.data_ptr() + len(one)) for one in memory)
    assert torch.ops.rig.locked_bytes() - before == sum(stop - start for start, stop in ranges)
    pages = [(start // accelerator.PAGE, (stop - 1) // accelerator.PAGE) for start, stop in ranges]
    assert all(first[1] < second[0] for first, second in pairwise(pages))  # none is registered twice
    device.free_host(memory[1])
    assert [one.is_pinned() for one in memory] == [True, False, True]
    del device
    gc.collect()
    assert torch.ops.rig.locked_bytes() == before


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostUnregister"])
def test_an_interrupt_at_a_call_leaves_nothing_registered(late, registering, monkeypatch, call, behind):
    before, device, whole = torch.ops.rig.locked_bytes(), registering("rig"), getattr(Runtime, call)
    kept = device.allocate_host(5000)

    def interrupted(*args):
        monkeypatch.setattr(Runtime, call, whole)
        if behind:  # what the call has returned is lost
            whole(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runtime, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.free_host(device.allocate_host(9000))
    assert kept.is_pinned()
    device.close()
    assert torch.ops.rig.locked_bytes() == before
    assert len(Runtime.unknown) == ((call == "cudaHostUnregister") == behind)
    Runtime.unknown.clear()


def test_memory_is_registered_on_the_device_it_is_for_by_pages_of_the_system(late, registering, monkeypatch):
    monkeypatch.setattr(accelerator, "PAGE", 1 << 16)
    for name in ("rig:1", "rig:0", "rig"):
        device = registering(name)
        assert device.allocate_host(5000).data_ptr() % (1 << 16) == 0
        device.close()
    assert Runtime.devices == [1, 0, 0]
    memory = [AcceleratorDevice("rig").allocate_host(5000) for _ in range(8)]
    assert {one.data_ptr() % (1 << 16) for one in memory} == {0}
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)  # as on many machines that are no x86
    assert runpy.run_path(str(accelerator.__file__))["PAGE"] == 1 << 16


def test_memory_of_a_load_that_fails_stays_until_its_copies_have_run(order, registering, monkeypatch):
    device, copies, second = registering("rig"), list[object](), threading.Event()

    class Breaking(Memory):
        def read_into(self, file, offset, address, nbytes):
            if offset == 8192:
                assert second.wait(20)
                raise penstock.SourceError("the disk is broken")
            super().read_into(file, offset, address, nbytes)

    def copy(*args):
        AcceleratorDevice.copy(device, *args)
        copies.append(args)
        if len(copies) == 2:
            second.set()

    monkeypatch.setattr(device, "copy", copy)
    before = torch.ops.rig.locked_bytes()
    source = Breaking(bytes(12288))
    disk, target = device.open_disk(source), device.allocate(12288, "a test")
    work = [(target, FileRange(at, at + 4096, 0, at, at)) for at in (0, 4096, 8192)]
    with pytest.raises(penstock.SourceError, match="the disk is broken"):
        load_resident(device, disk, device.allocate_host(8192), work)
    device.close()
    torch.accelerator.synchronize()  # raises if memory was unregistered under a copy
    assert (len(copies), torch.ops.rig.locked_bytes()) == (2, before)


def test_memory_that_cannot_be_locked_is_refused_unless_asked_for(program, order, registering, monkeypatch):
    before = torch.ops.rig.locked_bytes()  # torch's allocator keeps the pages that it locked for others
    monkeypatch.setattr(Runtime, "refuses", 2)
    with pytest.raises(penstock.StreamError, match=r"page-locked \(CUDA error 2\): .* \(page_lock=False\)"):
        load(program, "50%", registering("rig"))
    values = VALUES.to("rig")
    with torch.no_grad(), load(program, "100%", AcceleratorDevice("rig")) as resident:
        expected = resident(values)
        for share in ("50%", "70%"):
            with load(program, share, registering("rig", page_lock=False)) as streamed:
                outputs = [streamed(values) for _ in range(3)]
                assert all(torch.equal(output, expected) for output in outputs)
                assert (streamed.stats.misses, torch.ops.rig.locked_bytes()) == (0, before)
                assert machine.blocked()["a pageable copy to the device"] > 3


def test_a_thread_copies_from_ordinary_memory_and_the_host_goes_on(program, order):
    device = AcceleratorDevice("rig", page_lock=False)
    with torch.no_grad(), load(program, "50%", device) as streamed:
        inner = streamed._weights.streamer
        streamed(VALUES.to("rig"))
        device.finish()
        gate, opened, current = threading.Event(), list[bool](), list[torch.Stream]()
        inner._copies.run(lambda: opened.append(gate.wait(20)))
        inner._copies.run(lambda: current.append(torch.accelerator.current_stream()))
        blocked, moved, before = machine.blocked(), inner.counters.bytes_moved, torch.Event("rig")
        first = inner.probed(0)[0]
        inner.begin(0)
        inner.acquire(0, first)
        inner.release(0, first)
        before.record()
        assert inner.counters.bytes_moved > moved  # a copy is enqueued, behind the gate
        assert not device.query(device.record(inner._copies))
        assert (machine.blocked(), opened) == (blocked, [])
        inner.abort()
        gate.set()
        device.finish()
        assert (opened, current) == ([True], [inner._copies._stream])
        assert machine.blocked()["a pageable copy to the device"] > blocked["a pageable copy to the device"]


def test_an_error_of_a_copying_thread_reaches_who_waits_for_it(late, monkeypatch):
    device = AcceleratorDevice("rig", page_lock=False)
    copies, other = device.open_stream("copies"), device.open_stream("others")
    target, source = device.allocate(4, "a test"), device.allocate_host(8)
    seen = list[bool]()
    copies.run(lambda: seen.append(device.in_reader))
    device.synchronize(device.record(copies))
    assert (seen, device.in_reader) == ([True], False)
    device.copy(copies, target, [Move(source, 0, 0, 8)], "too long")
    event = device.record(copies)
    device.wait(other, event)
    for call in (device.synchronize, lambda one: device.wait(device.current_stream(), one)):
        with pytest.raises(RuntimeError, match="must match the existing size"):
            call(event)
    assert device.query(event)
    copies.run(lambda: seen.append(False))
    with pytest.raises(RuntimeError, match="must match the existing size"):
        device.synchronize(device.record(other))
    for again in (
        lambda: device.wait(copies, device.record(device.current_stream())),
        lambda: device.copy(copies, target, [Move(source, 0, 0, 4)], "another"),
    ):
        with pytest.raises(penstock.StreamError, match=r"rig:0 is lost \(.*: close the module and load it"):
            again()
    device.close()
    device.close()
    assert seen == [True]


def test_a_capture_gives_a_copying_thread_nothing_of_its_own(program, late, monkeypatch):
    """An event of a capture that the thread waits for after it, or in it, would be an error for ever."""
    values, given = VALUES.to("rig"), list[object]()
    device = AcceleratorDevice("rig", page_lock=False)
    plan = program.plan("50%", device="rig", hardware="h200", wrap="barrier")
    with torch.no_grad(), load_module(program, plan, LoadRequest(device="rig"), device=device) as streamed:
        expected = streamed(values)
        with monkeypatch.context() as patched:
            patched.setattr(AcceleratorDevice, "capturing", True)
            patched.setattr(PageableStream, "run", lambda stream, work: given.append(work))
            with pytest.raises(penstock.StreamError, match="a graph cannot copy from ordinary memory"):
                streamed(values)
        assert given == []
        assert torch.equal(streamed(values), expected)


def test_a_device_is_closed_whatever_its_thread_has_raised(late):
    before = threading.active_count()
    device = AcceleratorDevice("rig", page_lock=False)

    def fail():
        raise MemoryError

    device.open_stream("copies").run(fail)
    device.close()
    assert threading.active_count() == before


def test_a_forked_child_waits_for_no_thread(late, monkeypatch):
    device, waited = AcceleratorDevice("rig", page_lock=False), list[object]()
    device.open_stream("copies")
    with monkeypatch.context() as patched:
        patched.setattr(device, "_process", -1)  # as a child sees it, which has no thread that could answer
        patched.setattr(PageableStream, "synchronize", waited.append)
        device.finish()
        device.close()
    assert waited == []
    device.close()


def test_closing_a_device_ends_its_copies_before_their_memory_and_its_threads(late, registering):
    before = threading.active_count()
    for page_lock in (True, False):
        device = registering("rig", page_lock=page_lock)
        copies, target = device.open_stream("copies"), device.allocate(64, "a test")
        source = Memory(bytes(range(64)))
        disk, memory = device.open_disk(source), device.allocate_host(64)
        device.read(disk, memory, [FileRead(0, 0, 0, 64)], "a read")
        device.wait(copies, device.record(disk))
        device.copy(copies, target, [Move(memory, 0, 0, 64)], "a copy")
        device.close()
        torch.accelerator.synchronize()  # raises if memory was unregistered under a copy
        assert target.tolist() == list(range(64))
        assert threading.active_count() == before


def test_weights_lie_as_the_allocator_aligns_wherever_files_have_them(tmp_path, late):
    module = nn.Sequential(nn.Linear(150, 130), nn.Linear(130, 170), nn.Linear(170, 150)).requires_grad_(
        False
    )
    values = torch.randn(2, 150)
    save_file({name: one.clone() for name, one in module.state_dict().items()}, tmp_path / "w.safetensors")
    exported, files = export(module, (values,)), [tmp_path / "w.safetensors"]
    program = penstock.compile(exported, tmp_path / "m.penstock", weights=files, pack=False)
    expected = module.to("rig")(values.to("rig"))
    for share in ("70%", "100%"):
        with torch.no_grad(), load(program, share, AcceleratorDevice("rig")) as streamed:
            assert {one.data_ptr() % 512 for one in streamed._weights.tensors.values()} == {0}
            assert torch.equal(streamed(values.to("rig")), expected)


def test_memory_of_a_closed_module_is_the_devices_again(program, order):
    gc.collect()  # what other tests have left
    torch.accelerator.empty_cache()
    reserved = torch.accelerator.memory_reserved()
    for _ in range(3):
        with load(program, "50%", AcceleratorDevice("rig")) as streamed:
            assert torch.accelerator.memory_reserved() > reserved + streamed.plan.arena_bytes // 2
        assert torch.accelerator.memory_reserved() == reserved


def test_large_copies_are_cut_and_bring_the_same(program, order, monkeypatch):
    host, there = torch.arange(250, dtype=torch.uint8), torch.zeros(300, dtype=torch.uint8, device="rig")
    torch.accelerator.synchronize()  # zeros are written on another stream than copies
    monkeypatch.setattr(accelerator, "COPY_PIECE", 64)
    pairs = accelerator._views(there, [Move(host, 3, 50, 200)])
    assert [(held.storage_offset(), into.storage_offset(), held.numel()) for into, held in pairs] == [
        (3, 50, 64),
        (67, 114, 64),
        (131, 178, 64),
        (195, 242, 8),
    ]
    device = AcceleratorDevice("rig")
    copies = device.open_stream("copies")
    source = device.allocate_host(250)
    source.copy_(host)
    back = device.allocate_host(300).zero_()
    before = machine.blocked()
    device.copy(copies, there, [Move(source, 3, 50, 200)], "a copy")
    device.copy_out(copies, there, [Move(back, 50, 50, 200)], "a copy back")
    assert machine.blocked() == before
    device.synchronize(device.record(copies))
    assert back.tolist() == [0] * 50 + list(range(3, 203)) + [0] * 50
    device.close()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("rig is out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_running_out_of_memory_is_understood_in_all_words(program, late, monkeypatch, error):
    failures = iter((error, RuntimeError("an illegal memory access")))

    def fail(*args):
        raise next(failures)

    monkeypatch.setattr(streamer.DeviceStreamer, "acquire", fail)
    with torch.no_grad(), load(program, "50%", AcceleratorDevice("rig")) as streamed:
        values = VALUES.to("rig")
        with pytest.raises(penstock.StreamError, match="the device is out of memory in a pass"):
            streamed(values)
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            streamed(values)


def test_an_arena_that_does_not_fit_is_refused_by_its_size(program, tmp_path):
    with (
        machine.ordered("late", memory=8192),
        pytest.raises(
            penstock.StreamError, match=r"rig:0 is out of memory: .* for the arena do not fit into"
        ),
    ):
        load(program, "50%", AcceleratorDevice("rig"))
