"""Remembers results that take time to find in the user's cache, above all plans."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock._version import __version__
from penstock.runtime.cache import PLANS, user_cache
from penstock.runtime.files.artifact_files import DIGEST
from penstock.runtime.system.atomic import replace_file
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.problem import Problem
from penstock.schedule.payload.codec import Payload, plan_from_json
from penstock.schedule.plan import Plan
from penstock.schedule.planner import with_figures
from penstock.schedule.verify.proof import verify_plan

MOST = 64
"""The number of plans that are kept; the least recently used ones are removed first."""


def remember(path: Path, data: bytes) -> None:
    """Write a file in the user's cache. A failure is ignored, since the file can be made again."""
    with suppress(OSError, PenstockError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, force=True) as fd:
            os.write(fd, data)


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
    equal if their reprs are. Where only the figures differ, the decisions of the latest plan are kept if they
    are still good (`with_figures`). A plan is made anew for another artifact or version of penstock, and a
    plan from the cache is verified again. A program that is only in memory has no artifact, and its plans are
    not kept.
    """
    digest = artifact_digest(folder)
    if digest is None:
        return make()
    kind = _hash((digest, request, problem.arena, problem.hardware.name, __version__))
    figures = _hash((problem.hardware, [trace.compute_ns for trace in problem.traces]))
    path = user_cache() / PLANS / f"{kind}-{figures}.json"
    plan = _read(path, payload, budget)
    if plan is not None:
        with suppress(OSError):
            os.utime(path)
        return plan
    others = sorted(path.parent.glob(f"{kind}-*.json"), key=_used)
    known = _read(others[-1], payload, budget) if others else None
    plan = (with_figures(known, problem) if known else None) or make()
    remember(path, plan.to_json().encode())
    with suppress(OSError):
        _forget_oldest(path.parent)
    return plan


def _hash(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _used(path: Path) -> float:
    """Returns when a plan was last used, in seconds; 0 for one that is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path, payload: Payload, budget: int) -> Plan | None:
    """Returns the plan in a file, verified; None if there is none that is safe and for this budget."""
    with suppress(OSError, PenstockError, RecursionError):
        plan = plan_from_json(path.read_bytes(), source=str(path))
        verify_plan(payload.storages, payload.traces, plan)
        return plan if plan.budget == budget else None
    return None


def artifact_digest(folder: Path) -> str | None:
    """The hash of an artifact's payload; None if there is no artifact, as for a program in memory."""
    try:
        return (folder / DIGEST).read_text(encoding="utf-8").partition(" ")[0]
    except (OSError, ValueError):
        return None


def _forget_oldest(folder: Path) -> None:
    plans = sorted(folder.glob("*.json"), key=_used)
    for path in plans[:-MOST]:
        path.unlink(missing_ok=True)
