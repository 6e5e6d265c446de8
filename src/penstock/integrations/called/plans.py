"""Plans for the orders of a module's calls, and the memory that the present one has."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from penstock.integrations.called.by_units.reads import Seen
from penstock.integrations.called.by_units.units import UnitReads
from penstock.integrations.called.facts import NO_FOLDER, Order, StepTime
from penstock.integrations.called.kinds import IN_MEMORY
from penstock.integrations.called.measuring import CallSizes, like, plain_tensors_only
from penstock.integrations.called.passes import Pass, positions_of
from penstock.integrations.called.places import NO_VALUES, Place, Step, StepWeights, Values, Watched
from penstock.integrations.kept import digest_of
from penstock.runtime.loading import load_weights
from penstock.runtime.options import LoadRequest
from penstock.runtime.planning import PlanRequest, decide_to_load
from penstock.runtime.stream.loaded import LoadedWeights
from penstock.schedule.facts.errors import BudgetError, StreamError
from penstock.schedule.payload.codec import Payload
from penstock.schedule.plan import Plan
from penstock.schedule.report.verdict import slow_launches


@dataclass(frozen=True)
class Residency:
    """What a plan does with the weights that a module reads.

    Attributes:
        module: The path of the module.
        nbytes: Bytes of these weights.
        how: `"stays"` in memory, `"streams"`, or comes `"by units"`.
        why: The reason, in words.
    """

    module: str
    nbytes: int
    how: str
    why: str


@dataclass(frozen=True)
class PlannedOrders:
    """A plan for all orders of a module.

    Attributes:
        payload: What was planned.
        plan: The plan.
        traced: The orders as the plan has them.
        seen: The orders as passes of the plan show them.
        left_out: By order and path, the storages that operators read in place of the module's step.
    """

    payload: Payload
    plan: Plan
    traced: list[Order]
    seen: list[Order]
    left_out: list[dict[str, set[int]]]


def plan_calls(
    orders: Sequence[Order],
    options: LoadRequest,
    steps: StepWeights,
    units: UnitReads,
    *,
    sizes: CallSizes,
    memory: int,
    room: int,
    effort: float,
    too_little: Callable[[int, int], BudgetError],
) -> tuple[PlannedOrders, int]:
    """Plan all orders within `room` bytes of `memory`; returned with the plan are the bytes that calls have.

    Raises what `too_little` makes of the least bytes of weights and those that calls take, if there is no
    room for both.
    """
    beside, calls = sizes.beside, sizes.room(memory)
    staying = steps.facts.bytes_of(steps.learned.resident)
    plan = functools.partial(plan_orders, orders, options, steps, units, beside=beside, effort=effort)
    try:
        return plan(budget=max(1, min(steps.facts.nbytes, room - calls) - staying)), calls
    except BudgetError as error:
        floor = error.floor_bytes or 0
        if floor + staying + beside > room:
            raise too_little(floor + staying, beside) from error
        return plan(budget=floor), room - floor - staying


def plan_orders(
    orders: Sequence[Order],
    options: LoadRequest,
    steps: StepWeights,
    units: UnitReads,
    *,
    budget: int,
    beside: int,
    effort: float,
) -> PlannedOrders:
    """Plan all orders within a budget; calls take `beside` bytes beside it.

    If the plan cannot read some storages by units, the steps of modules read these whole in the next try.
    """
    merged: set[tuple[int, str, int]] = set()  # what steps read whole: order, path and storage
    if budget >= steps.facts.nbytes:
        merged |= {(graph, *pair) for graph, order in enumerate(orders) for pair in order.by_units()}
    while True:
        parts = [
            _traced(order, steps, units, {(path, s) for g, path, s in merged if g == graph})
            for graph, order in enumerate(orders)
        ]
        traced = [part.order for part in parts]
        resident = steps.readers.resident | steps.learned.small
        payload = steps.facts.payload(traced, [part.reads for part in parts], resident)
        request = PlanRequest(
            budget,
            device=options.device,
            arena=options.arena,
            ways=() if any(order.by_units() for order in traced) else ("whole",),
            # Kernels of other devices run long after the host has called them: their times are modelled.
            traces=payload.traces if options.device == "cpu" else (),
            effort=effort,
        )
        plan = decide_to_load(NO_FOLDER, payload, request, beside)
        unserved = {
            (graph, order.owners[k], read.storage)
            for graph, order in enumerate(traced)
            for k, step in enumerate(payload.traces[graph].steps)
            for read in step.sparse
            if plan.pool is None or not plan.pool.has(read)
            if read.storage in steps.readers.storages.get(order.owners[k], ())
        }
        if not unserved:
            away = functools.partial(units.keeps, merged=(), resident=set(plan.outside))
            seen = [part.seen.reduced(away) for part in parts]
            return PlannedOrders(payload, plan, traced, seen, [part.left_out for part in parts])
        merged |= unserved


Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
"""A function, its arguments, and those by name."""


class _Traced(NamedTuple):
    """An order as a plan has it, and as passes show it; by path, what steps read, and what operators do."""

    order: Order
    seen: Order
    reads: dict[str, tuple[int, ...]]
    left_out: dict[str, set[int]]


def _traced(order: Order, steps: StepWeights, units: UnitReads, merged: set[tuple[str, int]]) -> _Traced:
    reads: dict[str, tuple[int, ...]] = {}
    left_out: dict[str, set[int]] = {}
    for path, storages in steps.readers.storages.items():
        if out := units.left_out(path, storages, merged) | (steps.learned.small & set(storages)):
            left_out[path] = out
        reads[path] = tuple(s for s in storages if s not in out)
    seen = order.reduced(functools.partial(units.keeps, merged=merged, resident=steps.resident))
    return _Traced(
        seen.reduced(lambda path, read: read is not None or bool(reads.get(path))), seen, reads, left_out
    )


def advice_on(plan: Plan) -> str:
    """Say that the calling thread is a plan's limit, and what would help; empty if it is not."""
    limit = slow_launches(plan)
    helps = "larger batches help, and penstock.compile, whose programs can be captured and replayed as graphs"
    return f"; {limit}: {helps}" if limit else ""


def residency_of(plan: Plan, steps: StepWeights, name: str) -> tuple[Residency, ...]:
    """Return what a plan does with the weights of each module; the model itself is called `name`."""
    layout, storages = plan.arena.layout, steps.facts.storages
    moved = [
        (transfer.start, transfer.stop) for schedule in plan.schedules for transfer in schedule.transfers
    ]
    pooled = set(plan.pool.storages) if plan.pool is not None else set[int]()
    twins = {fqn: twin for twin, fqn in steps.places.names.items()}

    def of(own_storages: set[int]) -> tuple[str, str]:
        if own_storages <= steps.learned.resident:
            return "stays", "calls write it, or keep views of it"
        if own_storages & pooled:
            return "by units", "calls read some of it"
        if any(
            start < layout[s] + storages[s].nbytes and layout[s] < stop
            for s in own_storages
            for start, stop in moved
            if layout[s] >= 0
        ):
            return "streams", "there is no room for all weights"
        return "stays", "there is room for it"

    residencies = []
    for path, fqns in steps.readers.fqns.items():
        own_storages = set[int]().union(*(steps.storages_of(twins[fqn]) for fqn in fqns if fqn in twins))
        nbytes = sum(storages[s].nbytes for s in own_storages)
        residencies.append(Residency(path or name, nbytes, *of(own_storages)))
    return tuple(residencies)


class PlanMemory:
    """What the present plan has in memory, which may be none. `count` is told the bytes that it has read.

    Attributes:
        weights: The loaded plan, None where there is none.
        orders: The orders that were planned last.
        staying: Weights that have memory of their own from now on, by twin.
        present: Weights that the present plan has in memory throughout, by twin.
        probed: By order, the steps that wait for reads.
    """

    def __init__(self, steps: StepWeights, count: Callable[[int], None]) -> None:
        self.weights: LoadedWeights | None = None
        self.orders: PlannedOrders | None = None
        self.staying: dict[int, torch.Tensor] = {}
        self.present: dict[int, torch.Tensor] = {}
        self.probed: list[frozenset[int]] = []
        self._steps, self._count = steps, count
        self._counted = 0  # bytes of the present plan of which `count` was told
        self._values: dict[int, torch.Tensor] = {}  # weights over the memory of the plan
        # By order and path, the values of a step, and those of them that it puts in places.
        self._step_values: list[dict[str, tuple[Values, Values]]] = []
        self._watched: list[tuple[int, Watched]] = []
        self._staying: dict[int, Watched] = {}  # those of `present`, from the first pass on
        self._positions: list[dict[str, list[int]]] = []
        self._viewed: list[tuple[str, weakref.ref[torch.UntypedStorage]]] = []  # memory that has gone
        self._standing = Step("", (), ())  # the places of `present`
        self._filled: list[tuple[Place, torch.Tensor]] = []

    def run(self, current: Pass, step: Step, number: int, begun: int, call: Call) -> Any:
        """Run the call of a module with its weights in their places: step `number` of the expected order.

        Most steps of most passes come through here: benchmarks/calls/steps.py measures what each costs.
        """
        order, weights = current.order, self.weights
        assert order is not None
        assert weights is not None
        streamer = weights.streamer if current.astray or number in self.probed[order] else None
        try:
            if streamer is not None:
                streamer.acquire(order, number)
            current.values, to_fill = self._step_values[order][step.path]
            filled = step.fill(to_fill) if to_fill else ()
            current.steps.append(seen := Seen(step.path, step.path))
            inner, (function, args, kwargs) = current.inner_ns, call
            ready = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                ended = time.perf_counter_ns()
                if filled:
                    step.empty(filled)
                if streamer is not None:
                    streamer.release(order, number)
                lead = begun - current.mark  # reads of several threads overlap
                took = ended - ready - (current.inner_ns - inner)
                seen.time = StepTime(lead if lead > 0 else 0, took if took > 0 else 0)
                current.mark = time.perf_counter_ns()
        finally:
            current.open, current.values = None, NO_VALUES

    def load(self, orders: PlannedOrders, options: LoadRequest, beside: int) -> LoadedWeights:
        """Load a plan; calls take `beside` bytes beside its weights."""
        self.orders, self._counted = orders, 0
        self.weights = weights = load_weights(NO_FOLDER, orders.payload, orders.plan, options, beside)
        steps, outside = self._steps, set(orders.plan.outside)
        with plain_tensors_only():
            for twin, value in steps.places.twins.items():
                if twin not in self.staying:
                    name = steps.places.names[twin]
                    self._values[twin] = like(value, name, weights.tensors.__getitem__)
        self.present = {
            twin: value for twin, value in self._values.items() if steps.storages_of(twin) <= outside
        }
        self._step_values = [
            {path: self._values_of(step, left_out.get(path, ())) for path, step in steps.steps.items()}
            for left_out in orders.left_out
        ]
        places = tuple(place for place in steps.places.all if id(place.twin) in self.present)
        self._standing = Step("", places, steps.places.flat)
        self._watched = [
            (twin, Watched(value)) for twin, value in self._values.items() if twin not in self.present
        ]
        for _, watched in self._watched:
            watched.start()
        self.probed = [frozenset(weights.probed(graph)) for graph in range(len(orders.traced))]
        self._positions = [positions_of(order) for order in orders.traced]
        return weights

    def _values_of(self, step: Step, left_out: Collection[int]) -> tuple[Values, Values]:
        """The values of a step without those of storages `left_out`, and which of them it puts in places."""
        away = set(left_out) - self._steps.learned.small
        values = {
            twin: self._values[twin]
            for twin in step.twins
            if twin in self._values and not self._steps.storages_of(twin) & away
        }
        return values, {twin: value for twin, value in values.items() if twin not in self.present}

    def close(self) -> None:
        """Give the memory of the plan back."""
        weights = self.weights
        if weights is None:
            return
        self.leave()
        self.weights = None
        self.present, self._staying = {}, {}
        viewed = [
            (self._steps.places.names[twin], watched.parts[0].untyped_storage())
            for twin, watched in self._watched
            if watched.is_viewed
        ]
        self._watched, self._values, self._step_values = [], {}, []
        # Tensors would keep the memory of a device alive, and that for which the finalizer waits.
        weights.tensors.clear()
        if not viewed:
            weights.close()
        for name, memory in viewed:  # the last view that goes gives it back
            self._viewed.append((name, weakref.ref(memory)))
            weakref.finalize(memory, weights.close)

    def settle(self) -> None:
        """Put weights with memory of their own in their places, and twins in the others."""
        self._steps.places.settle(self.staying, (self.staying, self._values))

    def enter(self) -> None:
        """Put the weights that the plan has in memory throughout in their places, while a call runs.

        Between calls twins stand there: what is written to a weight then has to be kept when the plan goes.
        """
        if not self._staying:  # the weights have been read by now
            sums = self._steps.sums
            self._staying = {twin: Watched(value, sums.get(twin)) for twin, value in self.present.items()}
        self._filled += self._standing.fill(self.present)

    def leave(self) -> None:
        """Put the twins back, and count what was read."""
        self._standing.empty(self._filled)
        self._filled = []
        if self.weights is not None:
            plan = self.weights.plan
            read = self.weights.counters.bytes_moved + sum(plan.sizes[s] for s in plan.outside)
            self._count(read - self._counted)
            self._counted = read

    def next_step(self, current: Pass, step: Step) -> int | None:
        """Return the number of a step in the expected order; None where it has none."""
        if current.order is None:
            return None
        assert self.orders is not None
        order, position = self.orders.traced[current.order].paths, current.position
        if position < len(order) and order[position] == step.path:
            current.position = position + 1
            return position
        numbers = self._positions[current.order].get(step.path)
        if numbers is None:
            return None
        number = next((k for k in numbers if k >= position), numbers[0])
        self.move(current, number)
        return number

    def move(self, current: Pass, number: int) -> None:
        """Note that a step of the expected order comes next; a pass that skips calls of modules is astray."""
        assert self.orders is not None
        assert current.order is not None
        reads = self.orders.traced[current.order].operators
        if number != current.position:
            skipped = range(current.position, number)
            current.astray |= number < current.position or any(not reads or reads[k] is None for k in skipped)
        current.position = number + 1

    def waits(self, current: Pass, number: int) -> bool:
        """Tell whether a step waits for reads; in a pass that is astray, each does."""
        assert current.order is not None
        return current.astray or number in self.probed[current.order]

    def reads_units_only(self, current: Pass, path: str) -> bool:
        """Tell whether the plan has operators read all storages that the step of a module would read."""
        if current.order is None:
            return False
        assert self.orders is not None
        return self.orders.left_out[current.order].get(path) == set(self._steps.readers.storages[path])

    # Uses that are refused.

    def refuse_written(self, current: Pass) -> None:
        """Raise StreamError if a pass has written a weight that leaves memory after its step."""
        written = [self._steps.places.names[twin] for twin, watched in self._watched if watched.is_written]
        written += [fqn for fqn, copy, digest in current.copies if digest_of(copy) != digest]
        if written:
            raise StreamError(
                f"the call writes {written[0]}, which is not in memory between calls: {IN_MEMORY}"
            )

    def written_in_place(self, twins: Collection[int]) -> list[tuple[int, torch.Tensor]]:
        """Return those of `twins` that the plan has in memory throughout, and that something has written."""
        return [(twin, w.value) for twin, w in self._staying.items() if twin in twins and w.is_written]

    @property
    def is_viewed(self) -> bool:
        """Tell whether something keeps a view of a weight of the plan."""
        return any(watched.is_viewed for _, watched in self._watched)

    def refuse_viewed(self) -> None:
        """Raise StreamError while something keeps a view of a weight in memory that has been given back."""
        for collect in (False, True):  # a tracer that failed leaves views in cycles of garbage
            if collect and self._viewed:
                gc.collect()
            self._viewed = [(fqn, memory) for fqn, memory in self._viewed if memory() is not None]
        if self._viewed:
            raise StreamError(
                f"something keeps a view of {self._viewed[0][0]}, which is not in memory between calls: "
                f"keep a clone() of the view, or {IN_MEMORY}"
            )
