"""Runs the two parts, and turns what they found into a screen or JSON and an exit status."""

from __future__ import annotations

import json as json_module
import signal
import sys
import time
from dataclasses import asdict
from types import FrameType
from typing import Any, Literal

from rich.console import Console

from penstock.schedule.facts.errors import PenstockError


def run(*, part: Literal["all", "cap", "real"] = "all", size: str | None = None, json: bool = False) -> int:
    """Run the demo; the exit status.

    `size` is that of the decoder's weights (`2GiB`). With `json`, standard output carries one JSON
    object and standard error the screen. 0 when everything came out as claimed, 1 when something did
    not, 2 when the demo could not run, 130 when interrupted.
    """
    console = Console(file=sys.stderr if json else sys.stdout)
    # As Ctrl-C, so that a demo that is told to end leaves no files and no cgroup behind either.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        facts, holds = _run_parts(console, part, size)
    except PenstockError as error:
        print(f"penstock demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; the temporary files are gone", style="dim")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    if json:
        sys.stdout.write(json_module.dumps(facts, indent=2) + "\n")
    return 0 if holds else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run_parts(console: Console, part: str, size: str | None) -> tuple[dict[str, Any], bool]:
    """What each part found, and whether all of it is as claimed."""
    facts: dict[str, Any] = {}
    holds = True
    start = time.perf_counter()
    if part in {"all", "cap"}:
        from penstock.demo.cap import run_cap

        runs = run_cap(console, size=size)
        facts["cap"] = {**asdict(runs), "equal": runs.equal}
        holds = holds and runs.holds
    if part in {"all", "real"}:
        from penstock.demo.real import run_real

        found = run_real(console)
        facts["real"] = asdict(found)
        holds = holds and found.holds
    facts["seconds"] = time.perf_counter() - start
    console.print(f"\n  {facts['seconds']:.0f} s in all", style="dim", highlight=False)
    return facts, holds
