"""The rig itself: what it runs late, what it refuses, and what it takes away."""

import pytest
import torch

from tests.rig import machine


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
