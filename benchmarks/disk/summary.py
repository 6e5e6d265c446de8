"""Computes figures from samples: medians, and ratios within a round."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.disk.competitors import PEERS

Row = dict[str, Any]


def summarise(case: dict[str, Any]) -> list[Row]:
    """A row for each competitor that finished the case.

    Ratios are taken within a round, between medians of that round, and then their median over the rounds.
    """
    finished = {name: entry for name, entry in case["competitors"].items() if name not in case["failures"]}
    if "memory" not in finished:
        return []
    memory = finished["memory"]
    weight_bytes = case["weight_bytes"]
    seconds = {name: [_seconds(train) for train in entry["rounds"]] for name, entry in finished.items()}
    raw = _best(seconds, [name for name in finished if finished[name]["kind"] == "raw"])
    peers = [name for name in finished if finished[name]["kind"] in PEERS]
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
        if raw and entry["kind"] not in ("memory", "raw"):
            must_move = weight_bytes - entry["budget_bytes"]
            needed = [_needed(train, must_move) for train in entry["rounds"]]
            reading = [nbytes * own / weight_bytes for nbytes, own in zip(needed, raw, strict=True)]
            limits = [max(pair) for pair in zip(reading, seconds["memory"], strict=True)]
            row["limit_share"] = _median_ratio(limits, seconds[name])
        rows.append(row)
    return rows


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
