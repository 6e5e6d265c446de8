"""A plan beside other policies, other budgets and other hardware."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.schedule.clock.event_graph import steady_period_ns
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.hardware import host_beside, roofline_ns
from penstock.schedule.facts.model import Decisions, Hardware, Schedule, Trace, Transfer

REST = "rest on the host"
"""The name of the policy that does not stream: the host computes the steps whose weights do not fit."""


@dataclass(frozen=True)
class Setting:
    """One trace, the bytes of every storage, `cap` bytes of memory for what it reads, and the machine."""

    sizes: Sequence[int]
    trace: Trace
    cap: int
    hardware: Hardware

    @property
    def total(self) -> int:
        """Bytes of all storages that the trace reads."""
        return sum(self.sizes[s] for s in {s for step in self.trace.steps for s in step.reads})

    def read_bytes(self, step: int) -> int:
        """Bytes of the storages that a step reads."""
        return sum(self.sizes[s] for s in self.trace.steps[step].reads)


def everything_resident(setting: Setting) -> int | None:
    """The period without streaming, which needs memory for all weights."""
    return setting.trace.compute_ns if setting.total <= setting.cap else None


def on_demand(setting: Setting) -> int | None:
    """The weights of a step are copied when it is reached, and dropped when it ends (accelerate's hooks)."""
    return _period(setting, [(k, k - 1) for k in range(len(setting.trace.steps))])


def one_block_ahead(setting: Setting) -> int | None:
    """While a block of steps runs, the next block is copied; nothing stays (diffusers' group offloading).

    Blocks are as large as fits into half of the memory. A step that is larger is a block by itself.
    """
    block_of = list(_blocks(setting, setting.cap // 2))
    sizes: dict[int, int] = {}
    for k, block in enumerate(block_of):
        sizes[block] = sizes.get(block, 0) + setting.read_bytes(k)
    count, n = len(sizes), len(block_of)
    if any(sizes[b] + sizes[(b + 1) % count] > setting.cap for b in sizes):
        return on_demand(setting)
    last = {block: k for k, block in enumerate(block_of)}
    starts = []
    for k, block in enumerate(block_of):
        before = block - 2  # the block that runs until this one may be copied
        starts.append((k, last[before] if before >= 0 else last[before % count] - n))
    return _period(setting, starts)


def some_of_every_group(setting: Setting) -> int | None:
    """Of every group of n steps, the last m stream, two at a time, and the others stay (vLLM's offloader).

    The share m / n is the least that fits, where n is at most 16.
    """
    n = len(setting.trace.steps)
    shares = sorted({(m / size, size, m) for size in range(1, 17) for m in range(1, size + 1)})
    for _, size, m in shares:
        streamed = [k for k in range(n) if k % size >= size - m]
        if not streamed:
            continue
        largest = max(setting.read_bytes(k) for k in streamed)
        reads = {s for k in range(n) if k % size < size - m for s in setting.trace.steps[k].reads}
        stays = sum(setting.sizes[s] for s in reads)
        if stays + 2 * largest > setting.cap:
            continue
        count = len(streamed)
        before = [streamed[j - 2] - n * (j < 2) if count > 1 else streamed[0] - n for j in range(count)]
        starts = [(k, max(earlier, k - n)) for k, earlier in zip(streamed, before, strict=True)]
        return _period(setting, starts)
    return on_demand(setting)


def least_recently_used(setting: Setting) -> int | None:
    """A storage is copied when a step needs it, and the storages that were read longest ago make room for it.

    On a cyclic scan, such a cache never holds what is read next (Sleator and Tarjan, CACM 28(2), 1985).
    """
    present: OrderedDict[int, int] = OrderedDict()
    copied: set[int] = set()
    period = 0
    for _ in range(3):  # the third pass is a steady one
        period = setting.trace.compute_ns
        copied.clear()
        for step in setting.trace.steps:
            missing = [s for s in step.reads if s not in present]
            for s in step.reads:
                present[s] = setting.sizes[s]
                present.move_to_end(s)
            while sum(present.values()) > setting.cap and len(present) > len(step.reads):
                present.popitem(last=False)
            if sum(present.values()) > setting.cap:
                return None
            period += sum(setting.hardware.copy_ns(setting.sizes[s]) for s in missing)
            period += setting.hardware.link_fill_ns * bool(missing)
            copied.update(missing)
    streamed = sum(not copied.isdisjoint(step.reads) for step in setting.trace.steps)
    return max(period, setting.hardware.host_step_ns * streamed)


def rest_on_host(setting: Setting, host: Hardware) -> int | None:
    """The last steps, whose weights do not fit, are computed on the host (llama.cpp's layers).

    The host's memory holds their weights. Moving the activations costs one latency in each direction. None if
    the host's memory is too small for these weights.
    """
    if host.memory_nbytes is not None and setting.total - setting.cap > host.memory_nbytes:
        return None
    left = setting.cap
    period = setting.trace.tail_ns + setting.trace.gap_ns + 2 * setting.hardware.link_latency_ns
    for k, step in enumerate(setting.trace.steps):
        left -= setting.read_bytes(k)
        if left >= 0:
            period += step.lead_ns + step.read_ns
        else:
            period += roofline_ns(step.lead_work, host) + roofline_ns(step.read_work, host)
    return period


POLICIES: dict[str, Callable[[Setting], int | None]] = {
    "everything resident": everything_resident,
    "on demand": on_demand,
    "one block ahead": one_block_ahead,
    "some of every group": some_of_every_group,
    "least recently used": least_recently_used,
}


def compare(setting: Setting, host: Hardware | None = None) -> dict[str, int | None]:
    """The period of every policy, by name; with `host`, also that of computing the rest on the host."""
    periods = {name: policy(setting) for name, policy in POLICIES.items()}
    if host is not None:
        periods[REST] = rest_on_host(setting, host)
    return periods


def without_values(trace: Trace) -> Trace:
    """The trace with the reads of weights alone: other tools leave in memory what a step writes."""
    written = {s for step in trace.steps for s in step.writes}
    if not written:
        return trace
    steps = (
        replace(step, reads=tuple(s for s in step.reads if s not in written), writes=())
        for step in trace.steps
    )
    return replace(trace, steps=tuple(steps))


def _period(setting: Setting, starts: Sequence[tuple[int, int]]) -> int | None:
    """The period if the reads of step k are copied once step `after` has ended; None if they do not fit."""
    if max(setting.read_bytes(k) for k, _ in starts) > setting.cap:
        return None
    transfers = []
    reached = min(after for _, after in starts)
    for k, after in sorted(starts):
        reached = max(reached, after)
        for s in setting.trace.steps[k].reads:
            transfers.append(Transfer(0, setting.sizes[s], k, reached))
    schedule = Schedule(setting.trace.graph, tuple(transfers), (), 0)
    launched = [k for k, _ in starts]
    return steady_period_ns(setting.trace, schedule, setting.hardware, "overlap", launched=launched)


def _blocks(setting: Setting, most: int) -> Iterator[int]:
    """Yield the number of each step's block: consecutive steps of at most `most` bytes, or a single step."""
    block, block_bytes = -1, 0
    for k in range(len(setting.trace.steps)):
        nbytes = setting.read_bytes(k)
        if block < 0 or block_bytes + nbytes > most:
            block, block_bytes = block + 1, 0
        block_bytes += nbytes
        yield block


SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""The budgets of a sweep: 0 is the floor, and 1 the bytes of all weights."""

BEST = "best possible"
"""The name of a plan's lower bound in curves."""
_WIDE = 12
"""Times are drawn on a logarithmic scale if the longest exceeds the shortest by more than this factor."""


@dataclass(frozen=True)
class Point:
    """One budget, and the nanoseconds of a pass: as a plan predicts, its bound, and with other policies."""

    budget: int
    predicted_ns: int
    lower_bound_ns: int | None
    policies: Mapping[str, int]


def other_policies(plan: Decisions) -> dict[str, int]:
    """The period of each policy that fits into the plan's budget, summed over the plan's traces.

    What a forward keeps stays in memory under all of them, and weights have the rest of the budget. None of
    them reads a weight by units. The host is the one beside the plan's hardware. For a plan without sizes
    there is no result.
    """
    plan, host = joined(plan), host_beside(plan.hardware)
    totals_ns: dict[str, int] = {}
    for number, trace in enumerate(plan.traces if plan.sizes else ()):
        cap = plan.budget - _fixed(plan) - max(_alive(plan, trace), default=0)
        steps = (replace(step, reads=plan.reads_of(step)) for step in trace.steps)
        whole = without_values(replace(trace, steps=tuple(steps)))
        setting = Setting(plan.sizes, whole, max(0, cap), plan.hardware)
        periods = compare(setting, host) if trace.steps and cap >= 0 else {}
        for name, ns in periods.items():
            if ns is not None and (number == 0 or name in totals_ns):
                totals_ns[name] = totals_ns.get(name, 0) + ns
            else:
                totals_ns.pop(name, None)
    return totals_ns


def point_of(plan: Decisions) -> Point:
    """The point of one plan on the curve of time against budget."""
    return Point(plan.budget, plan.predicted_ns, plan.lower_bound_ns, other_policies(plan))


def sweep(make: Callable[[int], Decisions], *, lowest: int, highest: int) -> tuple[Point, ...]:
    """The points of a curve from the floor (`lowest`) to all weights (`highest`); `make` makes the plans."""
    budgets = sorted({lowest + int((highest - lowest) * share) for share in SHARES})
    return tuple(point_of(make(budget)) for budget in budgets)


def curve_of(
    plan: Decisions, policies: Mapping[str, int], points: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The curve of time against budget as data: `budgets` in ascending order, and `lines` by name.

    A line has a time (ns) or None for each budget. `policies` has the times of other policies for the plan's
    own budget, and `points` the points of a sweep, with the fields of `Point`. Without a sweep, the times at
    other budgets are the lower bounds that link and compute set (`best_ns`).
    """
    at: dict[int, dict[str, int | None]] = {}
    for point in points:
        swept = {"plans by penstock": point["predicted_ns"], BEST: point["lower_bound_ns"]}
        at[point["budget"]] = swept | point["policies"]
    if plan.sizes and not points:
        budgets = (sum(plan.sizes) * percent // 100 for percent in range(106))
        at = {
            budget: {"link and compute at best": best_ns(plan, budget)} for budget in (*budgets, plan.budget)
        }
    present = {"this plan": plan.predicted_ns, BEST: plan.lower_bound_ns}
    at[plan.budget] = {**policies, **at.get(plan.budget, {}), **present}
    names = dict.fromkeys(name for times in at.values() for name in times)
    lines = {name: [at[budget].get(name) for budget in sorted(at)] for name in names}
    drawn = [max(1, ns) for line in lines.values() for ns in line if ns is not None]
    wide = max(drawn) > _WIDE * min(drawn)
    return {"budgets": sorted(at), "lines": lines, "logarithmic": wide, "swept": bool(points)}


def best_ns(plan: Decisions, budget: int) -> int:
    """A lower bound (ns), set by link and compute alone, for a pass of each method with `budget` bytes.

    The bytes of the weights that a method reads and the budget cannot hold are copied in every pass. What a
    forward keeps takes memory from the step that writes it to the last that reads it. So at the step at which
    most is alive, what the budget cannot hold of it and the weights is copied in, and what it cannot hold of
    it alone is copied out, too. What is read by units counts nothing.
    """
    total, hardware = 0, plan.hardware
    for trace in joined(plan).traces:
        alive = max(_alive(plan, trace), default=0)
        weights = {s for step in trace.steps for s in step.reads} - plan.produced
        left = budget - _fixed(plan)
        brought = max(0, alive + sum(plan.sizes[s] for s in weights) - left) / hardware.link_bytes_per_s
        taken = max(0, alive - left) / (hardware.write_bytes_per_s or hardware.link_bytes_per_s)
        copying = max(brought, taken) if hardware.duplex else brought + taken
        total += max(trace.compute_ns, int(copying * 1e9))
    return total


def replayed_ns(plan: Decisions) -> int:
    """Nanoseconds of a pass of each method whose call is replayed as a graph: one launch for all steps."""
    plan, total = joined(plan), 0
    alone = replace(plan.hardware, host_step_ns=0)
    for trace, schedule in zip(plan.traces, plan.schedules, strict=True):
        total += max(plan.hardware.host_step_ns, steady_period_ns(trace, schedule, alone, plan.wrap))
    return total


def _alive(plan: Decisions, trace: Trace) -> list[int]:
    """At each step, the bytes of what steps write and that have been written, or are, and are read later."""
    alive = [0] * len(trace.steps)
    last = {s: k for k, step in enumerate(trace.steps) for s in step.reads}
    for written, step in enumerate(trace.steps):
        for s in step.writes:
            for k in range(written, last.get(s, written) + 1):
                alive[k] += plan.sizes[s]
    return alive


def _fixed(plan: Decisions) -> int:
    """Bytes of the storages that no arena can hold, because the program writes or returns them."""
    return sum(plan.sizes[s] for s in plan.outside if plan.arena.layout[s] < 0)
