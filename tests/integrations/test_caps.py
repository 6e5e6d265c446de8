"""What counts against a cap, and capped models in a memory cgroup of their libraries, the cap and 64 MiB."""

from collections import Counter

import pytest
import torch
from torch import nn

from benchmarks.calls import capped
from examples.demo.cgroup import make_group
from penstock.integrations import apply, cap
from penstock.integrations.called import measuring
from penstock.integrations.cap import Cap
from penstock.schedule.facts.errors import BudgetError
from tests.hunt import sampled

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
    one.leave(BESIDE + 10 * MIB)
    assert (one.own, one.spare) == (12 * MIB, one.kernels)  # in multiples of 4 MiB
    held[0] += 500 * MIB  # of the user's
    one.begin(0)
    assert one.own == 12 * MIB
    held[0] -= 500 * MIB + BESIDE + 4 * MIB  # most of what was left has gone, and a cache of 2 MiB has come
    one.begin(2 * MIB)
    assert (one.own, one.spare) == (0, 64 * MIB - 4 * MIB)


def test_what_kernels_take_is_missing_in_the_next_plan(tmp_path, monkeypatch):
    made = [0]
    monkeypatch.setattr(cap, "made_code_bytes", lambda: made[0])
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    with torch.no_grad(), apply(model, "20MB", cache=tmp_path) as applied:
        (part,) = applied.components.values()
        model(torch.ones(1, 1024))
        model[0].register_forward_hook(lambda *_: made.append(made.pop() + 54 * MIB))
        before, after, last = ((model(torch.ones(1, 1024)), part.plan.budget)[1] for _ in range(3))
    assert before - 4_000_000 == after == last


def test_what_a_step_took_counts_where_free_pages_went_back_since(tmp_path, monkeypatch):
    """The step before the refused one had used those pages: the next may take as many again."""
    sizes = Counter()

    def look():
        before = sizes.copy()
        sizes["VmHWM"] = sizes["VmRSS"]
        return before

    class Leaves(nn.Linear):
        def forward(self, x):
            sizes["VmHWM"] = sizes["VmRSS"] = 80 * MIB
            return super().forward(x)

    monkeypatch.setattr(measuring, "_resident_sizes", look)
    monkeypatch.setattr(cap, "give_back_free", lambda: sizes.__setitem__("VmRSS", 0))
    model = nn.Sequential(Leaves(8, 64), nn.Linear(64, 64))
    refused = pytest.raises(BudgetError, match=r"the call takes 16\.00 MiB beside weights")
    with torch.no_grad(), apply(model, "1MB", cache=tmp_path), refused:
        model(torch.ones(1, 8))


CASES = [
    *[("t5", "apply"), ("lora", "load"), ("llama", "load"), ("pipeline", "load"), ("lora", "apply")],
    ("experts", "load"),
]
"""So that the sample has both ways and both libraries."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Bytes that a process holds which imports the libraries and does nothing."""
    with make_group(1 << 20) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
    return int(capped.run_apart("", "bare", tmp_path_factory.mktemp("bare")))


@pytest.mark.nightly
@pytest.mark.random
@pytest.mark.parametrize(("kind", "way"), sampled(CASES, 3))
def test_nothing_is_killed_and_the_outputs_are_those_of_the_model_in_memory(bare, tmp_path, kind, way):
    expected = capped.outputs_of(kind, capped.MAKERS[kind](tmp_path))
    lived = capped.run_capped(kind, way, tmp_path, bare)
    assert lived is not None
    assert lived.outputs == expected
    assert lived.peak_bytes <= bare + capped.CAP + capped.SLACK


@pytest.mark.nightly
def test_a_process_that_takes_more_is_killed(bare, tmp_path):
    capped.make_llama(tmp_path)
    with pytest.raises(capped.StreamError, match="the process ended with -9: killed by the kernel"):
        capped.run_capped("llama", "load", tmp_path, bare - capped.CAP - capped.SLACK - (100 << 20))
