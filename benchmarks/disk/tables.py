"""The results of benchmarks/disk as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.disk.reader import choose_fastest
from penstock.schedule.facts.sizes import format_size

_COLUMNS = (
    "competitor",
    "s, min",
    "s, median",
    "x in-memory",
    "share of limit",
    "x best peer",
    "anonymous MiB",
    "total MiB",
    "moved MiB",
    "misses",
    "stall s",
)


def render(result: dict[str, Any]) -> str:
    """Return hardware and one table a case."""
    parts = [_describe(result)]
    for case in result["cases"]:
        parts.append(_render_case(case))
    return "\n".join(parts)


def _describe(result: dict[str, Any]) -> str:
    hardware, options = result["hardware"], result["options"]
    ways = ", ".join(
        f"{best['way']} {best['bytes_per_s'] / 1e9:.2f} GB/s ({best['threads']} threads, "
        f"blocks of {format_size(best['block'])})"
        for best in choose_fastest(result["readers"]).values()
    )
    return (
        f"{hardware['date']}: {hardware['cpu']}, {hardware['cores']} cores, "
        f"{format_size(hardware['memory_bytes'])} of memory, Linux {hardware['kernel']}, "
        f"Python {hardware['python']}, torch {hardware['torch']}. "
        f"{format_size(options['nbytes'])} of weights; "
        f"{options['rounds']} rounds of {options['passes']} passes. "
        f"The bare disk: {ways}.\n"
    )


def _render_case(case: dict[str, Any]) -> str:
    lines = [f"### {case['model']}, {case['tokens']} tokens, {case['state']}", ""]
    if case["cgroup_bytes"]:
        lines += [
            f"A memory cgroup each, of its bare process and {format_size(case['cgroup_bytes'])}, "
            "but for memory and disk.",
            "",
        ]
    if case["rows"]:
        lines += ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
        lines += ["| " + " | ".join(_render_row(row)) + " |" for row in case["rows"]]
    lines += [f"- not run: {case['skipped']}"] if case["skipped"] else []
    lines += [f"- {reason}" for reason in case["failures"].values()]
    return "\n".join(lines) + "\n"


def _render_row(row: dict[str, Any]) -> list[str]:
    name = row["name"] + ("" if row["equal"] in (True, None) else " (other output)")
    mib = [row["anonymous_bytes"], row["total_bytes"], row.get("bytes_moved")]
    return [
        name,
        f"{row['seconds_min']:.3f}",
        f"{row['seconds_median']:.3f}",
        _number(row["over_memory"]),
        _number(row.get("limit_share")),
        _number(row["best_peer"]),
        *("" if value is None else f"{value / 2**20:.0f}" for value in mib),
        _number(row.get("misses"), 0),
        _number(row.get("stall_seconds")),
    ]


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_NAMES = {"memory": "everything in memory", "mmap": "mmap", "accelerate": "accelerate, to disk"}
_NAMES |= {"diffusers": "diffusers, to disk"}
_OURS, _OTHERS = "#0072b2", "#b8c0c8"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a picture of the median seconds of a pass: of the first model and number of tokens, by state."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = result["cases"][0]
    cases = {
        case["state"]: case["rows"]
        for case in result["cases"]
        if (case["model"], case["tokens"]) == (first["model"], first["tokens"])
        and case["state"] != "resident"
    }
    titles = {"cold": "cold page cache", "warm": "warm page cache", "cgroup": "in a memory cgroup"}
    figure, axes = pyplot.subplots(1, len(cases), figsize=(9.6, 2.5), layout="constrained")
    for (state, rows), ax in zip(cases.items(), axes, strict=True):
        bars = {_NAMES.get(row["name"], row["name"]): row["seconds_median"] for row in rows if _shown(row)}
        ours = [name.startswith("penstock") for name in bars]
        drawn = ax.barh(list(bars), list(bars.values()), color=[_OURS if own else _OTHERS for own in ours])
        ax.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
        ax.set_title(titles[state], fontsize=10)
        ax.set_xlabel("seconds a pass", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.15)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _shown(row: dict[str, Any]) -> bool:
    return not row["name"].startswith("disk")
