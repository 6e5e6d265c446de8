"""The rig itself: what it runs late, what it refuses, and what it takes away."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.rig import building, machine


def test_the_host_cannot_touch_the_memory_of_the_device(late):
    there, here = torch.zeros(64, device="rig"), torch.zeros(64)
    assert machine.readable(here.data_ptr())
    assert not machine.readable(there.data_ptr())
    assert not machine.readable(there.data_ptr() + 255)
    torch.accelerator.synchronize()
    assert not machine.readable(there.data_ptr())


def test_kernels_run_when_they_are_waited_for(late):
    source = torch.ones(8).pin_memory()
    there = torch.empty(8, device="rig")
    there.copy_(source, non_blocking=True)
    doubled = there * 2
    source.fill_(3)  # too early: the copy has not run
    event = torch.Event("rig")
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert doubled.tolist() == [6] * 8
    assert machine.blocked() == {"an event": 1, "a pageable copy to the host": 1}


def test_what_streams_do_is_not_ordered_unless_the_program_says(late):
    one, other = torch.Stream("rig"), torch.Stream("rig")
    found = {}
    for waits in (False, True):
        there = torch.zeros(8, device="rig")
        torch.accelerator.synchronize()
        with one:
            there.fill_(5)
        if waits:
            other.wait_stream(one)
        with other:
            found[waits] = there.clone()
        other.synchronize()
    with other:
        assert found[False].tolist() == [0] * 8
        assert found[True].tolist() == [5] * 8


def test_a_wait_for_an_event_that_was_never_recorded_does_nothing(order):
    stream = torch.Stream("rig")
    stream.wait_event(torch.Event("rig"))
    with stream:
        assert torch.ones(2, device="rig").tolist() == [1, 1]


def test_memory_that_is_freed_is_overwritten_on_its_stream_and_given_out_again(late):
    stream = torch.Stream("rig")
    there = torch.ones(1000, device="rig")
    torch.accelerator.synchronize()
    address = there.data_ptr()
    with stream:
        kept = there.clone()
    del there  # while the clone has not run
    again = torch.empty(1000, device="rig")
    assert again.data_ptr() == address
    assert again.isnan().all()
    with stream:
        assert kept.isnan().all()


def test_memory_that_another_stream_uses_is_kept_until_that_is_done(late):
    stream = torch.Stream("rig")
    there = torch.ones(1000, device="rig")
    stream.wait_stream(torch.accelerator.current_stream())
    address = there.data_ptr()
    with stream:
        kept = there.clone()
    there.record_stream(stream)
    del there
    assert torch.empty(1000, device="rig").data_ptr() != address
    stream.synchronize()
    assert torch.empty(1000, device="rig").data_ptr() == address
    with stream:
        assert kept.eq(1).all()


def test_pageable_copies_block_the_host_behind_their_stream_and_page_locked_ones_do_not(late):
    pageable, locked = torch.ones(8), torch.ones(8).pin_memory()
    assert (pageable.is_pinned(), locked.is_pinned()) == (False, True)
    there = torch.empty(8, device="rig")
    there.copy_(locked, non_blocking=True)
    assert machine.blocked() == {}
    there.copy_(pageable, non_blocking=True)
    assert machine.blocked() == {"a pageable copy to the device": 1}
    locked.copy_(there, non_blocking=True)
    there.copy_(locked)
    assert machine.blocked() == {"a pageable copy to the device": 1, "a copy to the device": 1}


def test_host_memory_that_is_unlocked_under_a_copy_is_an_error(late):
    memory, there = torch.ones(8), torch.empty(8, device="rig")
    before = torch.ops.rig.locked_bytes()
    assert torch.ops.rig.lock(memory.data_ptr(), memory.nbytes)
    assert not torch.ops.rig.lock(memory.data_ptr() + 4, 4)
    assert torch.ops.rig.locked_bytes() == before + 32
    there.copy_(memory, non_blocking=True)
    torch.ops.rig.unlock(memory.data_ptr())
    with pytest.raises(RuntimeError, match="a copy runs after its host memory was unregistered"):
        torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match="device 0 has failed"):  # as every call from then on
        there.fill_(1)
    torch.ops.rig.restart()
    assert there.fill_(1).tolist() == [1] * 8


def test_tensors_of_the_host_are_refused_as_on_a_gpu(late):
    there = torch.ones(3, device="rig")
    assert (there + torch.tensor(1)).tolist() == [2] * 3
    for call in (lambda: there + torch.ones(3), lambda: torch.mm(there[:, None], torch.ones(1, 3))):
        with pytest.raises(
            RuntimeError, match=r"Expected all tensors to be on the same device.*rig:0 and cpu"
        ):
            call()


def test_memory_runs_out_and_what_is_cached_is_given_back_first(late):
    torch.ops.rig.set_memory(torch.accelerator.memory_reserved() + (1 << 20))
    torch.empty(600_000, dtype=torch.uint8, device="rig")
    kept = torch.empty(700_000, dtype=torch.uint8, device="rig")
    assert machine.blocked() == {"emptying the cache": 1}
    with pytest.raises(torch.OutOfMemoryError, match="rig:0 is out of memory: 700000 bytes"):
        torch.empty(700_000, dtype=torch.uint8, device="rig")
    free, total = torch.accelerator.get_memory_info()
    assert total - free == torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated()
    del kept
    torch.empty(700_000, dtype=torch.uint8, device="rig")


def test_devices_and_pooled_streams_are_told_apart(order):
    first, second = torch.arange(6.0, device="rig:0"), torch.arange(6.0, device="rig:1")
    assert (first.device.index, second.device.index) == (0, 1)
    assert torch.equal(first.to("rig:1"), second)
    with pytest.raises(RuntimeError, match=r"two devices|same device"):
        first.add_(second)
    pooled = [torch.Stream("rig").stream_id for _ in range(33)]
    assert len(set(pooled)) == 32  # the 33rd is a stream that somebody has already
    assert not set(pooled) & {torch.Stream("rig", priority=-1).stream_id for _ in range(32)}


def test_a_model_computes_what_the_cpu_computes(order):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(144, 5))
    values = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = module(values)
        torch.testing.assert_close(module.to("rig")(values.to("rig")).cpu(), expected)
        drawn = [torch.manual_seed(3) and torch.randn(4, device="rig").cpu() for _ in range(2)]
    assert torch.equal(*drawn)


def test_it_is_compiled_once_and_what_does_not_compile_is_an_error(tmp_path, monkeypatch):
    library = building.build()
    built = library.stat()
    assert building.build() == library
    assert library.stat() == built
    for name in building.SOURCES:
        (tmp_path / name).write_text("#error broken\n")
    monkeypatch.setattr(building, "HERE", tmp_path)
    monkeypatch.setattr(building, "BUILT", tmp_path)
    with pytest.raises(RuntimeError, match=r"does not compile:\n.*broken"):
        building.build()
    assert not list(tmp_path.glob("*.so"))

    def missing(*command, **options):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(RuntimeError, match=r"needs g\+\+"):
        building.build()
    assert Path(library).exists()
