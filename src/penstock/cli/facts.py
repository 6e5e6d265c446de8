"""Facts about artifacts, plans and runs, for the command line to print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.cli.run import Outcome
from penstock.runtime.program import Program
from penstock.schedule.facts.model import Plan
from penstock.schedule.facts.sizes import format_size

Table = tuple[str, Sequence[str], list[list[str]]]

_ROWS = 40


def plan_facts(program: Program, plan: Plan) -> list[tuple[str, str]]:
    """What a plan decided, in words."""
    resident = sum(r.nbytes for r in plan.resident)
    outside = sum(program.payload.storages[s].nbytes for s in plan.outside)
    compute = sum(t.compute_ns for t in plan.traces)
    return [
        ("weights", format_size(program.weight_bytes)),
        ("floor", format_size(program.floor_bytes)),
        (
            "arena",
            f"{format_size(plan.arena_bytes)}, {plan.arena.kind}, {plan.arena.backing}",
        ),
        ("always in memory", f"{format_size(resident)} in the arena, {format_size(outside)} outside"),
        ("streamed each pass", f"{format_size(plan.streamed_bytes)} in {_count_transfers(plan)} transfers"),
        ("predicted", f"{plan.predicted_seconds:.4f} s a pass, {compute / 1e9:.4f} s of it compute"),
        ("no plan is faster than", _bound(plan)),
        ("assumed", f"{plan.hardware.name}: {plan.hardware.note}"),
    ]


def _bound(plan: Plan) -> str:
    if plan.lower_bound_seconds is None or plan.ratio is None:
        return "not found: the solver gave up"
    return f"{plan.lower_bound_seconds:.4f} s; this one takes {plan.ratio:.3f} times as long"


def _count_transfers(plan: Plan) -> int:
    return sum(len(s.transfers) for s in plan.schedules)


def artifact_facts(program: Program) -> dict[str, Any]:
    """What `inspect --json` prints."""
    payload = program.payload
    return {
        "path": str(program.path),
        "version": payload.version,
        "lowering": payload.lowering,
        "torch": payload.torch,
        "weight_bytes": program.weight_bytes,
        "floors": {name: program.floor(arena=name) for name in program.arenas()},
        "files": [asdict(f) for f in payload.files],
        "methods": [asdict(m) for m in payload.methods],
        "weights": [asdict(w) for w in payload.weights],
        "storages": [asdict(s) for s in payload.storages],
        "traces": [asdict(t) for t in payload.traces],
    }


def artifact_tables(program: Program) -> list[Table]:
    """What `inspect` prints: totals, methods, the largest weights."""
    payload = program.payload
    floors = ", ".join(f"{name} {format_size(program.floor(arena=name))}" for name in program.arenas())
    totals = [
        ["lowering", f"{payload.lowering} (torch {payload.torch})"],
        ["weights", f"{format_size(program.weight_bytes)} in {len(payload.storages)} storages"],
        ["floors", floors],
        *[["file", f"{f.path} ({format_size(f.nbytes)})"] for f in payload.files[:_ROWS]],
    ]
    methods = [
        [m.name, str(len(t.steps)), ", ".join(f"{i.name}: {i.dtype} {_shape(i.shape)}" for i in m.inputs)]
        for m in payload.methods
        for t in payload.traces
        if t.graph == m.graph
    ]
    parts = [(w.fqn, w.parts[0], payload.storages[w.parts[0].storage]) for w in payload.tensors]
    largest = sorted(parts, key=lambda row: -row[2].nbytes)[:_ROWS]
    weights = [
        [name, p.dtype, _shape(p.shape), format_size(s.nbytes), s.kind, str(p.storage)]
        for name, p, s in largest
    ]
    title = f"Weights (the largest {_ROWS} of {len(parts)})" if len(parts) > _ROWS else "Weights"
    return [
        (str(program.path), ("", ""), totals),
        ("Methods", ("name", "steps", "inputs"), methods),
        (title, ("weight", "dtype", "shape", "storage bytes", "kind", "storage"), weights),
    ]


def _shape(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def run_facts(done: Outcome) -> dict[str, Any]:
    """What `run --json` prints."""
    return {
        "load_seconds": done.load_seconds,
        "pass_seconds": list(done.pass_seconds),
        "outputs": done.outputs,
        **asdict(done.stats),
    }


def run_table(done: Outcome) -> list[tuple[str, str]]:
    """What `run` prints."""
    stats = done.stats
    return [
        (
            "seconds a pass",
            ", ".join(f"{s:.3f}" for s in done.pass_seconds) + f" (load {done.load_seconds:.3f})",
        ),
        ("memory for weights", f"{format_size(stats.peak_bytes)} at most, of {format_size(stats.budget)}"),
        ("moved", format_size(stats.bytes_moved)),
        ("waited for weights", f"{stats.stall_seconds:.3f} s, {stats.misses} misses"),
        ("weights live in", stats.arena),
        *[("output " + name, shape) for name, shape in done.outputs.items()],
    ]
