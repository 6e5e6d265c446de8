"""The verdict on a plan: how fast it is, what limits it and what would help."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from penstock.schedule.clock.event_graph import launched_steps, launches_ns, stalls_of
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.hardware import host_beside
from penstock.schedule.facts.model import Decisions, Method
from penstock.schedule.facts.sizes import format_budget, format_size, format_time
from penstock.schedule.report.comparison import REST, best_ns, other_policies, replayed_ns
from penstock.schedule.report.pictures import Picture, overlap, resident_bytes, storage_ranges

Lives = Literal["resident", "in part", "streamed", "outside", "not read", "kept", "spilled", "by units"]


@dataclass(frozen=True)
class Use:
    """Where a weight is kept, the first step that reads it (-1 for none), its bytes copied a pass, and why.

    `where` says in words what `lives` says, and which share of the weight stays if only a part does. What a
    step writes is `kept` if it stays until it is read, and `spilled` if bytes of it are copied out and come
    back; its first step is the one that writes it. What is read `by units` alone has none of its own bytes in
    the arena, and what the pool brings of it depends on the calls.
    """

    lives: Lives
    where: str
    first: int
    streamed: int
    why: str


@dataclass(frozen=True)
class _Stream:
    """The copies in a steady pass, of `nbytes` in all, of the part of a weight that does not stay."""

    share: float
    """The share of the weight that stays."""
    nbytes: int
    steps: frozenset[int]
    """The steps for which bytes of the weight are copied."""
    ahead: int | None
    """Steps between the start of the earliest copy and the step that reads it; None if there is no copy."""


def uses_of(picture: Picture) -> list[Use]:
    """The use that a method makes of each storage, by index."""
    plan, trace = picture.plan, picture.trace
    waits = stalls_of(trace, picture.views.steady.now)
    reads: list[list[int]] = [[] for _ in plan.arena.layout]
    written: dict[int, int] = {}
    for k, step in enumerate(trace.steps):
        written |= dict.fromkeys(step.writes, k)
        for s in dict.fromkeys(step.reads):
            reads[s].append(k)
    uses = []
    for s, (stream, ks) in enumerate(zip(_streams(picture), reads, strict=True)):
        if s in written:
            uses.append(_of_value(picture, s, written[s], stream, waits))
            continue
        lives: Lives = "resident" if not stream.nbytes else "in part" if stream.share else "streamed"
        if s in plan.outside or not ks:
            lives = "outside" if s in plan.outside else "not read"
        times = "read once a pass" if len(ks) == 1 else f"read {len(ks)} times a pass"
        if s in plan.outside and plan.arena.layout[s] < 0:
            why = "the program writes or returns it, so it never streams"
        elif not ks:
            why = f"{trace.method} does not read it"
        elif s in plan.outside:
            why = f"{times}; all weights fit, so that nothing streams"
        else:
            wait = sum(waits[k] for k in stream.steps.intersection(ks))
            why = f"{times}; {_reason(stream, len(ks), wait)}"
        where = f"{format_share(stream.share)} stays" if lives == "in part" else lives
        uses.append(Use(lives, where, ks[0] if ks else -1, stream.nbytes, why))
    return [_with_units(picture, s, use) for s, use in enumerate(uses)]


def _with_units(picture: Picture, s: int, use: Use) -> Use:
    """The use of a storage, with what steps read of it by units."""
    pool, steps = picture.plan.pool, enumerate(picture.trace.steps)
    read = [
        (k, sparse_read)
        for k, step in steps
        for sparse_read in step.sparse
        if sparse_read.storage == s and pool and pool.has(sparse_read)
    ]
    if not read:
        return use
    first, sparse_read = read[0]
    most = max(wanted.asked for _, wanted in read)
    each = format_size(sparse_read.unit_nbytes)
    asked = f"a call asks for {most} of {sparse_read.count} units at most"
    by_units = f"by units in {picture.trace.steps[first].name}, from the pool: {asked}, {each} each"
    if use.lives == "not read":
        return Use("by units", "by units", first, 0, f"read {by_units}")
    return replace(use, first=min(first, use.first), why=f"{use.why}; and {by_units}")


def _of_value(picture: Picture, s: int, written: int, stream: _Stream, waits: Sequence[int]) -> Use:
    """The use of a storage that a step writes."""
    plan, steps = picture.plan, picture.trace.steps
    last = max((k for k, step in enumerate(steps) if s in step.reads), default=written)
    why = f"written by {steps[written].name}, last read by {steps[last].name}; "
    if s in plan.outside:
        return Use("outside", "outside", written, 0, f"{why}it has memory for itself")
    place = storage_ranges(plan)[s]
    outs = [copy for copy in picture.copies if copy.out and overlap(place, copy.range)]
    if not outs:
        return Use("kept", "kept", written, 0, f"{why}it stays in between")
    nbytes = sum(overlap(place, copy.range) for copy in outs)
    left = f"{format_size(nbytes)} leave by the end of {steps[max(copy.step for copy in outs)].name}"
    wait = sum(waits[k] for k in stream.steps | {copy.step for copy in outs})
    late = f"steps wait {format_time(wait)}" if wait else "in time"
    moved = nbytes + stream.nbytes
    return Use("spilled", "spilled", written, moved, f"{why}{left}, and come back; {late}")


def _streams(picture: Picture) -> Iterator[_Stream]:
    places, view = storage_ranges(picture.plan), picture.views.steady
    brought: list[Counter[int]] = [Counter() for _ in places]
    for stay in picture.stays:
        nbytes = overlap(places[stay.storage], stay.range)
        if nbytes and stay.copy is not None:
            brought[stay.storage][stay.copy] += nbytes
    ends = [end for simulated in (view.passes[0], view.now) for _, end in simulated.reads]
    n = len(view.now.reads)
    for place, resident_nbytes, by_copy in zip(places, resident_bytes(picture.plan), brought, strict=True):
        copies = [picture.copies[c] for c in by_copy]
        ahead = [max(0, n + c.step - bisect_right(ends, view.now.transfers[c.first][0])) for c in copies]
        share = resident_nbytes / place.nbytes if place else 0.0
        steps = frozenset(c.step for c in copies)
        yield _Stream(share, by_copy.total(), steps, max(ahead, default=None))


def _reason(stream: _Stream, times: int, wait_ns: int) -> str:
    """How a weight that is read `times` times a pass is copied, and for how long its steps wait."""
    if stream.ahead is None:
        return "stays, so it is never copied"
    moved = "copied whole" if stream.share == 0 else f"{format_share(stream.share)} stays, the rest is copied"
    again = "" if len(stream.steps) >= times else f" for {len(stream.steps)} of {times} reads,"
    when = {0: "when its step is reached", 1: "while the step before runs"}.get(
        stream.ahead, f"from {stream.ahead} steps ahead"
    )
    waits = f"its step waits {format_time(wait_ns)}" if wait_ns > 0 else "in time"
    return f"{moved}{again} {when}; {waits}"


def format_share(share: float) -> str:
    """A share for people: `36 %`. Only a share of exactly 0 or 1 is `0 %` or `100 %`."""
    if 0 < share < 0.01:
        return "under 1 %"
    return "over 99 %" if 0.99 < share < 1 else f"{share * 100:.0f} %"


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
    tokens_of = {}
    for method in methods:
        examples = {symbol.name: symbol.example for symbol in method.symbols}
        for described in method.inputs:
            if described.name.endswith("input_ids"):  # if there are two, the decoder's come last
                tokens_of[method.name] = prod(
                    n if isinstance(n, int) else examples[n] for n in described.shape
                )
    return tokens_of


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
    launching = sum(launches_ns(plan, number) for number in range(len(plan.traces)))
    if launching >= busiest and predicted <= launching * _ALIKE:
        return "host"
    if predicted > busiest * 1.05:
        return "memory"
    return "link" if busiest == copying else "disk"


def verdict(
    plan: Decisions, tokens: Mapping[str, int], policies: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The verdict in at most three sentences: how fast the plan is, what limits it, and what would help.

    `tokens` is as in Origin, and `policies` the result of `other_policies`, which is called if they are not
    given.
    """
    plan = joined(plan)
    rates = " and ".join(
        _rate(trace.method, plan.expected_ns(number), tokens.get(trace.method))
        for number, trace in enumerate(plan.traces)
    )
    within = f"{rates or 'nothing runs'} within {format_budget(plan.budget, sum(plan.sizes))}"
    if not plan.streamed_bytes and plan.pool is None:
        alone = "Nothing streams, so compute alone sets the time, and only faster compute helps."
        return f"Everything fits: {within}.", alone
    pays, faster = _beside(plan, other_policies(plan) if policies is None else policies)
    return f"{pays}: {within}; their time {near_best(plan)}.", f"{_limit(plan)}.", f"{_help(plan, faster)}."


def near_best(plan: Decisions, best: str = "the best possible") -> str:
    """How far a plan's time is from the lower bound: `is at most 0.8 % above the best possible`.

    `best` is what the bound is called. It does not know of other sizes of the pool, so a pool that costs
    something is named.
    """
    if plan.ratio is None:
        return f"may be above {best}: the solver found no bound in time"
    if limit_of(plan) == "units":
        return f"may be above {best}: that depends on what calls ask for"
    pool = " with this pool" if has_costly_pool(plan) else ""
    if plan.ratio < 1.00005:
        return f"is {best}{pool}"
    if plan.ratio >= 2:
        return f"is at most {plan.ratio:,.{'0f' if plan.ratio >= 10 else '1f'}} times {best}{pool}"
    return f"is at most {plan.ratio * 100 - 100:.2g} % above {best}{pool}"


def has_costly_pool(plan: Decisions) -> bool:
    """True if a plan has a pool for which passes are expected to wait 1 % of their time, or nobody knows."""
    pool = plan.pool
    return pool is not None and (not pool.worst_ns or 100 * sum(pool.expected_ns) >= plan.predicted_ns)


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
    plan, launched = joined(plan), []
    for number, (trace, schedule) in enumerate(zip(plan.traces, plan.schedules, strict=True)):
        steps, taken = len(launched_steps(plan, number)), launches_ns(plan, number)
        if taken >= schedule.predicted_ns and taken > trace.compute_ns * _ALIKE:
            beside = f"{format_time(taken)} a pass, compute {format_time(trace.compute_ns)}"
            launched.append(f"launching the {steps:,} streamed steps of {trace.method} takes {beside}")
    return f"the calling thread is the limit: {', '.join(launched)}" if launched else ""


def _rate(method: str, ns: int, tokens: int | None) -> str:
    """The rate of a method, with the kind of call: `calls of decode with 1 token make 3.05 tokens a second`.

    Where a token or a pass takes longer than a second, the time of one is said instead.
    """
    if tokens is None:
        calls, make, take, a_pass, many = method, "makes", "takes", "pass", "passes"
    else:
        calls, make, take = f"calls of {method} with {tokens:,} token{'s' * (tokens != 1)}", "make", "take"
        a_pass, many = "token", "tokens"
    each = max(1, ns) / (tokens or 1)
    if each > 1e9:
        return f"{calls} {take} {format_time(each)} a {a_pass}"
    rate = f"{1e9 / each:,.0f}" if each <= 1e7 else f"{1e9 / each:.3g}"
    return f"{calls} {make} {rate} {many} a second"


def _beside(plan: Decisions, policies: Mapping[str, int]) -> tuple[str, str]:
    """The words that say whether streaming pays, and a clause about the best other policy if it is faster."""
    if not policies:
        alone = "No other way fits, as each holds all that the forward keeps"
        return alone if plan.produced else "This plan streams", ""
    name = min(policies, key=lambda policy: policies[policy])
    host, way = host_beside(plan.hardware), f"the policy {name!r} would be"
    if name == REST and host is not None:
        way = f"letting the host ({host.name}) compute what does not fit would be"
    times = policies[name] / max(1, plan.predicted_ns)
    doubt = "probably " if plan.hardware.uneven else ""
    if times < 1 / _ALIKE:
        return f"Streaming {doubt}does not pay here", f"{way} {1 / times:.3g} times as fast"
    if times <= _ALIKE:
        return f"Streaming is {doubt}as good as any other way here", ""
    return f"Streaming {doubt}pays here, {times:.3g} times as fast as any other way", ""


def _limit(plan: Decisions) -> str:
    """The sentence on what limits a plan, and on what passes wait for units if that is not the limit."""
    limit = limit_of(plan)
    if limit == "units" or plan.pool is None or not has_costly_pool(plan):
        return _limited(plan, limit)
    _, waits = units_of(plan)
    return f"{_limited(plan, limit)}; a pass also waits for rows or experts from the pool: {waits}"


def _limited(plan: Decisions, limit: Limit) -> str:  # noqa: PLR0911 (one for each limit)
    """The sentence on what limits a plan, without its full stop."""
    predicted, compute = format_time(plan.predicted_ns), format_time(plan.compute_ns)
    moved, out = format_size(plan.streamed_bytes), format_size(plan.written_bytes)
    match limit:
        case "compute" if not plan.streamed_bytes:
            return f"Compute limits it: {compute} of {predicted}"
        case "compute":
            both = f"{moved} in and {out} out" if plan.written_bytes else moved
            return f"Compute limits it: copying {both} a pass hides behind {compute} of compute"
        case "link":
            return f"The link limits it: {_copied(plan)} take {predicted}, compute {compute}"
        case "disk":
            host_bytes, read = format_size(plan.host.nbytes if plan.host else 0), format_size(_staged(plan))
            return (
                f"The disk limits it: of {moved} a pass, {read} are more than a host of {host_bytes} holds, "
                f"and reading them takes {predicted}, compute {compute}"
            )
        case "host":
            both = f"launching the streamed steps takes {predicted}, compute {compute}"
            return f"The calling thread limits it: {both}"
        case "units":
            _, waits = units_of(plan)
            missing = f"for rows or experts that are not in the pool of {format_size(_pool_bytes(plan))}"
            return f"Units limit it: of {predicted}, a pass waits {missing}: {waits}"
    return (
        f"Memory limits it: within {format_budget(plan.budget)} there is too little room to copy ahead, so "
        f"link and compute ({compute}) wait for each other in {predicted}"
    )


def _copied(plan: Decisions) -> str:
    hardware = plan.hardware
    brought = f"{format_size(plan.streamed_bytes)} a pass at {_gigabytes(hardware.link_bytes_per_s)}"
    if not plan.written_bytes:
        return brought
    rate = hardware.write_bytes_per_s or hardware.link_bytes_per_s
    beside = "beside" if hardware.duplex else "and"
    return f"{brought} in, {beside} {format_size(plan.written_bytes)} at {_gigabytes(rate)} out,"


def _help(plan: Decisions, faster: str) -> str:
    """The sentence on what would help: `faster`, a clause about a faster policy, and what streams faster."""
    both = "; ".join(filter(None, (faster, _twice(plan))))
    return both[:1].upper() + both[1:]


def _twice(plan: Decisions) -> str:
    """The clause on what would halve the plan's time, or help at all.

    It assumes that plans for larger budgets come as near to `best_ns` as this plan does.
    """
    half, compute = plan.predicted_ns // 2, plan.compute_ns
    pool, limit, disk = _pool_bytes(plan), limit_of(plan), plan.hardware.disk_bytes_per_s
    if limit == "host":
        return _replayed(plan)
    if compute > half:
        return f"only faster compute makes it twice as fast: compute alone takes {format_time(compute)}"
    if has_costly_pool(plan) or not plan.sizes:
        return "a larger budget makes it faster"
    if limit == "disk" and best_ns(plan, plan.budget - pool) > half:
        return "a host with more memory, or a faster disk, makes it faster"
    if limit == "disk" and plan.host and disk:
        host_bytes = format_size(plan.host.nbytes + _staged(plan) // 2)
        return (
            f"twice as fast takes a host that holds about {host_bytes}, or a disk of {_gigabytes(2 * disk)}"
        )
    wanted = max(compute, best_ns(plan, plan.budget - pool) // 2)
    budgets = range(plan.budget, plan.budget + sum(plan.sizes) + 1)
    budget = budgets[bisect_left(budgets, True, key=lambda nbytes: best_ns(plan, nbytes - pool) <= wanted)]
    link = f", or a link of {_gigabytes(2 * plan.hardware.link_bytes_per_s)}" if limit == "link" else ""
    if link and plan.written_bytes and plan.hardware.write_bytes_per_s:
        link += f" in and {_gigabytes(2 * plan.hardware.write_bytes_per_s)} out"
    return f"twice as fast takes a budget of about {format_size(budget)}{link}"


def _replayed(plan: Decisions) -> str:
    """The clause on what would help a plan whose limit is the calling thread."""
    if plan.wrap == "barrier":
        time = format_time(replayed_ns(plan))
        return f"a call that is captured and replayed as a graph takes {time} a pass"
    return (
        "larger batches give each launch more to do; with wrap='barrier', calls can be captured and replayed "
        "as graphs, each of which is one launch"
    )


def _pool_bytes(plan: Decisions) -> int:
    return plan.pool.nbytes if plan.pool else 0


def _staged(plan: Decisions) -> int:
    return sum(nbytes for schedule in plan.schedules for nbytes in schedule.staged)


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
