"""An artifact from compile to close: outputs bit for bit, budgets kept, and every refusal by name."""

import os
import re
import threading
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

import penstock
from penstock import LoadOptions
from penstock.schedule.facts.model import Hardware
from penstock.schedule.facts.sizes import format_size
from tests.engines import ENGINES
from tests.hunt import nightly_but

ARENAS = ("mapped", "contiguous", "paged")


def mapped_lines():
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "weights.safetensors" in line
    ]


# What it is for.


@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize(
    "budget", nightly_but({"floor", "50%", "100%"}, ("floor", "30%", "50%", "75%", "100%"))
)
def test_outputs_are_bit_for_bit_those_of_the_eager_module(stack, arena, budget):
    program = stack.open()
    budget = program.floor(arena=arena) if budget == "floor" else budget
    with program.load(budget, options=LoadOptions(arena=arena, poison=True)) as module:
        for _ in range(3):
            assert torch.equal(module(stack.tokens), stack.expected)
        assert module.stats.peak_bytes <= module.stats.budget
        assert module.stats.misses == 0
        assert module.stats.passes == 3


@pytest.mark.parametrize(("device", "engine"), [*(("cpu", engine) for engine in ENGINES), ("sim", "auto")])
def test_small_weights_outside_of_the_arena_are_within_the_budget(device, engine, tmp_path):
    layers = (layer for _ in range(4) for layer in (nn.LayerNorm(256), nn.Linear(256, 256)))
    model, x = nn.Sequential(*layers), torch.randn(2, 256)
    program = penstock.compile(torch.export.export(model, (x,)), tmp_path / "model.penstock")
    slow = Hardware("slow", 1e12, 2e10, 6e9, link_latency_ns=400_000)
    plan = program.plan(program.weight_bytes - 3000, device=device, hardware=slow, arena="contiguous")
    with (
        torch.no_grad(),
        program.load(plan=plan, device=device, options=LoadOptions(engine=engine)) as module,
    ):
        assert torch.equal(module(x), model(x))
        assert module.stats.peak_bytes == plan.arena_bytes + 12 * 1024 <= plan.budget


def test_the_floor_is_accepted_and_one_byte_less_is_not(stack):
    program = stack.open()
    with program.load(program.floor_bytes) as module:
        assert torch.equal(module(stack.tokens), stack.expected)
    with pytest.raises(penstock.BudgetError, match=f"give at least {program.floor_bytes} bytes") as caught:
        program.load(program.floor_bytes - 1)
    assert caught.value.floor_bytes == program.floor_bytes
    assert caught.value.step in {step.name for step in program.payload.traces[0].steps}
    assert set(caught.value.weights) <= {w.fqn for w in program.payload.weights}


def test_a_budget_below_the_floor_is_refused_before_the_machine_is_measured(stack, monkeypatch):
    monkeypatch.setattr("penstock.runtime.arena.kinds.measure_cpu", None)
    with pytest.raises(penstock.BudgetError, match="give at least"):
        stack.open().plan(1)


def test_the_graph_of_reads_is_that_of_the_trace(stack):
    program = stack.open()
    graph, (trace,) = program.read_graph(), program.payload.traces
    for k, step in enumerate(trace.steps):
        assert graph.nodes["step", 0, k]["name"] == step.name
        read = {s for kind, s, *_ in graph.predecessors(("step", 0, k)) if kind == "storage"}
        assert read == set(step.reads)
    sizes = nx.get_node_attributes(graph.subgraph(n for n in graph if n[0] == "storage"), "bytes")
    assert sum(sizes.values()) == program.weight_bytes


def test_bytes_that_move_are_those_that_the_plan_streams(stack):
    with stack.open().load("50%", options=LoadOptions(arena="paged")) as module:
        module(stack.tokens)
        before = module.stats.bytes_moved
        for _ in range(4):
            module(stack.tokens)
        ahead = sum(r.nbytes for r in module.plan.boundary)
        assert abs(module.stats.bytes_moved - before - 4 * module.plan.streamed_bytes) <= ahead


def test_a_dynamic_batch_streams_too(stack):
    tokens = torch.randint(0, 300, (11, 7))
    with torch.no_grad():
        expected = stack.exported.module()(tokens)
    with stack.open().load("40%", options=LoadOptions(arena="paged")) as module:
        assert torch.equal(module(tokens), expected)


def test_kept_weights_never_move(stack):
    program = stack.open()
    plan = program.plan("60%", keep=["blocks.0.*"], arena="paged")
    kept = {p.storage for w in program.payload.weights if w.fqn.startswith("blocks.0.") for p in w.parts}
    moved = {
        s
        for t in plan.schedules[0].transfers
        for s in kept
        if t.start < plan.arena.layout[s] + program.payload.storages[s].nbytes
        and plan.arena.layout[s] < t.stop
    }
    # Granules are pages here: only a page that a kept weight shares may not move either.
    assert not moved
    with program.load(plan=plan) as module:
        assert torch.equal(module(stack.tokens), stack.expected)


def test_measured_times_can_be_planned_with(stack):
    program = stack.open()
    with program.load("50%", options=LoadOptions(arena="paged")) as module:
        module(stack.tokens)
        trace = module.measure(stack.tokens)
        assert torch.equal(module(stack.tokens), stack.expected)
        assert module.stats.misses == 0
    assert trace.times == "measured"
    assert all(step.read_ns > 0 for step in trace.steps)
    plan = program.plan("50%", traces=[trace], arena="paged")
    assert plan.traces == (trace,)
    with program.load(plan=plan) as module:
        assert torch.equal(module(stack.tokens), stack.expected)


def test_two_modules_of_one_artifact_do_not_disturb_each_other(stack):
    program = stack.open()
    with (
        program.load("30%", options=LoadOptions(arena="paged")) as one,
        program.load("60%", options=LoadOptions(arena="contiguous")) as two,
    ):
        for _ in range(3):
            assert torch.equal(one(stack.tokens), stack.expected)
            assert torch.equal(two(stack.tokens), stack.expected)


def test_nothing_is_left_after_a_load_that_failed(stack, monkeypatch):
    from penstock.runtime import loading

    def fail(*args, **kwargs):
        raise MemoryError("no room for the program")

    monkeypatch.setattr(loading.eager, "load", fail)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        stack.open().load("50%", options=LoadOptions(arena="mapped"))
    assert not mapped_lines()
    assert not [t for t in threading.enumerate() if t.name.startswith("penstock")]
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_module_that_is_forgotten_is_closed(stack):
    module = stack.open().load("50%", options=LoadOptions(arena="mapped"))
    module(stack.tokens)
    del module
    import gc

    gc.collect()
    assert not mapped_lines()


# Budgets that are none.


@pytest.mark.parametrize("budget", [0, -1, "0%", "much", "12 parsecs", "-3MiB"])
def test_a_budget_that_is_no_size_is_refused(stack, budget):
    with pytest.raises(penstock.BudgetError):
        stack.open().load(budget)


def test_a_budget_or_a_plan_and_not_both(stack):
    program = stack.open()
    with pytest.raises(penstock.BudgetError, match="one of them only"):
        program.load()
    with pytest.raises(penstock.BudgetError, match="one of them only"):
        program.load("50%", plan=program.plan("50%"))


REFUSED = [
    ({"keep": ["lm_head.*"]}, penstock.PlanError, r"'lm_head\.\*' matches no weight"),
    ({"budget": "90%", "keep": ["*"]}, penstock.BudgetError, "keep"),
    ({"hardware": Hardware("none", 0.0, 1e10, 1e9, 0)}, penstock.PlanError, "'none': flops_per_s: expected"),
    ({"device": "cuda:7"}, penstock.StreamError, "cuda:7"),
    ({"arena": "ring"}, penstock.PlanError, "'ring'"),
    *(
        ({"traces": traces}, penstock.PlanError, r"a list with a Trace for each method, got .*: give what")
        for traces in ([3], 3, "forward")
    ),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_what_cannot_be_planned_is_refused(stack, options, error, words):
    with pytest.raises(error, match=words):
        stack.open().plan(**{"budget": "50%"} | options)


def test_what_is_printed_says_that_weights_stream(stack):
    program = stack.open()
    payload = r"Payload\(eager, \d+\.\d+ MiB in \d+ weights, methods: forward\)"
    assert re.fullmatch(payload, repr(program.payload))
    assert repr(program) == f"Program({str(stack.path)!r}, {program.payload!r})"
    plan = program.plan("50%", hardware="server")
    nbytes = sum(one.nbytes for one in plan.resident) + sum(plan.sizes[s] for s in plan.outside)
    total, streamed = format_size(program.weight_bytes), format_size(plan.streamed_bytes)
    words = f"{format_size(nbytes)} of {total} resident, {streamed} streamed a pass, budget "
    assert plan.residency == words + f"50% ({format_size(plan.budget)})"
    assert re.fullmatch(
        rf"Plan\({re.escape(plan.residency)}, [\d.]+ \w+ a pass predicted on server\)", repr(plan)
    )
    with program.load(plan=plan) as module:
        assert str(module) == f"StreamedModule(stack.penstock, {plan.residency})"
        assert str(nn.Sequential(module)) == f"Sequential(\n  (0): {module}\n)"
    assert str(module) == f"StreamedModule(stack.penstock, {plan.residency}, closed)"
