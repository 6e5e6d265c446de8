"""Pictures of a plan: a page of HTML, a trace for Perfetto, and a few lines for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.schedule.atomic_file import refuse_existing, replace_file, reporting
from penstock.schedule.clock.event_graph import simulate
from penstock.schedule.clock.launches import launched_steps
from penstock.schedule.clock.turns import joined
from penstock.schedule.facts.errors import PlanError, SourceError
from penstock.schedule.facts.model import Decisions
from penstock.schedule.facts.sizes import format_time
from penstock.schedule.report.page.render import render_page
from penstock.schedule.report.pictures import Interval, Picture, lanes_of, picture_of
from penstock.schedule.report.verdict import Origin
from penstock.schedule.report.views import View, Views, copied_by, copies_of, names_of, title_of

Event = dict[str, Any]

_BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Characters that fill no, one, ... eight eighths of a cell."""

_LEAST_WIDTH = 40


def save_report(
    plan: Decisions,
    path: str | PathLike[str],
    *,
    names: Sequence[str] | None = None,
    sweep: Sequence[Mapping[str, Any]] = (),
    origin: Origin | None = None,
    force: bool = False,
) -> None:
    """Write the plan as one page of HTML that needs no network and no other file.

    Methods whose calls come in turn are drawn as one, here and in the other pictures.
    `names` are the storages' names, those of the plan by default. `sweep` has the points of the
    budget curve: `budget`, `predicted_ns`, `lower_bound_ns` (or None) and `policies` (name to ns).
    `origin` says where the plan comes from. `force` replaces a file that exists.

    Raises:
        PlanError: `path` exists or cannot be written, or there is not one name for each storage.
    """
    target = _new_file(path, force=force)
    _write(target, [render_page(joined(plan), names_of(plan, names), origin or Origin(), sweep)], force=force)


def save_timeline(
    plan: Decisions,
    path: str | PathLike[str],
    *,
    names: Sequence[str] | None = None,
    passes: int = 3,
    force: bool = False,
) -> None:
    """Write the first passes, from a cold start on, as a trace that ui.perfetto.dev opens.

    Every method is a process, compute and the links are its threads. Stalls are events of their own.
    (Trace Event Format, Google, 2016: times are microseconds.) `force` replaces a file that exists.

    Raises:
        PlanError: `path` exists or cannot be written, `passes` is not positive, or there is not one
            name for each storage.
    """
    if passes < 1:
        raise PlanError(f"a timeline of {passes} passes shows nothing; ask for at least 1")
    plan, called = joined(plan), names_of(plan, names)
    target = _new_file(path, force=force)
    events = (event for which in range(len(plan.traces)) for event in _events(plan, which, called, passes))
    lines = (f"{',' if number else ''}\n{json.dumps(event)}" for number, event in enumerate(events))
    _write(target, ['{"displayTimeUnit": "ms", "traceEvents": [', *lines, "\n]}\n"], force=force)


def terminal_timeline(plan: Decisions, width: int = 100) -> str:
    """One steady pass of each method in lines of at most `width` characters (40 at least).

    A column stands for a stretch of time; the fuller its character, the more of that time compute or link is
    busy.
    """
    parts, plan = [], joined(plan)
    for which, trace in enumerate(plan.traces):
        if not trace.steps:
            continue
        lines = _terminal_lines(plan, which, max(_LEAST_WIDTH, width))
        parts += [f"{trace.method}:", *lines] if len(plan.traces) > 1 else lines
    return "\n".join(parts)


def _terminal_lines(plan: Decisions, which: int, width: int) -> list[str]:
    picture = picture_of(plan, which)
    view = picture.views.steady
    lanes = lanes_of(picture, view)
    label = max(map(len, lanes)) + 1
    columns = width - label - 5
    lines = [f"{name:<{label}}{_cells(intervals, view, columns)}" for name, intervals in lanes.items()]
    middle, end = format_time(view.period_ns / 2), format_time(view.period_ns)
    left = (columns - len(middle)) // 2 - 1
    right = columns - 1 - left - len(middle) - len(end)
    waits = view.period_ns - picture.trace.compute_ns
    lines.append(f"{'':<{label}}0{'':<{left}}{middle}{'':<{right}}{end}")
    return lines + ([f"{'':<{label}}compute waits {format_time(waits)} of it"] if waits else [])


def _cells(intervals: Iterable[Interval], view: View, columns: int) -> str:
    """How busy a lane is: a character for each column, and the share of the pass. A gap counts as busy."""
    begin, period = view.begins[view.focus], max(1, view.period_ns)
    shares = [0.0] * columns
    for one in intervals:
        if one.kind in {"stall", "hold"}:
            continue
        low = (max(one.start, begin) - begin) * columns / period
        high = (min(one.end, begin + period) - begin) * columns / period
        for column in range(int(low), min(columns, int(high) + 1)):
            shares[column] += max(0.0, min(high, column + 1) - max(low, column))
    eighths = [min(8, max(round(share * 8), int(share > 0.01))) for share in shares]
    return "".join(_BLOCKS[eighth] for eighth in eighths) + f"{sum(shares) / columns:>5.0%}"


def _events(plan: Decisions, which: int, names: Sequence[str], passes: int) -> Iterator[Event]:
    """Yield the events of one method in the Trace Event Format."""
    trace, schedule = plan.traces[which], plan.schedules[which]
    launched = launched_steps(plan, which)
    times = simulate(trace, schedule, plan.hardware, plan.wrap, passes + 1, launched=launched)
    view = View(times[:-1], 0, times[-1].call_start)
    picture = Picture(plan, which, Views(view, view), copies_of(plan, schedule), ())
    copied = list(copied_by(plan, which, names))
    yield _named("process_name", f"{trace.method} on {plan.hardware.name}", which + 1, 0)
    for tid, (lane, intervals) in enumerate(lanes_of(picture, view).items(), 1):
        yield _named("thread_name", lane, which + 1, tid)
        for one in intervals:
            title, args = one.kind, {}
            if one.of is not None and one.kind in {"copy", "out", "disk"}:
                args = copied[one.of]
                title = f"{title_of(args['weights'])}{' out' * (one.kind == 'out')}"
            elif one.of is not None:
                step = trace.steps[one.of]
                said = {"lead": f"{step.name} (lead)", "read": step.name, "hold": "stall for copies out"}
                title = said.get(title, title)
                args = {
                    "step": step.name,
                    "weights": [] if one.kind == "lead" else [names[s] for s in step.reads],
                }
                if step.writes:
                    args["writes"] = [names[s] for s in step.writes]
            when = {"ts": one.start / 1000, "dur": one.nanoseconds / 1000}
            event = {"ph": "X", "name": title, "cat": one.kind, "pid": which + 1, "tid": tid}
            yield event | when | {"args": {"pass": one.at} | args}


def _named(what: str, name: str, pid: int, tid: int) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _new_file(path: str | PathLike[str], *, force: bool) -> Path:
    """The path of a file to write. Raises PlanError where it cannot be written, before any work is done."""
    target = Path(path)
    with _as_plan_errors(), reporting(target):
        refuse_existing(target, force=force)
        if not target.parent.is_dir():
            raise PlanError(
                f"{target.parent} is not a folder that exists; create it, or choose another output"
            )
    return target


def _write(target: Path, pieces: Iterable[str], *, force: bool) -> None:
    """Write all of the pieces to `target`, or leave it as it is. `force` replaces a file that exists.

    Raises:
        PlanError: `target` exists and `force` is not given, or it cannot be written.
    """
    with (
        _as_plan_errors(),
        replace_file(target, force=force) as fd,
        open(fd, "w", encoding="utf-8", closefd=False) as file,
    ):
        file.writelines(pieces)


@contextmanager
def _as_plan_errors() -> Iterator[None]:
    try:
        yield
    except SourceError as error:
        raise PlanError(str(error)) from error
