"""The tables of benchmarks/experts, and what was asked of reads by units beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

BEGIN = "<!-- benchmarks.experts writes {model} from here -->"
_OF_WHOLE = {"uniform": 1 / 7, "zipf": 1 / 12, "recorded": 1 / 7}
"""At most what part of the bytes that are read whole, by routing."""

_HEAD = (
    "way",
    "s a token",
    "times units",
    "of a processor, s",
    "MiB read",
    "MiB moved",
    "peak MiB",
    "result",
)


class Verdict(NamedTuple):
    """What was asked of one figure, `at_most` or at least `bar`, and what was measured."""

    what: str
    bar: float
    at_most: bool
    measured: float

    @property
    def met(self) -> bool:
        return self.measured <= self.bar if self.at_most else self.measured >= self.bar

    def render(self) -> str:
        sign = "at most" if self.at_most else "at least"
        met = "yes" if self.met else "**no**"
        return f"| {self.what} | {sign} {self.bar:.3g} | {self.measured:.3f} | {met} |"


def render(result: dict[str, Any]) -> str:
    """The facts of a run, its verdicts, and one table a routing, as Markdown."""
    options, machine = result["options"], result["machine"]
    floors = " and ".join(f"{nbytes / 2**20:.0f}" for nbytes in result["floors"])
    within = "a memory group each" if options["group"] else "no memory groups"
    lines = [
        f"{options['model']}, {options['layers']} layers: {result['weights'] / 2**20:.0f} MiB of weights, "
        f"of which a token asks for {result['asked'] / 2**20:.0f} MiB of experts; {within}, of "
        f"{options['share']:.0%} of the weights; {options['tokens']} tokens behind {options['warm_up']}. "
        f"Floors, by units and whole: {floors} MiB. {machine['cpu']}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['date']}.",
        "",
        "| figure | asked | measured | met |",
        "|---|---|---|---|",
        *(verdict.render() for verdict in judge(result)),
    ]
    tables = result["tables"] | {"everything in memory": result["full"]}
    for title, ways in tables.items():
        lines += [
            "",
            f"### {options['model']}, {title}",
            "",
            f"| {' | '.join(_HEAD)} |",
            "|---" * len(_HEAD) + "|",
        ]
        lines += _rows(ways, options["warm_up"])
    return "\n".join(lines) + "\n"


def judge(result: dict[str, Any]) -> list[Verdict]:
    """The verdicts of a run, as far as the ways that they need were measured."""
    skip = result["options"]["warm_up"]
    found = [one for routing, ways in result["tables"].items() for one in _judge(routing, ways, skip)]
    everything = {name: _steps(way, skip) for name, way in result["full"].items()}
    if all(everything.values()):
        speed = _ratios(everything["memory"], everything["full"], "seconds")
        found.append(Verdict("speed of everything in memory, with room for all", 0.97, False, median(speed)))
    found.append(Verdict("outputs that differ", 0, True, float(_differing(result))))
    return found


def _judge(routing: str, ways: dict[str, Any], skip: int) -> Iterator[Verdict]:
    steps = {name: _steps(way, skip) for name, way in ways.items() if name != "disk"}
    units, before = steps.get("units"), steps.get("before")
    if not units:
        return
    for other, bar in (("before", _OF_WHOLE[routing]), ("mmap", 0.45)):
        read = sum(step["read"] for step in steps.get(other) or [])
        if read:
            ratio = sum(step["read"] for step in units) / read
            name = "whole" if other == "before" else other
            yield Verdict(f"{routing}: bytes against those of {name}", bar, True, ratio)
    pairs = _pairs(ways.get("disk"), skip)
    if not pairs or not steps.get("memory"):
        return
    rates = [sum(one["read"] for one in pair) / sum(one["seconds"] for one in pair) for pair in pairs]
    computed = [step["seconds"] for step in steps["memory"]]
    least = [step["read"] / rate + c for step, rate, c in zip(units, rates, computed, strict=True)]
    over = [step["seconds"] / one for step, one in zip(units, least, strict=True)]
    yield Verdict(
        f"{routing}: time against missed bytes at the disk's rate, and compute", 1.15, True, median(over)
    )
    if before:
        bound = all(s["read"] / rate > c for s, rate, c in zip(units, rates, computed, strict=True))
        said = "time against whole's, where the disk bounds" + ("" if bound else " (here compute does)")
        yield Verdict(f"{routing}: {said}", 0.25, True, median(_ratios(units, before, "seconds")))


def _rows(ways: dict[str, Any], skip: int) -> Iterator[str]:
    own = next((_steps(ways[name], skip) for name in ("units", "full") if name in ways), None)
    for name, way in ways.items():
        if way["failure"]:
            yield f"| {name} | {way['failure']} |" + " |" * (len(_HEAD) - 2)
            continue
        if name == "disk":
            rates = [step["read"] / step["seconds"] / 1e9 for step in way["steps"][2 * skip :]]
            yield (
                f"| {name} | {median(rates):.2f} GB/s ({min(rates):.2f} to {max(rates):.2f}) |"
                + " |" * (len(_HEAD) - 2)
            )
            continue
        steps = _steps(way, skip)
        seconds = [step["seconds"] for step in steps]
        moved = (way["steps"][-1]["moved"] - way["steps"][skip - 1]["moved"]) / len(steps)
        cells = [
            f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
            f"{median(_ratios(steps, own, 'seconds')):.2f}" if own else "",
            f"{median(step['processor'] for step in steps):.3f}",
            f"{sum(step['read'] for step in steps) / len(steps) / 2**20:.0f}",
            f"{moved / 2**20:.0f}",
            f"{max(step['peak'] for step in way['steps']) / 2**20:.0f}",
            "equal" if not _unequal(ways, name) else "**different**",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _steps(way: dict[str, Any], skip: int) -> list[dict[str, Any]]:
    """The steps that count; none of a way that failed."""
    return [] if way["failure"] else way["steps"][skip:]


def _pairs(disk: dict[str, Any] | None, skip: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The two reads of the bare disk in each round that counts."""
    steps = [] if disk is None else _steps(disk, 2 * skip)
    return list(zip(steps[::2], steps[1::2], strict=True))


def _ratios(some: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], what: str) -> list[float]:
    """The ratio of each round."""
    return [one[what] / other[what] for one, other in zip(some, others, strict=True)]


def _unequal(ways: dict[str, Any], name: str) -> int:
    """How many outputs of a way are not those of the first that did not fail."""
    first = next(way for other, way in ways.items() if other != "disk" and not way["failure"])
    pairs = zip(first["steps"], ways[name]["steps"], strict=True)
    return sum(one["digest"] != other["digest"] for one, other in pairs)


def _differing(result: dict[str, Any]) -> int:
    tables = [*result["tables"].values(), result["full"]]
    return sum(
        _unequal(ways, name)
        for ways in tables
        for name, way in ways.items()
        if name != "disk" and not way["failure"]
    )
