"""Host memory that a device copies from: huge pages, the node of its first touch, and why not, in the log."""

import errno
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.runtime.device.accelerator import AcceleratorDevice
from penstock.runtime.system import first_touch, memory
from penstock.runtime.system.memory import HUGE_PAGE, PAGE
from penstock.schedule.facts.errors import StreamError
from tests.rig import machine
from tests.runtime.system.page_tables import flags_at, mapped_pages

NBYTES = 4 * HUGE_PAGE + 123
CPU = max(os.sched_getaffinity(0))
"""The one CPU of node 1, beside which the device is."""


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """A system of two nodes and one that is a GPU's memory, with the rig beside node 1."""
    others = os.sched_getaffinity(0) - {CPU} or {CPU + 1}
    nodes = tmp_path / "devices" / "system" / "node"
    for node, cpus in enumerate((",".join(map(str, others)), f"{CPU}-{CPU},{1 << 16}-{(1 << 16) + 3}", "")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(cpus + "\n")
    (device := tmp_path / "bus" / "pci" / "devices" / "0001:3b:0a.0").mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (huge := tmp_path / "kernel" / "mm" / "transparent_hugepage").mkdir(parents=True)
    (huge / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(first_touch, "SYSFS", tmp_path)
    return tmp_path


@pytest.fixture
def said():
    """Levels and messages of what is logged."""
    lines, handler, logger = list[str](), logging.Handler(), logging.getLogger("penstock")
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setattr(memory, "_SLOW", 0)  # however slow this machine is, it asks for huge pages
    with machine.ordered("late"):
        told = SimpleNamespace(name="rig", pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=10)
        module = torch.get_device_module("rig")
        monkeypatch.setattr(module, "get_device_properties", lambda device: told, raising=False)
        device = AcceleratorDevice("rig", page_lock=False)
        yield device
        device.close()


@pytest.fixture
def touched(monkeypatch):
    """Bytes and CPUs of whoever touches memory first."""
    populate, seen = memory._populate, list[tuple[int, set[int]]]()

    def touch(address, nbytes):
        seen.append((nbytes, os.sched_getaffinity(0)))
        populate(address, nbytes)

    monkeypatch.setattr(memory, "_populate", touch)
    return seen


def test_all_pages_are_there_and_huge_ones_are_asked_for(rig):
    host = rig.allocate_host(NBYTES)
    assert all(mapped_pages(host.data_ptr(), NBYTES + -NBYTES % PAGE))
    for byte in (0, NBYTES // 2, NBYTES - 1):
        assert "hg" in flags_at(host.data_ptr() + byte)
    assert host.fill_(7).unique().tolist() == [7]


def test_the_first_touch_is_on_the_node_of_the_device(sysfs, rig, touched, said):
    before, threads = os.sched_getaffinity(0), threading.active_count()
    rig.allocate_host(NBYTES)
    assert {frozenset(cpus) for _, cpus in touched} == {frozenset({CPU})}
    assert sum(nbytes for nbytes, _ in touched) == NBYTES + -NBYTES % PAGE
    assert (os.sched_getaffinity(0), threading.active_count()) == (before, threads)
    assert "NUMA" not in str(said)


def test_threads_run_where_they_did_after_an_error(sysfs, rig, monkeypatch):
    def fail(address, nbytes):
        assert os.sched_getaffinity(0) == {CPU}
        raise StreamError("there is no memory")

    monkeypatch.setattr(memory, "_populate", fail)
    before, threads = os.sched_getaffinity(0), threading.active_count()
    with pytest.raises(StreamError, match="there is no memory"):
        rig.allocate_host(NBYTES)
    assert (os.sched_getaffinity(0), threading.active_count()) == (before, threads)


def test_nothing_is_done_or_said_where_there_is_one_node(sysfs, rig, touched, said):
    (sysfs / "devices" / "system" / "node" / "node0" / "cpulist").write_text("\n")
    rig.allocate_host(NBYTES)
    assert {frozenset(cpus) for _, cpus in touched} == {frozenset(os.sched_getaffinity(0))}
    assert "NUMA" not in str(said)


def node_is(text):
    """Has the system tell another node of the device."""
    return lambda sysfs, patch: next(sysfs.glob("bus/pci/devices/*/numa_node")).write_text(text)


def is_elsewhere(sysfs, patch):
    """Keep this process off the CPUs of node 1."""
    patch.setattr(os, "sched_getaffinity", lambda process: {CPU + 1})


def refuse_cpus(sysfs, patch):
    def refuse(process, cpus):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    patch.setattr(os, "sched_setaffinity", refuse)


def hide_address(sysfs, patch):
    patch.setattr(torch.get_device_module("rig"), "get_device_properties", lambda device: None)


def refuse_huge_pages(sysfs, patch):
    advise = memory.advise

    def refuse(address, nbytes, advice):
        if advice == memory.MADV_HUGEPAGE:
            raise OSError(errno.EINVAL, "Invalid argument")
        advise(address, nbytes, advice)

    patch.setattr(memory, "advise", refuse)


FAR, SMALL = "may lie on any NUMA node: ", "are not all in huge pages: "

REASONS = {
    FAR + "the PCI address of the device is not known": hide_address,
    FAR + "/sys/bus/pci/devices/0001:3b:0a.0/numa_node names node -1, which has no CPUs": node_is("-1\n"),
    FAR + "/sys/bus/pci/devices/0001:3b:0a.0/numa_node names node 2, which has no CPUs": node_is("2\n"),
    FAR + "/sys/bus/pci/devices/0001:3b:0a.0/numa_node does not tell the node of the device": node_is(""),
    FAR + "this process may run on no CPU of the device's node 1": is_elsewhere,
    FAR + "no thread may choose its CPUs (Operation not permitted)": refuse_cpus,
    SMALL + "madvise refuses them (Invalid argument)": refuse_huge_pages,
    SMALL + "4 in a row came slower than 1 GB/s": lambda sysfs, patch: patch.setattr(memory, "_SLOW", 1e18),
    SMALL + "/sys/kernel/mm/transparent_hugepage/enabled is set to never": lambda sysfs, patch: (
        sysfs / "kernel" / "mm" / "transparent_hugepage" / "enabled"
    ).write_text("always madvise [never]\n"),
    SMALL + "the system had 2.00 MiB in huge pages": lambda sysfs, patch: patch.setattr(
        first_touch, "resident_bytes", lambda start, stop, huge: HUGE_PAGE
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_log_says_what_could_not_be_done_and_why(sysfs, rig, monkeypatch, said, reason):
    with monkeypatch.context() as patch:
        REASONS[reason](sysfs, patch)
        host = rig.allocate_host(NBYTES)
    begins = f"INFO 8.00 MiB of host memory for rig:0 {reason}"
    assert any(line.replace(str(sysfs), "/sys").startswith(begins) for line in said)
    assert host.fill_(7).unique().tolist() == [7]


def test_the_log_says_that_another_allocator_takes_the_memory(rig, said):
    AcceleratorDevice("rig").allocate_host(HUGE_PAGE - 1)
    assert said == []
    AcceleratorDevice("rig").allocate_host(HUGE_PAGE)
    assert said[0].startswith(
        "INFO 2.00 MiB of host memory for rig:0 are on the NUMA node and in the pages that"
    )


def test_memory_smaller_than_a_huge_page_is_nothing_to_speak_of(rig, monkeypatch, said):
    refuse_huge_pages(Path(), monkeypatch)
    assert rig.allocate_host(5000).fill_(7).unique().tolist() == [7]
    assert said == []
