"""Plans of earlier loads, in the user's cache folder: making one takes longer than reading it."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from penstock._version import __version__
from penstock.runtime.files.artifact_files import DIGEST
from penstock.runtime.loading import reading_mode
from penstock.runtime.system.atomic import replace_file
from penstock.runtime.system.user_cache import user_cache
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.payload.codec import Payload, plan_from_json
from penstock.schedule.plan import Plan
from penstock.schedule.verify.proof import verify_plan

MOST = 64
"""Plans that are kept; the ones that were not used for the longest time go first."""


def remembered_plan(
    folder: Path, payload: Payload, budget: int, asked: Sequence[object], make: Callable[[], Plan]
) -> Plan:
    """The plan for `budget` bytes and what else was asked for: from before, or made now and kept.

    A plan is another where the artifact, the machine, the version or the state of the page cache is (which
    decides how fast weights arrive). It is proven again. A folder that cannot be used is not missed.
    """
    path = user_cache() / "plans" / f"{_key(folder, payload, (budget, *asked))}.json"
    with suppress(OSError, PenstockError, RecursionError):
        plan = plan_from_json(path.read_bytes(), source=str(path))
        verify_plan(payload.storages, payload.traces, plan)
        if plan.budget == budget:
            os.utime(path)
            return plan
    plan = make()
    with suppress(OSError, PenstockError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, force=True) as fd:
            os.write(fd, plan.to_json().encode())
        _forget_oldest(path.parent)
    return plan


def _key(folder: Path, payload: Payload, asked: Sequence[object]) -> str:
    mode = reading_mode(payload, folder)
    machine = (platform.node(), platform.machine(), torch.get_num_threads())
    facts = ((folder / DIGEST).read_bytes(), str(folder.resolve()), mode, machine, __version__, *asked)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _forget_oldest(folder: Path) -> None:
    plans = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in plans[:-MOST]:
        path.unlink(missing_ok=True)
