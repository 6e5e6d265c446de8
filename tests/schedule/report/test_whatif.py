"""What if: other budgets, and machines that one does not have."""

import json
from dataclasses import asdict, replace

import pytest

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.hardware import PRESETS, find_hardware, host_beside, with_times
from penstock.schedule.facts.model import Step, Storage, Trace, Work
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.facts.validity import check_machine
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report import comparison
from penstock.schedule.space.layout import packed_arena

GB = 10**9
STORAGES = tuple(Storage(GB // 10, "streamable") for _ in range(40))


def trace_for(hardware, *, flops):
    """Forty products over 100 MB each."""
    steps = tuple(
        Step(f"s{k}", (k,), 0, 0, Work(), Work(int(flops), storage.nbytes))
        for k, storage in enumerate(STORAGES)
    )
    return with_times(Trace("forward", 0, "", steps, 0, 0, "modelled"), hardware)


def plan_for(budget, *, flops=0, hardware=PRESETS["rtx4090"]):
    trace = trace_for(hardware, flops=flops)
    arena = packed_arena(STORAGES, [trace], kind="paged", granule=2 << 20, alignment=4096)
    return make_plan(Problem(STORAGES, (trace,), arena, hardware=hardware), budget)


def test_a_sweep_goes_from_the_floor_to_everything_and_never_gets_slower():
    trace = trace_for(PRESETS["l4"], flops=1e11)
    arena = packed_arena(STORAGES, [trace], kind="paged", granule=2 << 20, alignment=4096)
    lowest = floor(Demand(STORAGES, (trace,), arena)).upper_bytes
    points = comparison.sweep(
        lambda budget: plan_for(budget, flops=1e11, hardware=PRESETS["l4"]), lowest=lowest, highest=4 * GB
    )
    assert (points[0].budget, points[-1].budget) == (lowest, 4 * GB)
    periods = [point.predicted_ns for point in points]
    assert periods == sorted(periods, reverse=True)
    assert all(point.lower_bound_ns <= point.predicted_ns for point in points if point.lower_bound_ns)
    assert points[-1].policies["everything resident"] == trace.compute_ns
    assert "everything resident" not in points[0].policies


@pytest.mark.parametrize(
    ("name", "hint"), [("RTX-4090", "'rtx4090'"), ("H100", "'h100'"), ("gtx3090", "'rtx3090'")]
)
def test_a_preset_of_the_same_number_is_suggested(name, hint):
    with pytest.raises(PlanError, match=f"there is no hardware '{name}': did you mean {hint}"):
        find_hardware(name)


def test_the_disk_of_a_host_is_its_link():
    assert find_hardware("laptop,link=3GB/s").disk_bytes_per_s is None
    with pytest.raises(PlanError, match="the disk of laptop is its link: write link= for disk="):
        find_hardware("laptop,disk=3GB/s")


@pytest.mark.parametrize("name", ["toaster", "rtx3080", "a1000", "auto,memory=2GB"])
def test_an_unknown_machine_lists_all(name):
    with pytest.raises(PlanError, match=r"one of t4, l4, .*, laptop, server, one with figures of") as raised:
        find_hardware(name)
    assert "did you mean" not in str(raised.value)


def test_figures_of_a_preset_may_be_changed():
    name = "rtx4090,memory=20GB,link=12.5GB/s,disk=3GB,bandwidth=900GB/s,tflops=150"
    assert find_hardware(name) == replace(
        PRESETS["rtx4090"],
        name=name,
        memory_nbytes=20 * 10**9,
        link_bytes_per_s=12.5e9,
        disk_bytes_per_s=3e9,
        memory_bytes_per_s=9e11,
        flops_per_s=1.5e14,
        note="a preset, from public figures, with figures that were given",
    )
    assert host_beside(find_hardware("rtx4090,memory=20GB")) == host_beside(PRESETS["rtx4090"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("speed=3", "expected one of memory, link, disk, bandwidth, tflops and =, got 'speed=3'"),
        ("link=12", "a figure such as link=12GB/s, got 'link=12'"),
        ("memory=24", "a figure such as memory=24GB, got 'memory=24'"),
        ("memory=24GB,memory=12GB", "memory= stands there twice"),
        ("memory=lots", "a figure such as memory=24GB, got 'memory=lots'"),
        ("tflops=x", "a figure such as tflops=150, got 'tflops=x'"),
        ("tflops=-1", "flops_per_s: expected a rate above 0"),
    ],
)
def test_wrong_figures_are_refused(changes, words):
    with pytest.raises(PlanError, match=words):
        find_hardware(f"rtx4090,{changes}")


def test_figures_may_come_from_a_file(tmp_path):
    mine = replace(PRESETS["laptop"], name="mine", link_bytes_per_s=3e9)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(asdict(mine)))
    assert find_hardware(str(file)) == mine


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Invalid JSON"),
        ("[]", "object"),
        (json.dumps(asdict(PRESETS["laptop"]) | {"link_bytes_per_s": "fast"}), "link_bytes_per_s: .*number"),
        (json.dumps(asdict(PRESETS["laptop"]) | {"speed": 1}), "speed: "),
        (json.dumps(asdict(PRESETS["laptop"]) | {"link_bytes_per_s": 0}), "expected a rate above 0"),
    ],
)
def test_a_file_without_figures_is_refused(tmp_path, text, words):
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=words):
        find_hardware(str(file))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"no file .*: `penstock hardware h200 --json` prints one to begin"):
        find_hardware(str(tmp_path / "mine.json"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_machines(name):
    hardware = find_hardware(name)
    check_machine(hardware)
    assert hardware.name == name
    assert hardware.memory_nbytes
