"""What counts against a cap: what penstock's own work leaves in memory is a part of it."""

import pytest

from penstock.integrations import cap
from penstock.integrations.cap import Cap

MIB = 1 << 20
BESIDE = 36 * MIB
"""What does not count with a cap of 100 MiB."""


@pytest.fixture
def held(monkeypatch):
    """The memory that the process would hold, to be set; what it says that is in it is never given back."""
    memory = [100 * MIB]
    monkeypatch.setattr(cap, "anonymous_bytes", lambda: memory[0])
    monkeypatch.setattr(cap, "give_back_unused", lambda: None)
    return memory


def test_what_work_leaves_beyond_the_code_counts(held):
    one = Cap(100 * MIB)
    with one.working():
        held[0] += BESIDE
    assert (one.own, one.room) == (0, 100 * MIB)
    held[0] += 500 * MIB  # of the user's
    with one.working(), one.working():
        held[0] += 1
    assert (one.own, one.room) == (1, 100 * MIB - 1)
    with one.working():
        held[0] -= 10 * MIB
    assert one.own == 0


def test_a_small_cap_leaves_more_to_code_because_kernels_need_less():
    assert [Cap(n * MIB).beside // MIB for n in (0, 100, 200, 10_000)] == [56, 36, 16, 16]


def test_garbage_is_given_back_before_it_counts(held, monkeypatch):
    monkeypatch.setattr(cap, "give_back_unused", lambda: held.__setitem__(0, held[0] - 60 * MIB))
    one = Cap(100 * MIB)
    with one.working():
        held[0] += BESIDE + 60 * MIB
    assert one.own == 0


def test_what_is_left_in_a_failure_counts(held):
    one = Cap(100 * MIB)

    @one.working()
    def fail():
        held[0] += BESIDE + 20 * MIB
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert (one.own, one.room) == (20 * MIB, 80 * MIB)


def test_the_memory_of_a_gpu_is_elsewhere(held):
    one = Cap(10 * MIB, counts_own=False)
    with one.working():
        held[0] += 1 << 30
    assert one.own == 0


def test_what_calls_leave_counts_as_long_as_the_process_has_it(held, monkeypatch):
    monkeypatch.setattr(cap, "give_back_free", lambda: None)
    one = Cap(100 * MIB)
    one.begin(0)
    held[0] += BESIDE + 10 * MIB
    one.leave(lambda: BESIDE + 10 * MIB)
    assert (one.own, one.spare) == (12 * MIB, one.kernels)  # in multiples of 4 MiB
    held[0] += 500 * MIB  # of the user's
    one.begin(0)
    assert one.own == 12 * MIB
    held[0] -= 500 * MIB + BESIDE + 4 * MIB  # most of what was left has gone, and a cache of 2 MiB has come
    one.begin(2 * MIB)
    assert (one.own, one.spare) == (0, 64 * MIB - 4 * MIB)
