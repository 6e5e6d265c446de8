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
from penstock.schedule.payload.codec import Payload, plan_from_json
from penstock.schedule.plan import Plan
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
    folder: Path, payload: Payload, budget: int, asked: object, make: Callable[[], Plan]
) -> Plan:
    """The plan for `budget` bytes and the request `asked`: one made before, or one that `make` makes now.

    Two requests are equal if their reprs are, which include the machine's figures. A plan is made anew for
    another artifact or version of penstock, and a plan from the cache is verified again. A program that is
    only in memory has no artifact, and its plans are not kept.
    """
    digest = artifact_digest(folder)
    if digest is None:
        return make()
    name = hashlib.sha256(repr((digest, budget, asked, __version__)).encode()).hexdigest()[:32]
    path = user_cache() / PLANS / f"{name}.json"
    with suppress(OSError, PenstockError, RecursionError):
        plan = plan_from_json(path.read_bytes(), source=str(path))
        verify_plan(payload.storages, payload.traces, plan)
        if plan.budget == budget:
            os.utime(path)
            return plan
    plan = make()
    remember(path, plan.to_json().encode())
    with suppress(OSError):
        _forget_oldest(path.parent)
    return plan


def artifact_digest(folder: Path) -> str | None:
    """The hash of an artifact's payload; None if there is no artifact, as for a program in memory."""
    try:
        return (folder / DIGEST).read_text(encoding="utf-8").partition(" ")[0]
    except (OSError, ValueError):
        return None


def _forget_oldest(folder: Path) -> None:
    plans = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in plans[:-MOST]:
        path.unlink(missing_ok=True)
