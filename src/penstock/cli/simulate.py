"""`penstock simulate`: a plan on a virtual clock, and the program on a simulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.terminal import console, options
from penstock.schedule.facts.sizes import format_size, format_time

EXAMPLES = (
    "penstock simulate model.penstock --budget 8GB --hardware rtx4090",
    "penstock simulate model.penstock --budget 8GB --device sim:rtx4090",
    "penstock simulate model.penstock --budget 25% --routes routes.jsonl",
)

_STALLS = _CALLS = 20


def simulate(
    artifact: options.Artifact,
    *,
    budget: options.Budget,
    keep: options.Keep = None,
    arena: options.ArenaName = None,
    hardware: options.HardwareName = "auto",
    host_memory: options.HostMemory = None,
    device: options.DeviceName = "cpu",
    routes: Annotated[
        Path | None,
        typer.Option(
            help="Recorded routes: what each call moves, and how long it takes.", callback=options.check_there
        ),
    ] = None,
    trust: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Run a plan on a virtual clock, with `--device sim:NAME` the program too, and show where it waits."""
    from penstock.models.preflight import simulated, simulated_routes
    from penstock.models.trial import run_simulated
    from penstock.runtime.program import open as open_program

    with console.spinner("planning"):
        program = open_program(artifact, trust=trust)
        decided = program.plan(
            budget, keep=keep or (), arena=arena, hardware=hardware, host_memory=host_memory, device=device
        )
        on_clock, on_device = simulated(decided), []
        if routes is not None:
            on_clock = simulated_routes(program, decided, routes, on_clock)
    if device != "cpu":
        with console.spinner(f"running on {device}"):
            on_device = run_simulated(program, decided, device)
    if json:
        console.print_json(on_clock + on_device)
        return
    for result in on_clock:
        _print_on_clock(artifact, result)
    for result in on_device:
        console.print_facts(f"{artifact}: {result['method']} on {result['device']}", _ran(result))


def _print_on_clock(artifact: Path, result: dict[str, Any]) -> None:
    times = {key: format_time(value) for key, value in result.items() if key.endswith("_ns")}
    facts = [
        ("first pass", f"{times['first_ns']}, {times['first_stall_ns']} of it waiting"),
        ("steady pass", f"{times['period_ns']}, {times['stall_ns']} of it waiting"),
        ("predicted", f"{times['predicted_ns']}, compute {times['compute_ns']}"),
        ("copied", f"{format_size(result['copied_bytes'])} a pass"),
    ]
    if result["written_bytes"]:
        facts.append(("written", f"{format_size(result['written_bytes'])} a pass"))
    console.print_facts(f"{artifact}: {result['method']}", facts)
    if "calls" in result:
        _print_calls(result["calls"])
    longest = sorted(result["stalls"], key=lambda stall: -stall["ns"])[:_STALLS]
    if longest:
        title = f"Steps that wait, the longest {len(longest)} of {len(result['stalls'])}"
        console.print_table(title, ("step", "waits"), [[s["step"], format_time(s["ns"])] for s in longest])


def _print_calls(calls: list[dict[str, Any]]) -> None:
    """The means of recorded calls, and those that wait longest."""

    def cells(name: str, some: list[dict[str, Any]]) -> list[str]:
        asked, missed, copied, waits, takes = (
            sum(call[key] for call in some) / len(some)
            for key in ("asked_bytes", "missed_bytes", "copied_bytes", "stall_ns", "total_ns")
        )
        sizes = [format_size(round(nbytes)) for nbytes in (missed, copied)]
        hits = 1 - missed / asked if asked > missed else 0.0
        return [name, f"{hits:.1%}", *sizes, format_time(waits), format_time(takes)]

    if not calls:
        return
    longest = sorted(enumerate(calls), key=lambda pair: -pair[1]["stall_ns"])[:_CALLS]
    rows = [cells("all, on the average", calls), *(cells(str(number), [call]) for number, call in longest)]
    title = f"{len(calls)} recorded calls, and the longest {len(longest)}, numbered from 0"
    console.print_table(title, ("call", "hits", "missed", "copied", "waits", "takes"), rows)


def _ran(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("passes", ", ".join(format_time(seconds * 1e9) for seconds in result["pass_seconds"])),
        ("outputs", ", ".join(f"{name} {shape}" for name, shape in result["outputs"].items())),
        ("copied", format_size(result["bytes_moved"])),
        *([("written", format_size(result["bytes_written"]))] if result["bytes_written"] else []),
        ("races", "none: an event orders every two accesses of the same bytes"),
    ]
