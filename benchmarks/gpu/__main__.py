"""Nine minutes on a GPU, in two runs: what only real hardware tells about penstock, the most important first.

Each step runs in a process of its own with a limit of its own; one that fails, crashes or hangs is a line
with its reason, and the next one begins. Every line of the standard output is a JSON object, which is printed
and appended to the results file at once. At the end, the standard error gets a table of all results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu import isolation, results, steps

NEEDED = ("torch", "numpy", "safetensors", "networkx", "scipy", "pydantic", "pydantic_core")
"""Packages without which nothing runs. torch brings networkx."""

LEAST_TORCH = (2, 11)
"""The oldest torch that has what devices are driven by."""

LONGEST_START = 60
"""The most seconds that a script may take before it runs this one."""

CARRIED = "pydantic pydantic-core annotated-types typing-inspection typing-extensions"
"""What pydantic consists of; pydantic-core's wheel is for one version of Python and one processor."""

USEFUL = {"accelerate": "peers", "diffusers": "peers"}
"""Packages that a step measures where they are."""

EXAMPLES = """\
examples:
  python -m benchmarks.gpu --minutes 4.5 --results FIRST         the first CUDA device, at full size
  python -m benchmarks.gpu --minutes 4.5 --continue FIRST --results SECOND
                                                                 the steps that FIRST has not finished
  python -m benchmarks.gpu --only machine,suite,copies           three steps
  python -m benchmarks.gpu --device rig --scale 0.0005           tries the script on the rig, measures nothing

on a machine with torch, where nothing can be installed, carry pydantic as wheels (for its Python):
  python3 -m pip install --no-index --no-deps --target SITE WHEELS/*.whl
  PYTHONPATH=SITE python3 -m benchmarks.gpu --results gpu.jsonl
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    shown = "\n".join(f"  {name:8} {step.seconds:4} s  {step.shows}" for name, step in steps.STEPS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"{__doc__}\nsteps, and how long each may take beside what earlier ones leave:\n{shown}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, xpu, rig, or sim:h200 (default: cuda)"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes (default: 1)")
    parser.add_argument("--only", default="", help="names of steps, separated by ','")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="since this process began, run.sh included (default: 10)"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="a factor for limits (default: 1)")
    parser.add_argument("--results", type=Path, help="the file to which each line is appended at once")
    parser.add_argument(
        "--continue",
        type=Path,
        dest="first",
        metavar="FILE",
        help="results whose finished steps are left out",
    )
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.only = [name for name in given.only.split(",") if name] or list(steps.STEPS)
    if unknown := set(given.only) - set(steps.STEPS):
        parser.error(f"there is no step {', '.join(sorted(unknown))}: choose from {', '.join(steps.STEPS)}")
    if not 0 < given.scale <= 1:
        parser.error(f"--scale is a share of the full sizes, above 0 and at most 1, got {given.scale}")
    if given.results and given.results.is_dir():
        parser.error(f"--results is a file to append to, got the folder {given.results}")
    if given.first and not given.first.is_file():
        parser.error(f"--continue is the results file of a run, and there is no file {given.first}")
    return given


def missing() -> dict[str, Any]:
    """What is not there, as the fields of a line: `missing` stops everything, `left_out` a step or two."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if (torch := torch_version()) and tuple(map(int, torch.split(".")[:2])) < LEAST_TORCH:
        lacking.append(f"torch>={LEAST_TORCH[0]}.{LEAST_TORCH[1]}")
    left_out = {name: step for name, step in USEFUL.items() if find_spec(name) is None}
    found: dict[str, Any] = {"torch": torch, "missing": lacking, "left_out": left_out}
    if lacking:
        carry = CARRIED if any(name.startswith("pydantic") for name in lacking) else " ".join(lacking)
        found["do"] = f"install them, or carry the wheels of {carry} and name their folder in PYTHONPATH"
    return found


def torch_version() -> str:
    """The version of torch by its own record, without importing it; empty where there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


class OtherCardError(Exception):
    """The results that are continued are of another device, or of other sizes."""


def run_all(given: argparse.Namespace, before: Sequence[results.Line]) -> Iterator[results.Line]:
    """Yield the lines of all steps that are asked for and not finished, as long as there is time.

    A step may take its limit, and what earlier ones have left of theirs. One for which less than half of its
    limit is left does not begin: the next run has the time. A run that continues another measures `machine`
    again, and goes on if that tells the same device and scale.
    """
    lines = {"step": "check", "python": sys.version.split()[0], "device": given.device, **missing()}
    yield lines
    if lines["missing"]:
        return
    due = time.monotonic()
    end = due - seconds_since_start() + 60 * given.minutes * given.patience
    arguments = ["--device", given.device, "--scale", str(given.scale)]
    card, finished = results.card_of(before), results.finished_steps(before) - {"machine"}
    for name in dict.fromkeys([*["machine"] * bool(card), *given.only]):
        if name in finished:
            continue
        left, limit = end - time.monotonic(), steps.STEPS[name].seconds * given.patience
        due += limit
        if left < limit / 2:
            reason = (
                f"{max(0, left):.0f} s are left, and it may take {limit:.0f} s: give --continue to a new run"
            )
            yield {"step": name, "outcome": "failed", "reason": reason}
            continue
        for line in isolation.run(name, arguments, min(end, due) - time.monotonic()):
            yield line
            if card and (here := results.card_of([line]) or card) != card:
                raise OtherCardError(f"{given.first} is of {card}, and this is {here}: begin anew")


def seconds_since_start() -> float:
    """Return the age of this process. A shell script that ended in `exec` counts: the process is the same.

    Where the system tells more than `LONGEST_START`, its clocks differ, as a sandbox's may.
    """
    with suppress(OSError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        if 0 <= age <= LONGEST_START:
            return age
    return time.process_time()


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every step is done, 1 if one has failed, and 2 if no step can be run."""
    given = parse(arguments)
    if given.step:
        return steps.run(given.step, given.device, given.scale, given.limit)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step's process is killed, too
    before = results.read_lines(given.first) if given.first else []
    found: list[dict[str, Any]] = []
    try:
        for line in run_all(given, before):
            found.append(line)
            if given.results:  # before it is printed: what was seen is on the disk
                results.append_line(given.results, line)
            print(json.dumps(line), flush=True)
    except OtherCardError as error:
        print(error, file=sys.stderr)
        return 2
    print(results.make_table([before, found], steps.STEPS), file=sys.stderr)
    if found[0]["missing"]:
        return 2
    return int(any(line.get("outcome") == "failed" for line in found))


if __name__ == "__main__":
    sys.exit(main())
