"""The gate of a module: one call at a time, of one thread, in one process."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.runtime.stream.loaded import Gate
from penstock.schedule.facts.errors import StreamError

SECONDS = 20
"""How long to wait for what should refuse at once."""


@pytest.fixture
def gate():
    return Gate("a program", "load it")


@pytest.fixture
def other():
    """Another thread."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


def enter(way):
    """What is said to somebody who comes by a way through the gate."""
    try:
        with way:
            return "admitted"
    except StreamError as error:
        return str(error)


def test_another_thread_is_refused_while_a_call_runs_and_admitted_after_it(gate, other):
    with gate.call():
        called = other.submit(enter, gate.call()).result(SECONDS)
        closed = other.submit(enter, gate.closing()).result(SECONDS)
    assert called == "another thread is running this module: load it once per thread"
    assert closed == "the module cannot be closed while a call runs in it: wait for that call"
    assert other.submit(enter, gate.call()).result(SECONDS) == "admitted"
    assert other.submit(enter, gate.closing()).result(SECONDS) == "admitted"


def test_another_thread_is_refused_while_the_module_is_closed(gate, other):
    with gate.closing():
        assert "once per thread" in other.submit(enter, gate.call()).result(SECONDS)


def test_a_call_within_a_call_is_refused(gate):
    with gate.call():
        for way, done in ((gate.call(), "called"), (gate.closing(), "closed")):
            assert enter(way) == f"the module cannot be {done} while a call runs in it: wait for that call"
    assert enter(gate.call()) == enter(gate.closing()) == "admitted"


def test_a_change_waits_for_the_call_of_another_thread(gate, other):
    with gate.call():
        changed = other.submit(enter, gate.changing())
        assert not changed.done()
    assert changed.result(SECONDS) == "admitted"


def test_a_forked_child_may_only_close(gate):
    with gate.call():  # as a thread of the parent may, of which the child has nothing
        child = os.fork()
        if not child:
            said = enter(gate.call())
            right = said == "a forked child cannot run a program: load it in the child"
            os._exit(0 if right and enter(gate.closing()) == "admitted" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
