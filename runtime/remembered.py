"""Remembers plans, which take time to find, in the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock._version import __version__
from penstock.runtime.cache import MADE_FOR, PLANS, remember, user_cache
from penstock.runtime.files.artifact_files import artifact_digest
from penstock.schedule.bounded_file import read_bounded
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.problem import Problem
from penstock.schedule.payload.codec import Payload, plan_from_json
from penstock.schedule.plan import Plan
from penstock.schedule.planner import with_figures
from penstock.schedule.verify.proof import verify_plan

MOST = 64
"""The number of plans that are kept; the least recently used ones are removed first."""

NEARNESS = 1.01
"""How much further from the bound, as a factor, decisions may be under other figures without a new search."""


def remembered_plan(
    folder: Path,
    payload: Payload,
    request: object,
    problem: Problem,
    *,
    budget: int,
    make: Callable[[], Plan],
) -> Plan:
    """The plan for `budget` bytes and a request: one made before, or one that `make` makes now.

    `problem` is what is planned, with the machine's present figures. Two requests, and two problems, are
    equal if their reprs are. Where only the figures differ, the decisions made before are kept if they are as
    near to the bound as they were when they were searched, to within `NEARNESS`. A plan is made anew for
    another artifact or version of penstock, and a plan from the cache is verified again. A program that is
    only in memory has no artifact, and its plans are not kept.
    """
    digest = artifact_digest(folder)
    if digest is None:
        return make()
    methods = [method.name for method in payload.methods]  # of a training program, those of one rung
    units = problem.pool and replace(problem.pool, expected_ns=(), worst_ns=())
    asked = repr((digest, methods, request, problem.arena, units, problem.hardware.name, __version__))
    path = user_cache() / PLANS / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    known, nearness = _read(path, payload, budget)
    if known is not None and (known.hardware, known.traces) == (problem.hardware, problem.traces):
        with suppress(OSError):
            os.utime(path)
        return known
    plan = with_figures(known, problem, NEARNESS * nearness) if known else None
    if plan is None:
        plan = make()
        nearness = plan.predicted_ns / plan.lower_bound_ns if plan.lower_bound_ns else 0.0
    made_for = json.dumps(str(folder.absolute()))
    data = f'{{"{MADE_FOR}": {made_for}, "nearness": {nearness!r}, "plan": {plan.to_json()}}}'
    remember(path, data.encode())
    with suppress(OSError):
        _forget_oldest(path.parent)
    return plan


def _read(path: Path, payload: Payload, budget: int) -> tuple[Plan | None, float]:
    """Returns the plan in a file, verified, and how near to its bound it was when it was searched.

    There is no plan where none is safe and for this budget.
    """
    with suppress(OSError, PenstockError, RecursionError, ValueError, KeyError, TypeError):
        stored = json.loads(read_bounded(path, "a plan"))
        plan = plan_from_json(json.dumps(stored["plan"]).encode(), source=str(path))
        verify_plan(payload.storages, payload.traces, plan)
        if plan.budget == budget:
            return plan, float(stored["nearness"])
    return None, 0.0


def _forget_oldest(folder: Path) -> None:
    plans = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in plans[:-MOST]:
        path.unlink(missing_ok=True)
