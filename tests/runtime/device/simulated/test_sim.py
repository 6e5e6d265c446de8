"""Whole programs on the simulated device: outputs, time, memory, and hundreds of orders."""

import itertools
import os
import shutil
from dataclasses import replace
from itertools import takewhile

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import export

import penstock
from penstock.integrations import apply
from penstock.runtime import planning
from penstock.runtime.device import streamer as staging
from penstock.runtime.device.protocol import Move
from penstock.runtime.device.simulated import SimDevice
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.schedule.clock.event_graph import launched_steps, steady_period_ns
from penstock.schedule.facts.hardware import PRESETS, find_hardware
from penstock.schedule.facts.model import Extent
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.planner import floor, make_plan
from tests.hunt import nightly_but, scaled
from tests.runtime.device.device_runs import HARDWARE, POLICIES, Case, Run, cases, disk_cases
from tests.runtime.device.simulated.ordered_device import CapturedDevice, OrderedDevice
from tests.schedule.traces import problems


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
def test_outputs_are_bit_equal_and_passes_take_what_is_predicted(stack, share, wrap):
    program = stack.open()
    least = program.floor("sim:rtx4090")
    budget = least + int(share * (program.weight_bytes - least))
    plan = program.plan(budget, device="sim:rtx4090", wrap=wrap)
    with torch.no_grad(), program.load(plan=plan, device="sim:rtx4090") as module:
        assert plan.hardware == find_hardware("rtx4090")
        times = []
        for _ in range(4):
            assert torch.equal(module(stack.tokens), stack.expected)
            times.append(module.stats.simulated_seconds)
        assert module.stats.misses == 0
        assert module.stats.held_bytes <= budget
        if plan.arena_bytes:
            assert times[-1] - times[-2] == pytest.approx(plan.predicted_seconds, abs=1e-9)


def test_a_link_fills_from_when_a_copy_may_start():
    """At a byte a nanosecond: each copy takes 100 ns and its bytes, which flow 50 ns after it may start."""
    device = SimDevice(replace(HARDWARE, link_in_flight_bytes=50))
    copies, kernels = device.open_stream("copies"), device.current_stream()
    target, source = device.allocate(400, "the arena"), device.allocate_host(400)
    ended = []
    for computing in (0, 0, 610, 150, 10):  # until 0, 0, 610, 760 and 770
        device.compute(computing)
        device.wait(copies, device.record(kernels))
        device.copy(copies, target, [Move(source, 0, 0, 200)], "a copy")
        ended.append(copies.time_ns)
    # Nothing hides the first 50 ns, and the second copy follows at once. The third may start at 610, before
    # that one ends at 650, and flows from 660. The others may start early enough.
    assert ended == [350, 650, 960, 1260, 1560]
    assert device.copied_ns == 5 * 300
    device.close()


@pytest.mark.parametrize("nbytes", [60, 700, 3000])
@pytest.mark.parametrize("one", [*cases()[:6], *disk_cases()[:5]], ids=lambda case: case.name)
def test_passes_take_what_is_predicted_where_the_link_fills_late(one, nbytes):
    hardware = replace(HARDWARE, link_in_flight_bytes=nbytes)
    trace, schedule = one.plan.traces[0], one.plan.schedules[0]
    predicted = steady_period_ns(trace, schedule, hardware, one.plan.wrap)
    times = Run(replace(one, passes=one.passes * 4), OrderedDevice(hardware, policy="latest")).go().times
    assert times[-1] == predicted > (schedule.predicted_ns if nbytes > 700 else 0)


def test_more_than_the_memory_of_the_preset_is_out_of_memory(stack):
    program = stack.open()
    plan = program.plan("50%", device="sim")
    small = replace(plan, hardware=replace(plan.hardware, memory_nbytes=plan.arena_bytes - 1))
    with pytest.raises(penstock.StreamError, match=r"sim is out of memory: .* for the arena do not fit"):
        program.load(plan=small, device="sim")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "there is no device 'gpu': choose 'cpu', 'cuda'"),
        ("cpu:0", "there is no device 'cpu:0'"),
        ("cuda:x", "expected a number of at most 127 behind 'cuda:', got 'cuda:x'"),
        ("cuda:256", "expected a number of at most 127 behind 'cuda:', got 'cuda:256'"),
        ("cuda:\u0663", "expected a number of at most 127 behind 'cuda:'"),
        ("sim:h20", "h200"),
    ],
)
def test_devices_that_do_not_exist_are_refused_by_name(stack, device, message):
    with pytest.raises(penstock.PenstockError, match=message):
        stack.open().load("50%", device=device)


def test_a_plan_for_a_mapped_arena_is_refused(stack):
    program = stack.open()
    plan = program.plan("50%", arena="paged")
    with pytest.raises(penstock.StreamError, match="a paged arena cannot be on sim: plan"):
        program.load(plan=plan, device="sim")


@pytest.mark.parametrize("case", cases()[3:7], ids=lambda case: case.name)
def test_more_passes_remember_no_more(case):
    remembered = []
    for count in (3, 90):
        device = OrderedDevice(case.plan.hardware, policy="random", seed=1)
        Run(replace(case, passes=case.passes * count), device).go()
        remembered.append(device.detector.remembered)
    assert remembered[0] == remembered[1]


@pytest.mark.parametrize("one", cases()[:6], ids=lambda case: case.name)
def test_transfers_are_enqueued_as_soon_as_what_they_wait_for_has_ended(one):
    """In their order, each behind the ones before: what a steady pass has moved when a step ends."""
    run, steps = Run(one, SimDevice(HARDWARE)), len(one.plan.traces[0].steps)
    for _ in range(2):
        run._in_order(0)
    of_this = [t for t in one.plan.schedules[0].transfers if t.after >= 0]
    of_next = [replace(t, after=t.after + steps) for t in one.plan.schedules[0].transfers if t.after < 0]
    streamer, counters = run.streamer, run.streamer.counters
    before = counters.bytes_moved
    streamer.begin(0)
    assert counters.bytes_moved == before
    for step in streamer.probed(0):
        streamer.acquire(0, step)
        streamer.release(0, step)
        ready = takewhile(lambda t: t.after <= step, (*of_this, *of_next))  # noqa: B023 (it is used at once)
        assert counters.bytes_moved - before == sum(t.stop - t.start for t in ready)
    assert counters.bytes_moved > before
    streamer.abort()
    before = counters.bytes_moved
    streamer.begin(0)
    assert counters.bytes_moved > before  # what waits for nothing, as in a first pass


@pytest.mark.parametrize("one", disk_cases(), ids=lambda case: case.name)
def test_room_that_aligned_reads_leave_unused_is_not_given_out(one, monkeypatch):
    monkeypatch.setattr(staging, "_LARGE", 0)
    skipped = []
    align = staging.Staging._align
    monkeypatch.setattr(staging.Staging, "_align", lambda *args: skipped.append(align(*args)) or skipped[-1])
    for block in (192, 128, 320, 448, 576):  # where the ring lies decides at which of them bytes are skipped
        monkeypatch.setattr(staging, "BLOCK", block)
        for policy, number in POLICIES:
            Run(one, OrderedDevice(HARDWARE, policy=policy, seed=number)).go()
        if any(skipped):
            break
    assert one.name in ("a granule", "a ring only") or any(skipped)  # whose rings have room by chance


def case_of(p, host_share=None):
    starts = [sum(s.nbytes for s in p.storages[:k]) for k in range(len(p.storages))]
    storages = tuple(
        type(s)(s.nbytes, s.kind, (Extent(0, start, 0, s.nbytes),) if s.nbytes else ())
        for s, start in zip(p.storages, starts, strict=True)
    )
    least = floor(Demand(storages, p.traces, p.arena, p.keep)).upper_bytes
    hardware = replace(p.hardware, disk_bytes_per_s=p.hardware.link_bytes_per_s / 3, disk_latency_ns=70)
    total = sum(s.nbytes for s in storages)
    host = None if host_share is None else 64 + int(host_share * total)
    problem = Problem(storages, p.traces, p.arena, p.keep, hardware=hardware, wrap=p.wrap, host=host)
    plan = make_plan(problem, p.budget(least))
    graphs = [trace.graph for trace in p.traces]
    return Case(
        "random",
        storages,
        lambda: plan,
        tuple((graph, "in order") for graph in (*graphs, *graphs, graphs[0])),
    )


@pytest.mark.random
@settings(max_examples=scaled(40), deadline=None)
@seed(0)
@given(
    st.one_of(problems("contiguous"), problems("contiguous", methods=2)),
    st.one_of(st.none(), st.floats(0, 0.6)),
)
def test_random_plans_run_in_random_orders(p, host_share):
    one = case_of(p, host_share)
    if one.plan.arena_bytes:
        for number in range(3):
            Run(one, OrderedDevice(one.plan.hardware, policy="random", seed=number)).go()


@pytest.mark.random
@settings(max_examples=scaled(20), deadline=None)
@seed(2)
@given(problems("contiguous", methods=1), st.floats(0, 0.6))
def test_random_plans_with_a_host_between_run_in_random_orders(p, share):
    """And steady passes take what is predicted, to the nanosecond."""
    one = case_of(p, share)
    if one.plan.arena_bytes:
        hardware, schedule = one.plan.hardware, one.plan.schedules[0]
        for number in range(2):
            run = Run(
                replace(one, passes=one.passes * 3), OrderedDevice(hardware, policy="random", seed=number)
            )
            times = run.go().times
            assert run.weights.host.pinned_bytes <= one.plan.host.nbytes
            assert sum(times[-4:]) <= 4 * schedule.predicted_ns + 4


def test_a_cap_on_all_memory_leaves_room_for_activations(stack, said):
    program = stack.open()
    split = program.split_memory("20MiB", reserve="1MiB", device="sim:t4")
    assert split.activations == program.activation_bytes > 0
    assert split.weights == (19 << 20) - program.activation_bytes
    with torch.no_grad(), program.load(device_memory="20MiB", reserve="1MiB", device="sim:t4") as module:
        assert torch.equal(module(stack.tokens), stack.expected)
        assert module.stats.held_bytes <= split.weights
    assert "of 20.00 MiB device memory: " in said()


def test_a_reserve_may_depend_on_the_context(stack):
    program = stack.open()
    split = program.split_memory("20MiB", reserve=lambda tokens: 1024 * tokens, context_length=4096)
    assert split.reserved == 4 << 20
    with pytest.raises(penstock.BudgetError, match="give context_length= too"):
        program.split_memory("20MiB", reserve=lambda tokens: tokens)
    with pytest.raises(penstock.BudgetError, match="reserve"):
        program.split_memory("20MiB", reserve=-5)


def test_a_cap_below_what_is_needed_names_all_parts(stack):
    program = stack.open()
    with pytest.raises(penstock.BudgetError, match=r"activations, .* reserved, .*: weights need at least"):
        program.load(device_memory="2MiB", reserve="1MiB", device="sim")
    with pytest.raises(penstock.BudgetError, match="a budget, a plan or device_memory, and one of them only"):
        program.load("50%", device_memory="20MiB")
    with pytest.raises(penstock.BudgetError, match="reserve= is taken from device_memory="):
        program.load("50%", reserve="1MiB")


def test_activations_count_on_a_simulated_device(stack):
    program = stack.open()
    plan = program.plan("50%", device="sim")
    full = replace(plan, hardware=replace(plan.hardware, memory_nbytes=plan.budget))
    with pytest.raises(penstock.StreamError, match=r"out of memory: .* beside .* for activations"):
        program.load(plan=full, device="sim")


# Whole programs on the simulated device whose host holds a part of the weights.


@pytest.mark.parametrize(
    ("host_memory", "wrap"),
    nightly_but(
        {("25%", "overlap"), ("64KiB", "barrier")},
        itertools.product(("25%", "60%", "64KiB"), ("overlap", "barrier")),
    ),
)
def test_a_host_that_holds_a_part_streams_the_rest_from_the_files(stack, host_memory, wrap):
    program = stack.open()
    budget = program.floor("sim:rtx4090") + (1 << 20)
    plan = program.plan(budget, device="sim:rtx4090", wrap=wrap, host_memory=host_memory)
    with torch.no_grad(), program.load(plan=plan, device="sim:rtx4090") as module:
        times = []
        for _ in range(4):
            assert torch.equal(module(stack.tokens), stack.expected)
            times.append(module.stats.simulated_seconds)
        assert module.stats.misses == 0
        assert 0 < module.stats.pinned_bytes <= plan.host.nbytes
        # To let reads go past the page cache, the ring gives up to 4 KiB for each large one.
        assert times[-1] - times[-2] == pytest.approx(plan.predicted_seconds, rel=1e-3)


def test_host_memory_is_capped_as_the_machine_is(stack, monkeypatch):
    program = stack.open()
    budget = program.floor("sim:h100")
    monkeypatch.setattr("penstock.runtime.memory_split.usable_bytes", lambda: 2 << 20)
    with torch.no_grad(), program.load(budget, device="sim:h100") as module:
        assert torch.equal(module(stack.tokens), stack.expected)
        assert 0 < module.stats.pinned_bytes <= 2 << 20
    with program.load(budget, device="sim:h100", host_memory="3MiB") as module:
        assert 2 << 20 < module.stats.pinned_bytes <= 3 << 20
    with pytest.raises(penstock.BudgetError, match="a CPU has no host behind it"):
        program.load("50%", host_memory="3MiB")
    with pytest.raises(penstock.PlanError, match="host_memory= are decided by the plan"):
        program.load(plan=program.plan("50%", device="sim"), device="sim", host_memory="3MiB")


class Halves(torch.nn.Module):
    """Two methods that read other weights."""

    def __init__(self):
        super().__init__()
        self.ups = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(6))
        self.downs = torch.nn.ModuleList(torch.nn.Linear(96, 96) for _ in range(6))

    def encode(self, x):
        for layer in self.ups:
            x = layer(x).relu()
        return x

    def decode(self, x):
        for layer in self.downs:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize(
    ("budget", "host_memory"),
    nightly_but(
        {("30%", "64KiB"), ("51%", "50%"), ("75%", "100%"), ("90%", "200%")},
        itertools.product(("30%", "51%", "75%", "90%"), ("64KiB", "50%", "100%", "200%")),
    ),
)
def test_two_methods_with_other_weights_share_a_host(tmp_path, budget, host_memory):
    module, x = Halves().eval(), torch.randn(2, 96)
    exported = {}
    for name in ("encode", "decode"):
        module.forward = getattr(module, name)
        exported[name] = torch.export.export(module, (x,))
    program = penstock.compile(exported, tmp_path / "halves.penstock")
    with torch.no_grad(), program.load(budget, device="sim:h100", host_memory=host_memory) as loaded:
        for name in ("encode", "encode", "decode", "encode", "decode", "decode"):
            assert torch.equal(loaded.call(name, x), getattr(module, name)(x)), name


def test_limits_of_the_host_are_said(stack, monkeypatch):
    program = stack.open()
    with pytest.raises(penstock.BudgetError, match="give at least 16384"):
        program.load("100%", device="sim:h100", host_memory=1)
    plan = program.plan("50%", device="sim:h100")
    monkeypatch.setattr("penstock.runtime.memory_split.usable_bytes", lambda: 1 << 20)
    with pytest.raises(penstock.BudgetError, match=r"1\.00 MiB may be taken: plan with host_memory="):
        program.load(plan=plan, device="sim:h100")
    with torch.no_grad(), program.load("50%", device="sim") as module:  # no preset, and yet a disk
        assert torch.equal(module(stack.tokens), stack.expected)
        assert module.stats.pinned_bytes <= 1 << 20


def test_a_file_that_changes_while_it_streams_is_an_error_and_the_next_load_says_so(stack, tmp_path):
    path = tmp_path / "copy.penstock"
    shutil.copytree(stack.path, path)
    program = penstock.open(path)
    module = program.load(program.floor("sim:h100"), device="sim:h100", host_memory="1MiB")
    with torch.no_grad():
        module(stack.tokens)
        weights = max(path.iterdir(), key=lambda file: file.stat().st_size)
        os.truncate(weights, weights.stat().st_size - 4096)
        for _ in range(2):
            with pytest.raises(penstock.SourceError, match="truncated while in use"):
                module(stack.tokens)
    module.close()
    with pytest.raises(penstock.SourceError):
        penstock.open(path)


# Programs of many tiny steps, whose launches take the calling thread longer than the device takes.


H200 = "sim:h200"
X = torch.ones(2, 32)
LIMIT = "the calling thread is the limit: launching the "


def tiny(count=60):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(count))).eval()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return penstock.compile(export(tiny(), (X,)), tmp_path_factory.mktemp("tiny") / "tiny.penstock")


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
@pytest.mark.parametrize("share", ["5%", "30%", "60%", "95%"])
def test_passes_take_what_is_predicted(program, wrap, share):
    plan = program.plan(share, device=H200, wrap=wrap)
    assert plan.wrap == wrap
    times = []
    with torch.no_grad(), program.load(plan=plan, device=H200) as module:
        assert module._weights.probed(0) == launched_steps(plan, 0)
        for _ in range(60):  # until the device has caught up with the launches
            module(X)
            times.append(module.stats.simulated_seconds)
    assert times[-1] - times[-2] == pytest.approx(plan.predicted_seconds, abs=1e-9)
    launching = 5_800 * len(launched_steps(plan, 0))
    assert plan.predicted_ns >= launching
    if share == "5%":
        assert plan.predicted_ns == launching > plan.compute_ns
        alone = replace(PRESETS["h200"], host_step_ns=0)
        assert program.plan(share, device=H200, hardware=alone, wrap=wrap).predicted_ns < launching


def test_a_load_whose_launches_are_the_limit_can_be_replayed(program, said):
    with program.load("5%", device=H200) as module:
        plan = module._weights.plan
    assert plan.wrap == "barrier"
    assert plan == program.plan("5%", device=H200)
    count = len(launched_steps(plan, 0))
    words = f"{LIMIT}{count} streamed steps of forward takes {5.8 * count:.3g} us a pass, compute 204 us; "
    assert f"{words}planned with wrap='barrier', so that calls can be captured as graphs, whose " in said()
    device = CapturedDevice(plan.hardware)
    with torch.no_grad(), load_module(program, plan, LoadRequest(), device=device) as module:
        expected = module(X)
        with device.capture():
            assert torch.equal(module(X), expected)


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        ("95%", {}),  # few steps stream
        ("100%", {}),
        ("5%", {"hardware": replace(PRESETS["h200"], host_step_ns=0)}),
        ("5%", {"hardware": replace(PRESETS["h200"], link_bytes_per_s=1e8)}),  # the link is the limit
        ("5%", {"host_memory": "64KiB"}),  # what comes from a disk cannot be captured
    ],
)
def test_calls_overlap_where_replays_would_gain_nothing(program, said, budget, options):
    assert program.plan(budget, device=H200, **options).wrap == "overlap"
    assert LIMIT not in said()


def test_calls_overlap_where_replays_are_no_faster(program, said, monkeypatch):
    monkeypatch.setattr(planning, "replayed_ns", lambda plan: plan.predicted_ns + 10**9)
    plan = program.plan("5%", device=H200)
    assert plan.wrap == "overlap"
    assert plan.predicted_ns == 5_800 * len(launched_steps(plan, 0))
    assert LIMIT not in said()


def test_apply_says_what_would_help(tmp_path, said):
    model = tiny(24)
    expected = model(X)
    with torch.no_grad(), apply(model, "30KiB", device=H200, cache=tmp_path):
        for _ in range(3):
            assert torch.equal(model(X), expected)
    line = next(line for line in said().splitlines() if LIMIT in line)
    assert line.endswith(
        "larger batches help, and penstock.compile, whose programs can be captured and replayed as graphs"
    )
