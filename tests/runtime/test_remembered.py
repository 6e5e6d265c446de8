"""A plan that a load made is used by the next, if it is still one for that artifact."""

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from penstock import LoadOptions
from penstock.runtime import memory_split, planning
from penstock.runtime.cache import list_entries
from penstock.runtime.files.source import Source
from penstock.runtime.machine import calibrate, rates
from penstock.runtime.machine.figures import Trials, forget
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.planner import make_plan


@pytest.fixture
def made(stack, monkeypatch, tmp_path):
    """The plans that were made, and an empty folder for them; the weights are in the page cache."""
    (stack.path / "weights.safetensors").read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plans = []

    def remember(*args, **kwargs):
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(planning, "make_plan", remember)
    return plans


def load(stack, budget="50%", **options):
    with stack.open().load(budget, **options) as module:
        assert torch.equal(module(stack.tokens), stack.expected)
        return module.plan


def stored(folder):
    return sorted((folder / "penstock" / "plans").glob("*.json"))


def test_a_load_uses_the_plan_of_an_equal_one_before(stack, made, tmp_path):
    first = load(stack)
    assert load(stack) == first
    assert len(made) == len(stored(tmp_path)) == 1
    load(stack, budget="60%")
    load(stack, options=LoadOptions(arena="paged"))
    load(stack, keep=["blocks.0.*"])
    assert len(made) == len(stored(tmp_path)) == 4
    listed = [one.path for one in list_entries(tmp_path / "penstock") if one.kind == "plan"]
    assert sorted(listed) == stored(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff"])
def test_a_damaged_plan_is_made_again(stack, made, tmp_path, content):
    first = load(stack)
    (path,) = stored(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(content)
    assert load(stack).budget == first.budget
    assert len(made) == 2
    assert path.read_bytes()[:20] == whole[:20]


def test_a_plan_that_is_not_safe_here_is_made_again(stack, made, tmp_path):
    load(stack)
    (path,) = stored(tmp_path)
    arena_bytes = load(stack, options=LoadOptions(arena="contiguous")).arena_bytes
    (other,) = set(stored(tmp_path)) - {path}
    shortened = other.read_text().replace(f'"arena_bytes": {arena_bytes}', '"arena_bytes": 64')
    assert shortened != other.read_text()
    path.write_text(shortened)
    load(stack)
    assert len(made) == 3


def test_a_safe_plan_for_a_larger_budget_is_not_taken_for_a_smaller_one(stack, made, tmp_path):
    load(stack)
    (path,) = stored(tmp_path)
    load(stack, budget="70%")
    (other,) = set(stored(tmp_path)) - {path}
    path.write_bytes(other.read_bytes())
    assert load(stack).budget == made[0].budget < made[1].budget
    assert len(made) == 3


def test_the_oldest_plans_are_forgotten(stack, made, monkeypatch, tmp_path):
    monkeypatch.setattr("penstock.runtime.cache.MOST_PLANS", 2)
    for budget in ("40%", "50%", "60%"):
        load(stack, budget=budget)
    assert len(stored(tmp_path)) == 2


@pytest.mark.parametrize("device", ["cpu", "sim", "sim:h200"])
def test_a_budget_has_one_plan_whether_it_is_asked_for_or_loaded(stack, made, device):
    plan = stack.open().plan("45%", device=device)
    assert load(stack, "45%", device=device) == plan
    assert stack.open().plan("45%", device=device) == plan
    assert len(made) == 1


def test_given_hardware_and_times_are_planned_with_every_time(stack, made, tmp_path):
    program = stack.open()
    for _ in range(2):
        program.plan("45%", hardware="h200")
        program.plan("45%", traces=program.plan("45%", hardware="h200").traces)
    assert len(made) == 6
    assert not stored(tmp_path)


def test_another_gpu_of_the_same_name_has_a_plan_of_its_own(stack, made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for product, plans in (("h100", 1), ("t4", 2), ("h100", 2)):
        hardware = find_hardware(product)
        facts = SimpleNamespace(name=product, total_memory=hardware.memory_nbytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, facts=facts: facts)
        monkeypatch.setattr(
            "penstock.runtime.arena.kinds.measure_accelerator", lambda *args, hardware=hardware: hardware
        )
        assert stack.open().plan("45%", device="cuda").hardware == hardware
        assert len(made) == plans


def test_the_plan_for_what_the_host_has_free_now_is_not_kept(stack, made, monkeypatch, tmp_path):
    free = count(2 << 20, 4096)
    monkeypatch.setattr(memory_split, "usable_bytes", lambda: next(free))
    first, second = load(stack, device="sim:h200"), load(stack, device="sim:h200")
    assert second.host.nbytes == first.host.nbytes + 4096
    assert len(made) == 1  # what the host holds is decided without a search
    assert len(stored(tmp_path)) == 1


def test_a_plan_is_of_the_figures_that_it_was_made_with(stack, made, monkeypatch, tmp_path):
    program = stack.open()
    first = program.plan("45%")
    (path,) = stored(tmp_path)
    searched = json.loads(path.read_text())["nearness"]
    forget(lambda one: one.subject.quantity == "memory")
    monkeypatch.setattr(calibrate, "_memory", lambda: Trials((first.hardware.memory_bytes_per_s / 3,)))
    second = program.plan("45%")
    assert second.hardware.memory_bytes_per_s == first.hardware.memory_bytes_per_s / 3
    assert program.plan("45%") == second
    assert (second.resident, len(made)) == (first.resident, 1)  # as good as before: nothing waits for memory
    assert stored(tmp_path) == [path]
    assert json.loads(path.read_text())["nearness"] == searched  # so that it does not grow from time to time


def test_a_plan_that_other_figures_make_poor_is_made_anew(stack, made, monkeypatch):
    program = stack.open()
    program.plan("45%")
    monkeypatch.setattr("penstock.runtime.cache.with_figures", lambda *given: None)
    forget(lambda one: one.subject.quantity == "memory")
    program.plan("45%")
    assert len(made) == 2


def test_a_plan_is_of_the_rates_of_what_the_page_cache_holds_now(stack, made, monkeypatch):
    program = stack.open()
    for share, rate in ((1.0, "mapping from the page cache"), (0.2, "direct reads"), (1.0, "mapping from")):
        monkeypatch.setattr(Source, "cached_fraction", lambda self, share=share: share)
        assert rate in program.plan("45%").hardware.note


def test_a_plan_for_a_simulated_device_opens_no_weight_file(stack, made, monkeypatch):
    program = stack.open()
    program.plan("45%", device="sim")  # which measures the disk
    monkeypatch.setattr(rates, "Source", None)
    for budget, device in (("45%", "sim"), ("55%", "sim"), ("45%", "sim:h200")):
        program.plan(budget, device=device)
    assert len(made) == 3
