"""Whole programs on the simulated device: outputs, time, memory, and hundreds of orders."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import penstock
from penstock.runtime.device import streamer as staging
from penstock.runtime.device.protocol import Move
from penstock.runtime.device.simulated import SimDevice
from penstock.runtime.loading import load_module
from penstock.runtime.options import LoadRequest
from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.facts.hardware import find_hardware
from penstock.schedule.facts.model import Extent
from penstock.schedule.facts.problem import Demand, Problem
from penstock.schedule.planner import floor, make_plan
from tests.hunt import scaled
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
    assert times[-1] == predicted > (schedule.predicted_ns if nbytes > 60 else 0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
def test_a_pass_can_be_captured_and_another_as_well(stack, share):
    """By the rules of CUDA's graphs: no event from outside, and all that was forked is joined."""
    program = stack.open()
    least = program.floor("sim:rtx4090")
    budget = least + int(share * (program.weight_bytes - least))
    for wrap in ("barrier", "overlap"):
        plan = program.plan(budget, device="sim:rtx4090", wrap=wrap)
        device = CapturedDevice(plan.hardware)
        module = load_module(program, plan, LoadRequest(), device=device)
        crosses = any(t.after < 0 for t in plan.schedules[0].transfers)
        with torch.no_grad(), module:
            module(stack.tokens)
            for _ in range(3):
                refusal = pytest.raises(penstock.StreamError, match="capture")
                with nullcontext() if wrap == "barrier" or not crosses else refusal, device.capture():
                    assert torch.equal(module(stack.tokens), stack.expected)
            moved = [module.stats.bytes_moved]
            for _ in range(3):  # of which the first starts over, if the capture failed
                assert torch.equal(module(stack.tokens), stack.expected)
                moved.append(module.stats.bytes_moved)
            steady = moved[3] - moved[2]
            assert moved[2] - moved[1] == steady
            assert wrap == "overlap" or moved[1] - moved[0] == steady


def test_two_modules_of_one_program_run_side_by_side(stack):
    program = stack.open()
    with (
        torch.no_grad(),
        program.load("50%", device="sim:l4") as one,
        program.load("70%", device="sim:h200") as other,
    ):
        for module in (one, other, one, other):
            assert torch.equal(module(stack.tokens), stack.expected)


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


def test_a_call_after_close_and_an_exception_in_between(stack):
    program = stack.open()
    module = program.load("50%", device="sim:h100")
    with torch.no_grad():
        module(stack.tokens)
        with pytest.raises(penstock.StreamError, match="expected"):
            module(stack.tokens.float())
        assert torch.equal(module(stack.tokens), stack.expected)
        module.close()
        with pytest.raises(penstock.StreamError, match="closed"):
            module(stack.tokens)


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
@given(problems("contiguous", methods=1))
def test_random_plans_run_in_random_orders(p):
    one = case_of(p)
    if one.plan.arena_bytes:
        for number in range(3):
            Run(one, OrderedDevice(one.plan.hardware, policy="random", seed=number)).go()


@pytest.mark.random
@settings(max_examples=scaled(20), deadline=None)
@seed(1)
@given(problems("contiguous", methods=2))
def test_random_plans_of_two_methods_run_in_random_orders(p):
    one = case_of(p)
    if one.plan.arena_bytes:
        Run(one, OrderedDevice(one.plan.hardware, policy="random", seed=1)).go()


@pytest.mark.random
@settings(max_examples=scaled(40), deadline=None)
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


@pytest.mark.random
@settings(max_examples=scaled(15), deadline=None)
@seed(3)
@given(problems("contiguous", methods=2), st.floats(0, 0.6))
def test_random_plans_of_two_methods_with_a_host_between(p, share):
    one = case_of(p, share)
    if one.plan.arena_bytes:
        Run(one, OrderedDevice(one.plan.hardware, policy="random", seed=1)).go()


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
