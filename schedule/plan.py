"""A plan, alone or as a rung of a ladder of budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from penstock.schedule.facts.model import Decisions
from penstock.schedule.facts.sizes import format_budget, format_size, format_time
from penstock.schedule.payload.text import encode
from penstock.schedule.report.drawing import save_report, save_timeline
from penstock.schedule.report.graphs import event_graph

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, repr=False)
class Plan(Decisions):
    """The decisions for a program within a budget. `Program.plan` makes it, and `Program.load` runs it.

    Example:
        >>> plan.budget, plan.streamed_bytes, plan.predicted_ns > 0
        (33280, 65536, True)
    """

    def __repr__(self) -> str:
        predicted = format_time(self.predicted_ns)
        return f"Plan({self.residency}, {predicted} a pass predicted on {self.hardware.name})"

    @property
    def residency(self) -> str:
        """How many bytes of the weights stay in memory and how many stream in a pass, in words.

        Values that a forward keeps for its backward, and weights that are read by units, are counted apart.
        """
        produced_bytes = sum(self.sizes[s] for s in self.produced) if self.sizes else 0
        outside = sum(self.sizes[s] for s in {*self.outside} - self.produced) if self.sizes else 0
        resident = format_size(sum(piece.nbytes for piece in self.resident) + outside)
        total = f" of {format_size(sum(self.sizes) - produced_bytes)}" if self.sizes else ""
        streamed = format_size(self.streamed_bytes)
        written = ""
        if self.produced:
            values = f" of {format_size(produced_bytes)}" if produced_bytes else ""
            written = f", {format_size(self.written_bytes)}{values} of kept values written out"
        budget = format_budget(self.budget, sum(self.sizes))
        units = ""
        if self.pool is not None:
            of = f" of {format_size(sum(self.sizes[s] for s in self.pool.storages))}" if self.sizes else ""
            units = f", a pool of {format_size(self.pool.nbytes)} for units{of}"
        return f"{resident}{total} resident{units}, {streamed} streamed a pass{written}, budget {budget}"

    def to_json(self) -> str:
        """Return the plan as JSON, which docs/payload.md specifies.

        Example:
            >>> import json
            >>> json.loads(plan.to_json())["budget"]
            33280
        """
        return encode(self).decode()

    def save_report(self, path: str | PathLike[str], *, force: bool = False) -> None:
        """Write the plan as one page of HTML that needs nothing else.

        Args:
            path: The file.
            force: Replace a file that exists.

        Raises:
            PlanError: The file exists, or cannot be written.

        Example:
            >>> plan.save_report("plan.html")
        """
        save_report(self, path, force=force)

    def save_timeline(self, path: str | PathLike[str], *, force: bool = False) -> None:
        """Write the first three passes as a trace that ui.perfetto.dev opens.

        Args:
            path: The file.
            force: Replace a file that exists.

        Raises:
            PlanError: The file exists, or cannot be written.

        Example:
            >>> plan.save_timeline("plan.json")
        """
        save_timeline(self, path, force=force)

    def event_graph(self, method: str | None = None) -> networkx.DiGraph:
        """Return the events of a steady pass of one method; an edge leads to each event that waits.

        docs/planning.md lists the attributes of nodes and edges.

        Args:
            method: The name of the method. Default: the only one.

        Raises:
            PlanError: There is no such method, or there are several and none is named.

        Example:
            >>> graph = plan.event_graph()
            >>> "step" in {graph.nodes[node]["kind"] for node in graph}
            True
        """
        return event_graph(self, method)


RUNGS = 8
"""The usual number of plans in a ladder."""

_LAST = 6
"""The last rung that streams anything streams one part in so many of what the second one does."""


def budgets(lowest: int, highest: int) -> tuple[int, ...]:
    """The ascending budgets of a ladder, in bytes."""
    most, steps = max(0, highest - 2 * lowest), RUNGS - 3
    spaced = {highest - int(most * _LAST ** (-k / steps)) for k in range(steps + 1)}
    return tuple(sorted({lowest, highest, *(nbytes for nbytes in spaced if nbytes > lowest)}))


def ladder(make: Callable[[int], Plan], lowest: int, highest: int) -> tuple[Plan, ...]:
    """The plans that `make` makes for the budgets of a ladder, by ascending budget.

    A plan that is no faster than the one below it and moves no fewer bytes is left out: nothing is gained by
    its memory.
    """
    plans: list[Plan] = []
    for budget in budgets(lowest, highest):
        plan = make(budget)
        lower = plans[-1] if plans else None
        if not lower or plan.streamed_bytes < lower.streamed_bytes or plan.predicted_ns < lower.predicted_ns:
            plans.append(plan)
    return tuple(plans)
