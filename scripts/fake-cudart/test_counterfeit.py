"""The counterfeit libcudart keeps the rules of CUDA. `make cuda-dry` runs this, and nothing else does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from penstock.runtime.device.accelerator import CudaDevice
from penstock.runtime.device.protocol import Move
from penstock.schedule.facts.errors import PenstockError
from tests.rig.machine import readable
from tests.rig.rig_runs import DISKS_OF_ORDERS, RigRun
from tests.rig.test_faults_on_the_rig import LATE_ORDERS, ORDERINGS
from tests.runtime.device.device_runs import (
    POLICIES,
    CountError,
    Parts,
    WrongBytesError,
    cases,
    disk_cases,
    totals_of,
)
from tests.runtime.device.simulated.faults import FAULTS
from tests.runtime.device.test_cuda import MANY, load, module, program

__all__ = ["module", "program"]  # fixtures

LIBRARY = ctypes.CDLL("libcudart.so.13")


@contextmanager
def ordered(order: str, seed: int = 0) -> Iterator[None]:
    """Has streams run in an order. At the end all runs, and errors go."""
    LIBRARY.fake_cudart_restart()
    LIBRARY.fake_cudart_set_order(f"{order}:{seed}".encode())
    try:
        yield
    finally:
        LIBRARY.fake_cudart_set_order(b"soon:0")
        LIBRARY.fake_cudart_restart()


def filled(value: int) -> torch.Tensor:
    return torch.full((8,), value, dtype=torch.uint8, device="cuda")


def test_addresses_of_a_device_are_not_the_hosts() -> None:
    there = filled(1)
    assert readable(there.cpu().data_ptr())
    assert not readable(there.data_ptr())


def test_nothing_runs_before_somebody_waits_if_late() -> None:
    device = CudaDevice("cuda")
    copies, there = device.open_stream("copies"), device.allocate(8, "a test")
    source, back = device.allocate_host(8), device.allocate_host(8)
    back.zero_()
    with ordered("late"):
        device.copy(copies, there, [Move(source, 0, 0, 8)], "a copy")
        device.copy_out(copies, there, [Move(back, 0, 0, 8)], "a copy back")
        source.fill_(5)  # before the copy has run
        assert back.tolist() == [0] * 8
        device.synchronize(device.record(copies))
        assert back.tolist() == [5] * 8
    device.close()


def test_no_kernel_computes() -> None:
    with pytest.raises(
        RuntimeError, match=r"the counterfeit libcudart runs no compute kernels: .*CUDAFunctor_add"
    ):
        filled(1) + filled(2)
    assert filled(3).tolist() == [3] * 8


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
def test_the_host_waits_for_nothing_in_a_pass(program: Any, module: Any, wrap: str) -> None:
    with ordered("late"), load(program, "50%", wrap) as streamed:
        many = MANY.to("cuda")
        streamed.many(many)
        waits = LIBRARY.fake_cudart_waits()
        found = [streamed.many(many) for _ in range(3)]
        assert LIBRARY.fake_cudart_waits() == waits > 0
        assert all(torch.equal(a.cpu(), b) for one in found for a, b in zip(one, module(MANY), strict=True))


def test_all_cases_run_right_in_all_orders() -> None:
    run_everywhere(Parts())


@pytest.mark.parametrize("name", ORDERINGS)
def test_faults_of_order_are_found(name: str) -> None:
    fault = FAULTS[name]
    fault.fired = 0
    with pytest.raises((WrongBytesError, CountError, PenstockError, torch.AcceleratorError)):
        run_everywhere(fault)
    assert fault.fired


def run_everywhere(fault: Parts) -> None:
    for order in LATE_ORDERS:
        behind_hosts = product(disk_cases(), DISKS_OF_ORDERS.get(order[0], (None,)))
        for one, disk in (*product(cases(), (None,)), *behind_hosts):
            with ordered(*order):
                moved = RigRun(one, fault, "cuda", disk=disk, blocked=LIBRARY.fake_cudart_waits).go()
            if one in cases() and moved != totals_of(one, *POLICIES[0]).bytes_moved:
                raise CountError(f"{one.name}: {moved} bytes were moved")


@pytest.mark.parametrize(("order", "last"), [("soon", 2), ("late", 1)])
def test_a_graph_runs_in_any_order_that_it_allows(order: str, last: int) -> None:
    there, graph, other = filled(0), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        mine = torch.cuda.current_stream()
        other.wait_stream(mine)
        there.fill_(1)
        with torch.cuda.stream(other):
            there.fill_(2)
        mine.wait_stream(other)
    with ordered(order):
        graph.replay()
        assert there.tolist() == [last] * 8


def capture(graph: torch.cuda.CUDAGraph, there: torch.Tensor, wrong: Callable[[], None]) -> None:
    with torch.cuda.graph(graph):
        there.fill_(2)
        wrong()


def wait_for_outside(event: torch.cuda.Event) -> None:
    torch.cuda.current_stream().wait_event(event)


def forget_a_stream(event: torch.cuda.Event) -> None:
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.empty(8, device="cuda").fill_(1)


def ask_for_an_event(event: torch.cuda.Event) -> None:
    event.query()


def wait_for_a_device(event: torch.cuda.Event) -> None:
    torch.cuda.synchronize()


def copy_ordinary_memory(event: torch.cuda.Event) -> None:
    torch.zeros(8).to("cuda", non_blocking=True)


@pytest.mark.parametrize(
    "wrong",
    [wait_for_outside, forget_a_stream, ask_for_an_event, wait_for_a_device, copy_ordinary_memory],
)
def test_a_capture_that_breaks_a_rule_fails(wrong: Any) -> None:
    event, graph = torch.cuda.Event(), torch.cuda.CUDAGraph()
    event.record()
    there = filled(1)
    with pytest.raises(RuntimeError):
        capture(graph, there, partial(wrong, event))
    assert there.tolist() == [1] * 8


def test_an_event_of_a_capture_is_no_event_elsewhere() -> None:
    event, graph, there = torch.cuda.Event(), torch.cuda.CUDAGraph(), filled(1)
    with torch.cuda.graph(graph):
        there.fill_(2)
        event.record()
    for ask in (event.query, event.synchronize, event.wait):
        with pytest.raises(RuntimeError, match="an event last recorded in a capturing stream"):
            ask()


def test_a_copy_from_memory_that_is_unregistered_fails_the_device() -> None:
    script = """
import torch
from penstock.runtime.device.accelerator import CudaDevice
from penstock.runtime.device.protocol import Move
device = CudaDevice("cuda")
source, there = device.allocate_host(8), device.allocate(8, "a test")
copies = device.open_stream("copies")
device.copy(copies, there, [Move(source, 0, 0, 8)], "a copy")
device.free_host(source)
try:
    there.tolist()
    copies.synchronize()
except RuntimeError as error:
    print(error)
"""
    late = os.environ | {"FAKE_CUDART_ORDER": "late:0"}
    command = (sys.executable, "-c", script)
    done = subprocess.run(command, capture_output=True, text=True, env=late, check=False)
    assert "a copy runs after its host memory was unregistered" in done.stdout, done
