"""The verdict on a plan: the sentences that the terminal, the page and the JSON output share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from penstock.schedule.clock.launches import launched_steps, launches_ns
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.hardware import host_beside
from penstock.schedule.facts.model import Decisions, Method
from penstock.schedule.facts.sizes import format_budget, format_size, format_time
from penstock.schedule.report.baselines import REST
from penstock.schedule.report.whatif import best_ns, other_policies, replayed_ns

Limit = Literal["compute", "link", "disk", "memory", "units", "host"]

_ALIKE = 1.02
"""Two times are called equal if their ratio is at most this."""


@dataclass(frozen=True)
class Origin:
    """Where a plan comes from: its artifact's name, the command that made it, and the tokens of its passes.

    `tokens` has the number of tokens in a pass of each method that takes tokens, by the method's name.
    """

    artifact: str = ""
    command: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)


def tokens_of(methods: Iterable[Method]) -> dict[str, int]:
    """The tokens in a pass of each method that takes `input_ids`, at the sizes that it was exported with."""
    found = {}
    for method in methods:
        examples = {symbol.name: symbol.example for symbol in method.symbols}
        for one in method.inputs:
            if one.name.endswith("input_ids"):  # if there are two, the decoder's come last
                found[method.name] = prod(n if isinstance(n, int) else examples[n] for n in one.shape)
    return found


def copying_ns(plan: Decisions) -> int:
    """Nanoseconds for which the link is busy in a pass of each method; if duplex, its busier direction."""
    taken = {"in": 0, "out": 0}
    for transfer in (t for schedule in plan.schedules for t in schedule.transfers):
        taken[transfer.direction] += plan.hardware.moving_ns(transfer)
    return max(taken.values()) if plan.hardware.duplex else sum(taken.values())


def limit_of(plan: Decisions) -> Limit:
    """The resource that sets the plan's time, or `memory` if compute, link and disk wait for one another.

    It is `units` if passes are expected to wait for units longer than for anything else, and `host` if the
    launches of the streamed steps take the calling thread as long as the passes.
    """
    predicted = plan.predicted_ns
    copying = copying_ns(plan)
    if predicted <= plan.compute_ns * _ALIKE:
        return "compute"
    waits = sum(plan.pool.expected_ns) if plan.pool else 0
    if waits > max(copying, plan.compute_ns):
        return "units"
    predicted -= waits
    reading = sum(plan.hardware.disk_ns(nbytes) for s in plan.schedules for nbytes in s.staged if nbytes)
    busiest = max(copying, reading)
    launching = sum(launches_ns(plan, which) for which in range(len(plan.traces)))
    if launching >= busiest and predicted <= launching * _ALIKE:
        return "host"
    if predicted > busiest * 1.05:
        return "memory"
    return "link" if busiest == copying else "disk"


def verdict(
    plan: Decisions, tokens: Mapping[str, int], policies: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The verdict: whether streaming pays, the best other way, what limits the plan, and what would help.

    It has one sentence or more, of which the first is a summary. `tokens` is as in Origin, and `policies` the
    result of `other_policies`, which is called if they are not given.
    """
    plan = joined(plan)
    rates = " and ".join(
        f"{trace.method} makes {_rate(plan.expected_ns(number), tokens.get(trace.method))}"
        for number, trace in enumerate(plan.traces)
    )
    within = f"{rates or 'nothing runs'} within {format_budget(plan.budget, sum(plan.sizes))}."
    if not plan.streamed_bytes and plan.pool is None:
        return (f"Everything fits: {within}", "Nothing streams, so that compute alone sets the time.")
    pays, beside = _beside(plan, other_policies(plan) if policies is None else policies)
    return (f"{pays}: {within}", *_units(plan), *beside, _limit(plan), _best(plan), *_twice(plan))


def units_of(plan: Decisions) -> tuple[str, str]:
    """What the pool of a plan holds, and how long passes wait for it, in words; empty without a pool."""
    pool = plan.pool
    if pool is None:
        return "", ""
    count = len(pool.storages)
    of = f" ({format_size(sum(plan.sizes[s] for s in pool.storages))})" if plan.sizes else ""
    weights = f"{count} weight{'s' * (count > 1)}{of}"
    holds = f"{format_size(pool.nbytes)} for the rows or experts of {weights} that calls ask for"
    if not pool.worst_ns:
        return holds, "how long passes wait for them has not been estimated"
    expected, worst = format_time(sum(pool.expected_ns)), format_time(sum(pool.worst_ns))
    return holds, f"expected {expected} if all are asked for equally often, at worst {worst}"


def slow_launches(plan: Decisions) -> str:
    """The methods for whose calls the calling thread is the limit, in words; empty if there is none."""
    plan, found = joined(plan), []
    for which, (trace, schedule) in enumerate(zip(plan.traces, plan.schedules, strict=True)):
        steps, taken = len(launched_steps(plan, which)), launches_ns(plan, which)
        if taken >= schedule.predicted_ns and taken > trace.compute_ns * _ALIKE:
            beside = f"{format_time(taken)} a pass, compute {format_time(trace.compute_ns)}"
            found.append(f"launching the {steps:,} streamed steps of {trace.method} takes {beside}")
    return f"the calling thread is the limit: {', '.join(found)}" if found else ""


def _units(plan: Decisions) -> list[str]:
    """The sentence on what is read by units, of which a plan knows no more than an expectation."""
    holds, waits = units_of(plan)
    if plan.pool is None:
        return []
    return [
        f"A pool has {holds}; a pass waits for them ({waits}), and what calls take is measured in a load."
    ]


def _rate(ns: int, tokens: int | None) -> str:
    """A rate for people: `3.05 tokens a second`, or `a token in 1.87 s` if one takes longer than a second."""
    one, many = ("pass", "passes") if tokens is None else ("token", "tokens")
    each = max(1, ns) / (tokens or 1)
    if each > 1e9:
        return f"a {one} in {format_time(each)}"
    return f"{1e9 / each:,.0f} {many} a second" if each <= 1e7 else f"{1e9 / each:.3g} {many} a second"


def _beside(plan: Decisions, policies: Mapping[str, int]) -> tuple[str, list[str]]:
    """Compare the plan with the best of the other policies.

    Returns the words that say whether streaming pays, and a sentence about that policy, if there is one.
    """
    if not policies:
        apart = ["No other way fits, since each holds all that the forward keeps."] if plan.produced else []
        return "This plan streams", apart
    name = min(policies, key=lambda policy: policies[policy])
    host, way = host_beside(plan.hardware), repr(name)
    if name == REST and host is not None:
        way = f"to let the host ({host.name}) compute what does not fit"
    taken, times = format_time(policies[name]), policies[name] / max(1, plan.predicted_ns)
    doubt = "probably " if plan.hardware.uneven else ""
    pays, relation = f"Streaming {doubt}pays here", f"{times:.3g} times as long"
    if times < 1 / _ALIKE:
        pays, relation = f"Streaming {doubt}does not pay here", f"{1 / times:.3g} times as fast"
    elif times <= _ALIKE:
        pays, relation = f"Streaming is {doubt}as good as any other way here", "just as long"
    return pays, [f"The best other way is {way}, which takes {taken} a pass: {relation}."]


def _limit(plan: Decisions) -> str:
    """The sentence on what limits a plan."""
    predicted, compute = format_time(plan.predicted_ns), format_time(plan.compute_ns)
    moved, out, link = format_size(plan.streamed_bytes), format_size(plan.written_bytes), plan.hardware
    match limit_of(plan):
        case "compute":
            both = f"{moved} in and {out} out" if plan.written_bytes else moved
            return f"Compute limits it: copying {both} a pass hides behind {compute} of compute."
        case "link":
            both = f"{moved} a pass at {_gigabytes(link.link_bytes_per_s)}"
            if plan.written_bytes:
                rate = _gigabytes(link.write_bytes_per_s or link.link_bytes_per_s)
                beside = "beside" if link.duplex else "and"
                both = f"{both} in, {beside} {out} at {rate} out,"
            return f"The link limits it: {both} take {predicted}, compute {compute}."
        case "disk":
            held, read = format_size(plan.host.nbytes if plan.host else 0), format_size(_staged(plan))
            return (
                f"The disk limits it: of {moved} a pass, {read} are more than a host of {held} holds, and "
                f"reading them takes {predicted}, compute {compute}."
            )
        case "host":
            both = f"launching the streamed steps takes {predicted}, compute {compute}"
            return f"The calling thread limits it: {both}."
        case "units":
            waits = format_time(sum(plan.pool.expected_ns) if plan.pool else 0)
            return f"Units limit it: of {predicted}, a pass is expected to wait {waits} for them."
    return (
        f"Memory limits it: within {format_budget(plan.budget)} there is too little room to copy ahead, so "
        f"link and compute ({compute}) wait for each other in {predicted}."
    )


def _best(plan: Decisions) -> str:
    """The sentence on how near a plan is to the lower bound."""
    if plan.ratio is None:
        return "How much faster streaming could be is not known: the solver found no bound in time."
    if plan.ratio < 1.00005:
        return f"This is the best streaming possible{' with this pool' if plan.pool is not None else ''}."
    faster = plan.ratio * 100 - 100
    if plan.pool is not None:
        bound = format_time(plan.lower_bound_ns or 0)
        return f"No plan with this pool takes less than {bound} a pass, which counts nothing for units."
    return f"The best streaming possible is at most {faster:.{'0f' if faster >= 100 else '2g'}} % faster."


def _twice(plan: Decisions) -> list[str]:
    """The sentence on what would halve the plan's time, or help at all; none if that is not known.

    It takes for granted that plans for larger budgets come as near to `best_ns` as this plan does.
    """
    half, compute = plan.predicted_ns // 2, plan.compute_ns
    if limit_of(plan) == "host":
        return [_replayed(plan)]
    if compute > half:
        return [f"Only faster compute makes it twice as fast: compute alone takes {format_time(compute)}."]
    limit, disk = limit_of(plan), plan.hardware.disk_bytes_per_s
    if plan.pool is not None or not plan.sizes or (limit == "disk" and best_ns(plan, plan.budget) > half):
        return []
    if limit == "disk" and plan.host and disk:
        held = format_size(plan.host.nbytes + _staged(plan) // 2)
        return [f"Twice as fast takes a host that holds about {held}, or a disk of {_gigabytes(2 * disk)}."]
    wanted = max(compute, best_ns(plan, plan.budget) // 2)
    budgets = range(plan.budget, plan.budget + sum(plan.sizes) + 1)
    budget = budgets[bisect_left(budgets, True, key=lambda nbytes: best_ns(plan, nbytes) <= wanted)]
    link = f", or a link of {_gigabytes(2 * plan.hardware.link_bytes_per_s)}" if limit == "link" else ""
    if link and plan.written_bytes and plan.hardware.write_bytes_per_s:
        link += f" in and {_gigabytes(2 * plan.hardware.write_bytes_per_s)} out"
    return [f"Twice as fast takes a budget of about {format_size(budget)}{link}."]


def _replayed(plan: Decisions) -> str:
    """The sentence on what would help a plan whose limit is the calling thread."""
    if plan.wrap == "barrier":
        return (
            f"A call that is captured and replayed as a graph takes {format_time(replayed_ns(plan))} a pass."
        )
    return (
        "Larger batches give each launch more to do; with wrap='barrier', calls can be captured and replayed "
        "as graphs, each of which is one launch."
    )


def _staged(plan: Decisions) -> int:
    """Bytes that the disk reads in a pass of each method, summed."""
    return sum(nbytes for schedule in plan.schedules for nbytes in schedule.staged)


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
