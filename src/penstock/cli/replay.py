"""`penstock replay`: what a pool of units would have moved for recorded calls, and the least possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import console, options
from penstock.cli.terminal.options import fail
from penstock.schedule.facts.sizes import format_size

if TYPE_CHECKING:
    from penstock.schedule.facts.model import Pool
    from penstock.schedule.plan import Plan
    from penstock.schedule.sparse.replay import Replay
    from penstock.schedule.sparse.routes import Profile

EXAMPLES = (
    "penstock replay routes.jsonl --artifact model.penstock",
    "penstock replay routes.jsonl --artifact model.penstock --budget 25% --budget 50%",
)

Row = tuple[str | None, "Replay | None"]
"""A budget if one is given, and the replay; none if its plan has no pool."""


def replay(
    routes: Annotated[
        Path,
        typer.Argument(help="What `recorder.save` wrote.", callback=options.check_there, show_default=False),
    ],
    *,
    artifact: Annotated[
        Path,
        typer.Option(
            help="The artifact folder that it was recorded of.",
            callback=options.check_artifact,
            show_default=False,
        ),
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="The pool of the plan within 32MiB, 8GB or 50%, not a ladder. May be given again.",
            callback=options.check_size("--budget"),
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            help="A pool of 32MiB or 8GB, not a ladder. May be given again.",
            callback=options.check_size("--pool", share=False),
        ),
    ] = None,
    keep: options.Keep = None,
    hardware: options.HardwareName = "auto",
    json: options.Json = False,
) -> None:
    """Show the bytes that recorded calls miss by size of the pool: here, with LRU and LFU, and at least."""
    if budget and pool:
        fail("--budget gives the pool of a plan and --pool a pool: give one of them")
    from penstock.runtime.program import read_program
    from penstock.runtime.sparse.units import read_routes
    from penstock.schedule.sparse.replay import replay as replayed
    from penstock.schedule.sparse.routes import profile_of

    program = read_program(artifact)
    facts = program.payload
    profile = profile_of(read_routes(routes), facts.storages, facts.traces, facts.storage_names())
    rows: list[Row] = []
    with console.spinner("replaying") as say:
        decide = partial(program.plan, keep=keep or [], hardware=hardware)
        asked = _planned(profile, budget, decide) if budget else _sized(profile, pool or [])
        for label, of, asked_pool in asked:
            say(f"replaying {format_size(asked_pool.nbytes)}" if asked_pool else "planning")
            rows.append((label, replayed(of, asked_pool) if asked_pool else None))
    if json:
        console.print_json(_facts(artifact, profile, rows))
    else:
        _print(profile, rows)


def _planned(
    profile: Profile, budgets: Sequence[str], decide: Callable[[str], Plan]
) -> Iterator[tuple[str | None, Profile, Pool | None]]:
    """The pool of the plan within each budget, and the profile with what that pool serves."""
    from penstock.schedule.sparse.routes import served_profile

    for budget in budgets:
        plan = decide(budget)
        of = served_profile(profile, plan.traces, plan.pool, plan.names) if plan.pool else profile
        yield budget, of, plan.pool


def _sized(profile: Profile, sizes: Sequence[str]) -> Iterator[tuple[str | None, Profile, Pool | None]]:
    from penstock.schedule.facts.sizes import parse_size
    from penstock.schedule.sparse.replay import ladder_of

    pools = [profile.pool(parse_size(size, name="--pool")) for size in sizes]
    yield from ((None, profile, pool) for pool in pools or ladder_of(profile))


def _facts(artifact: Path, profile: Profile, rows: Sequence[Row]) -> dict[str, Any]:
    replays = [
        {
            "budget": budget,
            "replay": replayed_calls and asdict(replayed_calls) | {"hits": dict(_hits(replayed_calls))},
        }
        for budget, replayed_calls in rows
    ]
    return {"artifact": str(artifact), "calls": len(profile.routes.calls), "replays": replays}


def _hits(replayed_calls: Replay) -> Iterator[tuple[str, float]]:
    moved = {"penstock": replayed_calls.penstock, "lru": replayed_calls.lru, "lfu": replayed_calls.lfu}
    yield from ((name, replayed_calls.hits(policy.nbytes)) for name, policy in moved.items())
    yield "most", replayed_calls.hits(replayed_calls.least_bytes)


def _print(profile: Profile, rows: Sequence[Row]) -> None:
    calls = len(profile.routes.calls)
    done = [replayed_calls for _, replayed_calls in rows if replayed_calls]
    budgets = any(budget for budget, _ in rows)
    cells = []
    for budget, replayed_calls in rows:
        if replayed_calls is None:
            row = ["read whole", *["-"] * 6]
        else:
            missed = [
                format_size(round(n / calls))
                for n in (replayed_calls.penstock.nbytes, replayed_calls.least_bytes)
            ]
            row = [
                format_size(replayed_calls.pool_bytes),
                *missed,
                *(f"{share:.1%}" for _, share in _hits(replayed_calls)),
            ]
        cells.append([budget or "", *row] if budgets else row)
    columns = ("pool", "missed a call", "at least", "penstock", "LRU", "LFU", "Belady")
    title = f"Bytes missed, and hits by policy: {calls} calls"
    if done:
        title += f" of {format_size(round(done[0].asked.nbytes / calls))} each"
    console.print_table(title, ("budget", *columns) if budgets else columns, cells)
    if not all(replayed_calls.exact for replayed_calls in done):
        sentence = (
            "Units have several sizes or share pages: Belady's hits are a bound, which may be out of reach."
        )
        console.print_sentences([sentence])
    if any(replayed_calls.cut for replayed_calls in done):
        sentence = (
            "Some reads do not fit into the smallest pools and run there in rounds, which each pool cuts "
            "differently."
        )
        console.print_sentences([sentence])
