"""Computes figures from samples: medians, ratios within a round, and whether each target is reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.disk.competitors import PEERS

ALLOWANCE = 64 << 20
"""Bytes that penstock may take over its budget and the activations."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A figure that every row to which it applies has to reach."""

    text: str
    figure: str
    bar: float
    at_least: bool
    applies: Callable[[Row], bool]

    def reached(self, value: float) -> bool:
        return value >= self.bar if self.at_least else value <= self.bar


TARGETS = (
    Target(
        "cold, bound by the disk: share of the limit",
        "limit_share",
        0.95,
        True,
        lambda row: row["state"] == "cold" and row["bound"] == "disk",
    ),
    Target(
        "cold, bound by the disk: times as fast as the best peer",
        "best_peer",
        1.5,
        True,
        lambda row: row["state"] == "cold" and row["bound"] == "disk",
    ),
    Target(
        "warm: times as fast as the best peer that holds a bounded memory",
        "best_bounded_peer",
        1.0,
        True,
        lambda row: row["state"] == "warm",
    ),
    Target("warm: time over in-memory", "over_memory", 1.2, False, lambda row: row["state"] == "warm"),
    Target(
        "bound by compute: time over in-memory",
        "over_memory",
        1.03,
        False,
        lambda row: row["state"] in ("cold", "warm") and row["bound"] == "compute",
    ),
    Target(
        "in a memory cgroup of a quarter of the weights: share of the limit",
        "limit_share",
        0.9,
        True,
        lambda row: row["state"] == "cgroup",
    ),
    Target(
        "peak memory over the bare process, budget and activations, MiB",
        "excess_mib",
        ALLOWANCE / 2**20,
        False,
        lambda row: True,
    ),
    Target(
        "budget covers all weights: time over the plain module",
        "over_memory",
        1.02,
        False,
        lambda row: row["state"] == "resident",
    ),
    Target("output bit for bit that of the plain module", "equal", 1, True, lambda row: True),
)


def summarise(case: dict[str, Any], disk_rate: float) -> list[Row]:
    """A row for each competitor that finished the case.

    Ratios are taken within a round, between medians of that round, and then their median over the
    rounds. `disk_rate` (bytes a second) stands in for the round's own where the case has none.
    """
    finished = {name: entry for name, entry in case["competitors"].items() if name not in case["failures"]}
    if "memory" not in finished:
        return []
    memory = finished["memory"]
    activations = max(0, _peak(memory) - memory["held_total"])
    weight_bytes = case["weight_bytes"]
    seconds = {name: [_seconds(train) for train in entry["rounds"]] for name, entry in finished.items()}
    raw = _best(seconds, [name for name in finished if finished[name]["kind"] == "raw"])
    rates = [weight_bytes / value for value in raw] if raw else [disk_rate] * len(seconds["memory"])
    peers = [name for name in finished if finished[name]["kind"] in PEERS]
    bounded = [
        name for name in peers if _peak(finished[name]) - finished[name]["bare_total"] < weight_bytes / 2
    ]
    rows = []
    for name, entry in finished.items():
        row = _count(entry) | {
            "name": name,
            "state": case["state"],
            "model": case["model"],
            "tokens": case["tokens"],
        }
        row["equal"] = _equals(entry, memory)
        row["over_memory"] = _median_ratio(seconds[name], seconds["memory"])
        row["best_peer"] = _median_ratio(_best(seconds, peers), seconds[name])
        row["best_bounded_peer"] = _median_ratio(_best(seconds, bounded), seconds[name])
        if entry["kind"] not in ("memory", "raw"):
            must_move = weight_bytes - entry["budget_bytes"]
            needed = [_needed(train, must_move) for train in entry["rounds"]]
            reading = [nbytes / rate for nbytes, rate in zip(needed, rates, strict=True)]
            limits = [max(pair) for pair in zip(reading, seconds["memory"], strict=True)]
            row["bound"] = "disk" if median(reading) > median(seconds["memory"]) else "compute"
            row["limit_share"] = _median_ratio(limits, seconds[name]) if raw else None
        if entry["kind"] == "penstock":
            peak = max(_peak(entry), entry["load_peak"]) - entry["bare_total"]
            row["excess_mib"] = (peak - entry["budget_bytes"] - activations) / 2**20
        rows.append(row)
    return rows


def judge(rows: list[Row]) -> list[dict[str, Any]]:
    """Each target with the worst row that it applies to; `met` is None where nothing was measured."""
    verdicts = []
    for target in TARGETS:
        values = [
            (row[target.figure], f"{row['model']}, {row['tokens']} tokens, {row['state']}: {row['name']}")
            for row in rows
            if row["kind"] == "penstock" and target.applies(row) and row.get(target.figure) is not None
        ]
        verdict: dict[str, Any] = {"target": target.text, "bar": target.bar, "at_least": target.at_least}
        verdict |= {"worst": None, "where": None, "met": None, "reached": 0, "of": len(values)}
        if values:
            worst, where = (min if target.at_least else max)(values)
            verdict |= {"worst": worst, "where": where, "met": target.reached(worst)}
            verdict["reached"] = sum(target.reached(value) for value, _ in values)
        verdicts.append(verdict)
    return verdicts


def _seconds(train: dict[str, Any]) -> float:
    return float(median(sample["seconds"] for sample in train["samples"]))


def _peak(entry: dict[str, Any]) -> int:
    """The most that the process held since it had loaded, in bytes."""
    return max((int(train["peak_total"]) for train in entry["rounds"]), default=0)


def _equals(entry: dict[str, Any], memory: dict[str, Any]) -> bool | None:
    """Whether every output was that of the plain module; None where there is none."""
    outputs = {train["output"] for train in entry["rounds"]}
    return None if outputs == {None} else outputs == {train["output"] for train in memory["rounds"]}


def _best(seconds: dict[str, list[float]], names: list[str]) -> list[float]:
    """The fewest seconds of any of `names` in each round."""
    return [min(values) for values in zip(*(seconds[name] for name in names), strict=True)]


def _median_ratio(numerators: list[float], denominators: list[float]) -> float | None:
    if not numerators:
        return None
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def _needed(train: dict[str, Any], must_move: int) -> float:
    """Bytes of a pass that have to come from the disk: what the budget cannot hold.

    With a cold cache these are never more than the disk delivered, so that bytes which the cache has kept
    after all improve no figure.
    """
    read = [
        sample["disk_bytes"] + sample["gap_bytes"] for sample in train["samples"] if "gap_bytes" in sample
    ]
    return float(min([must_move, *([median(read)] if read else [])]))


def _count(entry: dict[str, Any]) -> Row:
    samples = [sample for train in entry["rounds"] for sample in train["samples"]]
    values = [sample["seconds"] for sample in samples]
    row: Row = {
        "kind": entry["kind"],
        "budget_bytes": entry["budget_bytes"],
        "seconds_min": min(values),
        "seconds_median": median(values),
        "disk_bytes": median(sample["disk_bytes"] for sample in samples),
        "cached": max((sample["cached"] for sample in samples if "cached" in sample), default=None),
        "anonymous_bytes": entry["peak_anonymous"] - entry["bare_anonymous"],
        "total_bytes": _peak(entry) - entry["bare_total"],
        "load_seconds": entry["load_seconds"],
    }
    if "misses" in samples[0]:
        row["misses"] = sum(sample["misses"] for sample in samples)
        row["stall_seconds"] = median(sample["stall_seconds"] for sample in samples)
        row["bytes_moved"] = median(sample["bytes_moved"] for sample in samples)
    return row
