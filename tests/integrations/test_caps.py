"""What counts against a cap: what penstock's own work leaves in memory is a part of it."""

from __future__ import annotations

import pytest
import torch

from penstock.integrations import apply, cap
from penstock.integrations.cap import STEP, Cap
from penstock.runtime.system.memory import round_up
from penstock.schedule.facts.errors import BudgetError

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


def test_what_work_leaves_beyond_the_code_counts_in_steps(held):
    one = Cap(100 * MIB)
    with one.working():
        held[0] += BESIDE
    assert (one.own, one.room) == (0, 100 * MIB)
    held[0] += 500 * MIB  # of the user's
    with one.working(), one.working():
        held[0] += 1
    assert (one.own, one.room) == (STEP, 100 * MIB - STEP)
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
    assert (one.own, one.room) == (24 * MIB, 76 * MIB)


def test_the_memory_of_a_gpu_is_elsewhere(held):
    one = Cap(10 * MIB, counts_own=False)
    with one.working():
        held[0] += 1 << 30
    assert one.own == 0


def test_a_cap_that_what_was_exported_fills_is_refused_in_words(held, tmp_path, monkeypatch):
    from penstock.integrations import streamed

    export = streamed.export_call

    def leaving(*given):
        held[0] += BESIDE + 140 * MIB
        return export(*given)

    monkeypatch.setattr(streamed, "export_call", leaving)
    model, ids = torch.nn.Linear(64, 64), torch.ones(1, 64)
    words = "does not run in 100.00 MiB: 144.00 MiB are in use by what penstock exported and planned"
    with pytest.raises(BudgetError, match=words) as caught:
        apply(model, 100 * MIB, example=ids, cache=tmp_path)
    assert 144 * MIB < caught.value.floor_bytes < 145 * MIB
    with apply(model, caught.value.floor_bytes + 2 * STEP, example=ids, cache=tmp_path / "other") as applied:
        model(ids)
        assert applied.cap.own == round_up(BESIDE + 140 * MIB - applied.cap.beside, STEP)


def test_the_next_process_finds_the_plan_for_the_memory_that_exporting_took_here(held, tmp_path, monkeypatch):
    from penstock.integrations import streamed
    from penstock.runtime import choice

    export, plan = streamed.export_call, choice.make_plan
    budgets = []

    def leaving(*given):
        held[0] += BESIDE + 20 * MIB
        return export(*given)

    monkeypatch.setattr(streamed, "export_call", leaving)
    monkeypatch.setattr(
        choice, "make_plan", lambda *given, **named: budgets.append(given[1]) or plan(*given, **named)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "plans"))
    for room in (76 * MIB, 100 * MIB):
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8)))
        torch.manual_seed(0)
        for layer in model:
            torch.nn.init.normal_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        with apply(
            model.requires_grad_(False), 100 * MIB, example=torch.ones(1, 2048), cache=tmp_path
        ) as applied:
            assert applied.cap.room == room
        low, high = budgets  # both of the first process
        assert high == low + 24 * MIB


def test_a_plan_is_made_again_where_another_export_takes_of_its_memory(held, tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).requires_grad_(False)
    given = torch.ones(1, 1024)
    expected = model(given)
    with apply(model, 100 * MIB, example=given, cache=tmp_path) as applied:
        (component,) = applied.components.values()
        assert torch.equal(model(given), expected)
        whole = component._planned
        with applied.cap.working():
            held[0] += BESIDE + 84 * MIB
        assert torch.equal(model(given), expected)
        assert component._planned <= applied.cap.room == 12 * MIB < whole
        with applied.cap.working():
            held[0] += 2 * STEP
        with pytest.raises(BudgetError, match="in use by what penstock exported and planned"):
            model(given)
