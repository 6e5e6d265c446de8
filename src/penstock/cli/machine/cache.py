"""`penstock cache`: the entries of the cache, and their removal."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.terminal import console
from penstock.cli.terminal.options import Json, check_size, fail
from penstock.runtime.cache import LIMIT, Entry, Pruned, list_entries, user_cache
from penstock.runtime.cache import prune as prune_entries
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size

EXAMPLES = (
    "penstock cache list",
    "penstock cache prune --older-than 30d --to 20GB",
    "penstock cache clear --model Llama-3.2-1B",
)

cache = typer.Typer(
    help="What penstock keeps of models: weights, programs, calls and plans. All of it can be made again.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path | None, typer.Option("--cache", help="The folder. Default: penstock in the user's cache folder.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Remove nothing, and say what would go.")]

_ONLY_LEFTOVERS = (
    f"Only leftovers of killed runs are removed without --older-than 30d, --to 20GB or {LIMIT}: give one of "
    "them, or `penstock cache clear` to remove everything."
)

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(min|h|d|w)", re.IGNORECASE)
_SECONDS = {"min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

_COLUMNS = ("made for", "what", "size", "last used")

Group = list[Entry]

_WORDS = {
    "weights": "{number} set{s} of weights",
    "program": "{number} program{s}",
    "call": "{number} exported call{s}",
    "plan": "{number} plan{s}",
    "rates": "measured rates",
    "leftover": "{number} leftover{s} of killed runs",
}
"""What a table calls entries of a kind."""

_FOR = {"call": "all models", "plan": "all models", "rates": "this machine", "leftover": "nothing any more"}
"""What entries of a kind are for that do not say it themselves."""


@cache.command()
def list(*, cache: Folder = None, json: Json = False) -> None:
    """List what is in the cache: what it is made for, its size and its last use."""
    folder = cache or user_cache()
    entries = list_entries(folder)
    total = sum(cached.nbytes for cached in entries)
    limit = _limit()
    if json:
        facts = [_facts(cached) | {"in_use": cached.in_use} for cached in entries]
        console.print_json({"cache": str(folder), "bytes": total, "limit": limit, "entries": facts})
        return
    if not entries:
        console.print_text(f"nothing is kept in {folder}")
        return
    bound = f", {LIMIT} is {format_budget(limit)}" if limit else ""
    console.print_table(f"{folder}: {format_size(total)}{bound}", _COLUMNS, _rows(entries))


@cache.command()
def prune(
    *,
    older_than: Annotated[
        str | None, typer.Option(help="Remove what was last used longer ago: 12h, 30d, 6w.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Remove what was used least recently, until so much is left: 20GB.",
            callback=check_size("--to", share=False),
        ),
    ] = None,
    dry_run: DryRun = False,
    cache: Folder = None,
    json: Json = False,
) -> None:
    """Remove leftovers of killed runs, and entries that are too old or exceed a limit. Entries in use stay.

    Without options, the limit is that of PENSTOCK_CACHE_LIMIT; if that is not set, only leftovers go.
    """
    before = -math.inf if older_than is None else time.time() - _seconds(older_than)
    limit = _limit() if older_than is None else None
    most = parse_size(to, name="--to") if to else limit or math.inf
    folder = cache or user_cache()
    _report(prune_entries(folder, before=before, most=most, dry_run=dry_run), dry_run, json)
    if not json and not to and limit is None and older_than is None:
        console.print_sentences([_ONLY_LEFTOVERS])


@cache.command()
def clear(
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Only what was made for this model: a part of its name in `list`.")
    ] = None,
    dry_run: DryRun = False,
    cache: Folder = None,
    json: Json = False,
) -> None:
    """Remove all entries that are not in use, or those of a model. On a terminal, you are asked first."""
    folder = cache or user_cache()
    entries = list_entries(folder)
    going = [cached for cached in entries if model is None or model.lower() in cached.made_for.lower()]
    if model is not None and not going:
        models = ", ".join(sorted({cached.made_for for cached in entries} - {""})) or "no model"
        fail(f"nothing in {folder} was made for {model!r}: it has entries of {models}")
    if not yes and not dry_run and sys.stdin.isatty():
        total = sum(cached.nbytes for cached in going)
        if not typer.confirm(f"remove {format_size(total)} from {folder}?", err=True):
            fail("nothing was removed")
    done = prune_entries(folder, before=math.inf, dry_run=dry_run, only={cached.path for cached in going})
    _report(done, dry_run, json)


def _limit() -> int | None:
    limit = os.environ.get(LIMIT)
    return parse_size(limit, name=LIMIT) if limit else None


def _seconds(age: str) -> float:
    match = _AGE.fullmatch(age.strip())
    if match is None:
        fail(f"--older-than {age!r} is no age: write 90min, 12h, 30d or 6w")
    return float(match[1]) * _SECONDS[match[2].lower()]


def _facts(cached: Entry) -> dict[str, Any]:
    return {
        "kind": cached.kind,
        "path": str(cached.path),
        "made_for": cached.made_for,
        "bytes": cached.nbytes,
        "last_used": datetime.fromtimestamp(cached.used, UTC).isoformat(timespec="seconds"),
    }


def _rows(entries: Sequence[Entry]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for the entries of a kind that are made for one model, by model: kinds as in _WORDS."""
    groups: dict[tuple[str, str], Group] = {}
    kinds = [*_WORDS]
    for cached in sorted(
        entries, key=lambda cached: (not cached.made_for, _for(cached), kinds.index(cached.kind))
    ):
        groups.setdefault((cached.kind, _for(cached)), []).append(cached)
    for (kind, made_for), group in groups.items():
        words = _WORDS[kind].format(number=len(group), s="" if len(group) == 1 else "s")
        in_use = any(cached.in_use for cached in group)
        used = "in use" if in_use else _ago(max(cached.used for cached in group))
        yield made_for, words, format_size(sum(cached.nbytes for cached in group)), used


def _for(cached: Entry) -> str:
    return cached.made_for or _FOR.get(cached.kind, "unknown")


def _ago(used: float) -> str:
    seconds = max(0.0, time.time() - used)
    unit = next((unit for unit in ("d", "h", "min") if seconds >= _SECONDS[unit]), None)
    return f"{seconds / _SECONDS[unit]:.0f} {unit} ago" if unit else "now"


def _report(done: Pruned, dry_run: bool, json: bool) -> None:
    if json:
        console.print_json(
            {
                "dry_run": dry_run,
                "removed": [_facts(cached) for cached in done.removed],
                "in_use": [_facts(cached) for cached in done.in_use],
                "freed_bytes": done.freed_bytes,
                "left_bytes": done.left_bytes,
            }
        )
        return
    would = "would be " * dry_run
    if done.removed:
        console.print_table(f"{would}removed", _COLUMNS, _rows(done.removed))
    in_use = f", of which {len(done.in_use)} in use should have gone" if done.in_use else ""
    console.print_text(
        f"{format_size(done.freed_bytes)} {would}freed, {format_size(done.left_bytes)} left{in_use}"
    )
