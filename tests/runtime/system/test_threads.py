"""Threads that wait for the next kernel leave the processor to those that read weights."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.runtime.system import threads as system_threads
from penstock.runtime.system.threads import ParkedTeam

WAITING = """
import time
import torch
from penstock.runtime.system.threads import ParkedTeam

def waiting():
    "Processor seconds of a hundred kernels, with pauses in which there is nothing to do."
    values = torch.ones(1 << 17)
    began = time.process_time()
    for _ in range(100):
        values.add_(1)
        time.sleep(0.005)
    return time.process_time() - began

waiting()
spinning = waiting()
team = ParkedTeam()
parked = waiting()
team.wake()
print(spinning, parked, waiting(), "libgomp" in open("/proc/self/maps").read())
"""


def threads():
    return {path.name for path in Path("/proc/self/task").iterdir()}


def ended(before):
    """Whether all threads but those `before` end, which those of a team do by themselves."""
    for _ in range(1000):
        if threads() <= before:
            return True
        time.sleep(0.005)
    return False


def test_a_team_wakes_and_is_parked_again():
    torch.ones(1 << 20).add_(1)
    before = threads()
    team = ParkedTeam()
    for _ in range(2):
        team.wake()
        team.wake()
        assert ended(before)
        team.park()
        team.park()
        assert len(threads() - before) <= torch.get_num_threads()
        assert bool(threads() - before) == (torch.get_num_threads() > 1)
    team.wake()
    assert ended(before)


class Interrupted(threading.Event):
    """An event in whose wait the main thread is interrupted."""

    def wait(self, timeout=None):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return super().wait(timeout)


def test_a_team_is_parked_again_after_an_interrupt(monkeypatch):
    torch.ones(1 << 20).add_(1)
    before = threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    team = ParkedTeam()
    team.wake()
    with monkeypatch.context() as patch:
        patch.setattr(
            system_threads, "threading", SimpleNamespace(Event=Interrupted, Thread=threading.Thread)
        )
        with pytest.raises(KeyboardInterrupt):
            team.park()
    assert ended(before)
    team.park()
    assert threads() - before
    team.wake()
    assert ended(before)


def test_one_thread_needs_no_team(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    before = threads()
    ParkedTeam().wake()
    assert ended(before)


def test_a_team_that_has_no_memory_is_done_without(monkeypatch):
    def refuse(_):
        raise RuntimeError("not enough memory")

    before = threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "ones", refuse)
    ParkedTeam().wake()
    assert ended(before)


def test_threads_that_wait_give_up_the_processor():
    cores = len(os.sched_getaffinity(0))
    variables = {name: value for name, value in os.environ.items() if "OMP" not in name}
    done = subprocess.run(
        [sys.executable, "-c", WAITING],
        env=variables | {"OMP_NUM_THREADS": str(cores)},
        capture_output=True,
        text=True,
        check=True,
    )
    *seconds, of_gnu = done.stdout.split()
    spinning, parked, after = map(float, seconds)
    if cores > 1 and of_gnu == "True":
        assert parked < spinning / 2
        assert parked < after / 2
    else:
        assert parked < 2 * spinning + 0.1
