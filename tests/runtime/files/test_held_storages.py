"""What does not stream arrives while the program is loaded, and is waited for by the first call."""

import gc
import re
import threading
import time

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.runtime.files.source import Source, bytes_at
from penstock.runtime.system.memory import HUGE_PAGE, round_up
from penstock.schedule.facts.errors import SourceError
from tests.forked import run_forked


def test_loading_returns_before_the_weights_are_read_and_the_call_waits_for_them(stack, monkeypatch):
    gate, read = threading.Event(), Source.read_into
    begun = threading.Event()

    def behind_gate(*args):
        begun.set()
        assert gate.wait(60)
        read(*args)

    monkeypatch.setattr(Source, "read_into", behind_gate)
    program = stack.open()
    plan = program.plan("100%", hardware="rtx4090")  # measuring would read
    with program.load(plan=plan) as module:
        assert begun.wait(60)
        threading.Timer(0.2, gate.set).start()
        assert torch.equal(module(stack.tokens), stack.expected)
        assert gate.is_set()


def advised(address):
    """Tells whether the kernel was asked for huge pages at an address."""
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
                within = int(match[1], 16) <= address < int(match[2], 16)
            if within and line.startswith("VmFlags:"):
                return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:x}")


def advised_bytes():
    """Returns for how many bytes the kernel was asked for huge pages; malloc may have kept some of others."""
    total = size = 0
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
                size = int(match[2], 16) - int(match[1], 16)
            if line.startswith("VmFlags:") and "hg" in line.split():
                total += size
    return total


@pytest.mark.parametrize("phase", [0, 40])
def test_large_memory_has_huge_pages_where_whole_ones_lie_in_it(phase):
    memory = bytes_at(phase, 40 << 20)
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert start % 64 == phase
    assert memory.nbytes == 40 << 20
    first, last = round_up(start, HUGE_PAGE), stop // HUGE_PAGE * HUGE_PAGE
    assert [advised(at) for at in (start, first - 1, first, last - 1, last)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    before = advised_bytes()
    small = bytes_at(phase, 8 << 20)  # malloc may keep it for others when it is given back
    assert small.nbytes == 8 << 20
    assert advised_bytes() == before


def test_a_read_that_fails_in_the_background_is_raised_by_every_call(stack, monkeypatch):
    def fail(*args):
        raise SourceError("the disk is gone")

    program = stack.open()
    plan = program.plan("100%", hardware="rtx4090")
    monkeypatch.setattr(Source, "read_into", fail)
    with program.load(plan=plan) as module:
        for _ in range(2):
            with pytest.raises(SourceError, match="the disk is gone"):
                module(stack.tokens)
    with pytest.raises(penstock.StreamError, match="closed"):
        module(stack.tokens)


def test_closing_does_not_wait_for_what_was_not_begun(stack, monkeypatch):
    gate, reads = threading.Event(), []

    def count(*args):
        reads.append(args)
        assert gate.wait(60)

    program = stack.open()
    plan = program.plan("100%", hardware="rtx4090")
    monkeypatch.setattr(Source, "read_into", count)
    module = program.load(plan=plan, options=LoadOptions(readers=1))
    threading.Timer(0.2, gate.set).start()
    module.close()
    assert len(reads) == 1


def test_a_module_that_a_reader_collects_as_garbage_is_closed(stack, monkeypatch):
    gate, done, read = threading.Event(), threading.Event(), Source.read_into

    def collect(*args):
        assert gate.wait(60)
        gc.collect()
        done.set()
        read(*args)

    program = stack.open()
    plan = program.plan("100%", hardware="rtx4090")
    monkeypatch.setattr(Source, "read_into", collect)
    module = program.load(plan=plan, options=LoadOptions(readers=1))
    resources = module._weights.resources
    source = resources.closers[-1].__self__
    module.__dict__["itself"] = [module]
    gc.disable()
    try:
        del module
        gate.set()
        assert done.wait(60)
        deadline = time.monotonic() + 60
        while source.files and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert resources.closed
    assert not source.files


EXIT = """
import os, sys, time, penstock
from penstock.runtime.files.source import Source

def read(*_):
    os.write(2, b".")
    time.sleep(1)

program = penstock.open(sys.argv[1])
plan = program.plan("100%", hardware="rtx4090")
Source.read_into = read
module = program.load(plan=plan, options=penstock.LoadOptions(readers=1))
print(len(module._weights.wait.__self__._left), flush=True)
"""
"""Loads with reads of a second each; prints how many are left as it ends, and a dot for each that begins."""


def test_a_program_that_ends_does_not_wait_for_what_was_not_begun(stack):
    done = run_forked(EXIT, stack.path)
    assert done.status == 0, done.err
    assert int(done.out) >= 5
    assert done.err.count(".") < int(done.out)
