"""Reads of single units: rows of tables, experts of stacks, tiles of heads."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.integrations.called.by_units.reads import (
    SLICES,
    OwnUnits,
    Seen,
    Siblings,
    has_units,
    matrix,
    operator_of,
    read_of,
    units_in,
)
from penstock.integrations.called.by_units.watched import (
    Form,
    Root,
    WatchedParameter,
    WatchedTensor,
    bytes_of_view,
    form_of,
    geometry_of,
    part_of,
    root_of,
    watched_in,
    written_by,
)
from penstock.integrations.called.facts import ModuleFacts, Order, StepTime
from penstock.integrations.called.kinds import IN_MEMORY
from penstock.integrations.called.places import StepWeights, is_compiled
from penstock.integrations.cap import Cap
from penstock.integrations.emptied.absent import CLASS
from penstock.passes.sparse.calls import SparseCall
from penstock.passes.sparse.contracts import CONTRACTS, LINEAR
from penstock.passes.sparse.contracts import LEAST as TILED
from penstock.runtime.sparse.trust import reads_units_only
from penstock.runtime.sparse.units import PooledUnits
from penstock.runtime.stream.loaded import LoadedWeights
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import ITEM_SIZES, Part, SparseRead
from penstock.schedule.sparse.pool import LEAST


@dataclass
class Bringing:
    """One operator whose operands are brought: what is held for it, its steps, what is left of the pool.

    `may_be_whole` tells that the step of the module may bring from now on what the operator reads whole, and
    `whole` is the storage that a step of the operator's own brings: one step is open at a time.
    """

    current: Any
    held: ExitStack
    seen: list[Seen]
    left: int
    may_be_whole: bool
    whole: int | None = None

    def note(self, step: Seen, numbers: Sequence[int] = ()) -> None:
        """Take note of a step of the operator."""
        step.numbers |= set(numbers)
        if step not in self.seen:
            self.seen.append(step)


@dataclass
class Planned:
    """What a plan has for operators: by order, the steps that read from its pool, and from its arena.

    `fixed` are the addresses of storages in memory throughout, `arena` and `pool` those of others.
    """

    weights: LoadedWeights
    by_units: list[dict[tuple[str, int, str], list[tuple[int, SparseRead]]]] = field(default_factory=list)
    whole: list[dict[tuple[str, int], list[int]]] = field(default_factory=list)
    probed: list[frozenset[int]] = field(default_factory=list)
    calls: dict[tuple[int, int], SparseCall] = field(default_factory=dict)
    fixed: dict[int, int] = field(default_factory=dict)
    arena: dict[int, int] = field(default_factory=dict)
    pool: dict[int, int] = field(default_factory=dict)

    @property
    def units(self) -> PooledUnits:
        assert isinstance(self.weights.pooled, PooledUnits), "a step reads units and the plan has no pool"
        return self.weights.pooled

    def call(self, graph: int, number: int, read: SparseRead) -> SparseCall:
        """Return what runs the operator of a step on units of the pool."""
        if (graph, number) not in self.calls:
            self.calls[graph, number] = SparseCall(operator_of(read), read, self.units, graph, number)
        return self.calls[graph, number]

    def step_of(self, current: Any, path: str, read: SparseRead) -> tuple[int, SparseRead] | None:
        """Return the step of the plan that reads from the pool as an operator does now, or None."""
        if current.order is None:
            return None
        key, graph = (path, read.storage, read.operator), self.by_units[current.order]
        steps = graph.get(key)
        if steps is None and read.operator == SLICES:
            steps = next((step for (_, s, _), step in graph.items() if s == read.storage), None)
        if steps is None:
            return None
        turns = current.reads.turns
        turn = turns.get(key, 0)
        turns[key] = turn + 1
        number, known = steps[turn % len(steps)]
        return (number, known) if read.operator == SLICES or matrix(known) == matrix(read) else None

    def hold(self, number: int, read: SparseRead, numbers: Sequence[int], to: Bringing) -> bool:
        """Have units in the pool for a step; returns whether they fit into what is left of it."""
        pool, graph = self.units.pool, to.current.order
        edges = [pool.granules(read, unit) for unit in numbers]
        nbytes = sum(stop - first for first, stop in edges) * pool.granule
        if not numbers or nbytes > to.left:
            return False
        to.left -= nbytes
        self.units.ask(graph, number, numbers)
        to.held.enter_context(self.units.hold(graph, number, numbers, alone=True))
        return True

    def takes_step(self, current: Any, path: str, storage: int) -> bool:
        """Have a storage in the arena, in a step of the operator's own; returns whether the plan has one.

        Operators that read the same storage one after another, as in a loop, are one step.
        """
        reads = current.reads
        if current.order is None or current.open is not None:
            return False
        if reads.held is not None and reads.held[1] == (path, storage):
            return True
        numbers = self.whole[current.order].get((path, storage))
        if numbers is None:
            return False
        self.release(current)
        turn = reads.turns.get((path, storage), 0)
        reads.turns[path, storage] = turn + 1
        number, streamer = numbers[turn % len(numbers)], self.weights.streamer
        if number in self.probed[current.order] and streamer is not None:
            streamer.acquire(current.order, number)
            reads.held = number, (path, storage)
        return True

    def release(self, current: Any) -> None:
        """Give back what an operator of its own step has read whole, before another step begins."""
        number, current.reads.held = current.reads.held, None
        streamer = self.weights.streamer
        if number is not None and streamer is not None:
            streamer.release(current.order, number[0])


def open_planned(
    weights: LoadedWeights, orders: Sequence[Order], facts: ModuleFacts, roots: Mapping[int, Root]
) -> Planned:
    """Return what a plan has for operators; `orders` are those of its traces."""
    plan = weights.plan
    planned = Planned(weights)
    for order, trace in zip(orders, plan.traces, strict=True):
        by_units: dict[tuple[str, int, str], list[tuple[int, SparseRead]]] = {}
        whole: dict[tuple[str, int], list[int]] = {}
        for number, (path, read) in enumerate(zip(order.owners, order.operators, strict=False)):
            if read is None:
                continue
            served = [
                read_of_step
                for read_of_step in trace.steps[number].sparse
                if plan.pool is not None and plan.pool.has(read_of_step)
            ]
            for read_of_step in served:
                by_units.setdefault((path, read_of_step.storage, read_of_step.operator), []).append(
                    (number, read_of_step)
                )
            if not served:
                s = read if isinstance(read, int) else read.storage
                whole.setdefault((path, s), []).append(number)
        planned.by_units.append(by_units)
        planned.whole.append(whole)
        planned.probed.append(frozenset(weights.probed(trace.graph)))
    names = {part.storage: name for name, part in facts.parts.items()}
    for s in roots:
        address = weights.tensors[names[s]].data_ptr() - facts.parts[names[s]].offset
        (planned.fixed if s in plan.outside else planned.arena)[s] = address
        if plan.pool is not None and plan.pool.layout[s] >= 0:
            planned.pool[s] = planned.units._address(s)
    return planned


class UnitReads:
    """The operators that read watched weights: single units, or a whole weight outside of modules' steps.

    Tables, stacks and large heads are watched from the start. Only what is read by units stays watched, as
    code that asks for functions of a tensor's own would take other branches. Without `by_units`, none is
    watched: devices with memory of their own cannot wait for units in the middle of a pass.

    Attributes:
        roots: The storages that are watched.
        whole: Paths of modules and storages that their steps read whole.
    """

    def __init__(
        self,
        module: nn.Module,
        steps: StepWeights,
        cap: Cap,
        stay: Callable[[Any, int], torch.Tensor],
        have_room: Callable[[Any, int, int], None],
        *,
        by_units: bool,
    ) -> None:
        self.roots: dict[int, Root] = {}
        self.whole: set[tuple[str, int]] = set()
        self.spoiled = False
        self.own = OwnUnits(steps.own, self._room, self._measure)
        self._steps, self._cap, self._stay, self._have_room = steps, cap, stay, have_room
        self._current: Any = None  # the pass that runs
        self._homes: dict[int, str] = {}
        self._twins: dict[int, tuple[str, list[tuple[torch.Tensor, type]]]] = {}
        self._stayed: dict[int, int] = {}
        self._planned: Planned | None = None
        self._lock = threading.RLock()
        facts = self.facts
        named = [name for name, _ in module.named_parameters() if name in facts.parts]
        self._uses = Counter(facts.parts[name].storage for name in named)
        self.siblings = Siblings(module, steps.own, self._uses, lambda s: s in self.roots)
        self._by_units = by_units
        if not by_units:
            self.siblings.lists.clear()
        compiled = tuple(path for path, part in module.named_modules() if is_compiled(part))
        for path, part in module.named_modules():
            for key, value in part._parameters.items():
                name = f"{path}.{key}" if path else key
                if value is None or name not in facts.parts or CLASS in vars(value):
                    continue
                if not path.startswith(compiled) and self._may_have_units(part, facts.parts[name]):
                    self.watch(name, value)
        for path, part in module.named_modules():  # a head that is tied to a table is read whole
            weight = facts.parts.get(f"{path}.weight") if type(part) is nn.Linear else None
            if weight and weight.storage in self.roots and facts.storages[weight.storage].nbytes < TILED:
                self.whole.add((path, weight.storage))

    @property
    def facts(self) -> ModuleFacts:
        """The facts of the module."""
        return self._steps.facts

    def _may_have_units(self, owner: nn.Module, part: Part) -> bool:
        nbytes = self.facts.storages[part.storage].nbytes
        if nbytes < LEAST or len(part.shape) < 2:
            return False
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return owner.max_norm is None
        return nbytes >= TILED or (len(part.shape) > 2 and not isinstance(owner, nn.modules.conv._ConvNd))

    def watch(self, fqn: str, twin: torch.Tensor) -> bool:
        """Watch a weight from now on; returns whether that is possible, and new."""
        part = self.facts.parts.get(fqn) if self._by_units else None
        if part is None or part.storage in self.roots or self._uses[part.storage] != 1:
            return False
        if part.storage in self._stayed:
            return False
        says = f"the parameter {fqn} is not in memory, and calls of the model have units of it alone"
        self.roots[part.storage] = root = Root(
            part, self.facts.storages[part.storage].nbytes, says, self._run
        )
        self._twins[part.storage] = fqn, [(twin, type(twin))]
        root.watch(twin)
        return True

    def awake(self, current: Any) -> None:
        """Have watched twins serve a pass by units."""
        self._current = current
        for _, twins in self._twins.values():
            for twin, kind in twins:
                twin.__class__ = WatchedParameter if issubclass(kind, nn.Parameter) else WatchedTensor

    def rest(self) -> None:
        """Have watched twins be absent like all others, between calls."""
        self._current = None
        for _, twins in self._twins.values():
            for twin, kind in twins:
                twin.__class__ = kind

    def unwatch(self, storages: Collection[int]) -> None:
        """Stop watching weights that stay in memory from now on."""
        for storage in self.roots.keys() & storages:
            self._let_go(storage)

    def _let_go(self, storage: int) -> None:
        del self.roots[storage]
        for twin, kind in self._twins.pop(storage)[1]:
            twin.__class__ = kind

    def stack(self, paths: Sequence[str], places: Mapping[str, torch.Tensor]) -> set[int]:
        """Make a list's weights of one name the units of a storage; return those too small for that."""
        groups: list[tuple[str, list[str]]] = []
        small: set[int] = set()
        for path in paths:
            groups_of_list = self.siblings.groups(path)
            assert groups_of_list is not None, "the list was seen to have units"
            groups += [(path, fqns) for fqns in groups_of_list[0]]
            small |= groups_of_list[1]
        for path in paths:
            del self.siblings.lists[path]
        first = len(self.facts.storages)
        self._steps.own.facts = self.facts.stacked([fqns for _, fqns in groups])
        for s, (path, fqns) in enumerate(groups, first):
            storage, part = self.facts.storages[s], self.facts.parts[fqns[0]]
            stride = storage.nbytes // len(fqns) // ITEM_SIZES[part.dtype]
            whole = replace(part, shape=(len(fqns), *part.shape), stride=(stride, *part.stride))
            name = f"{path}.*.{fqns[0][len(path) + 1 :].partition('.')[2]}"
            says = f"the parameters {name} are not in memory, and calls of the model have units of them alone"
            self.roots[s] = root = Root(whole, storage.nbytes, says, self._run)
            self._twins[s], self._homes[s] = (name, [(places[fqn], type(places[fqn])) for fqn in fqns]), path
            for unit, fqn in enumerate(fqns):
                root.watch(places[fqn], unit)
        return small

    def is_member(self, path: str) -> bool:
        """Tell whether a module is in a list whose weights are units: its calls are no steps."""
        return any(path.startswith(f"{home}.") for home in self._homes.values())

    def _home(self, current: Any, storage: int) -> str:
        """Return the path of the module by whose reads a storage is planned."""
        return self._homes.get(storage) or current.path

    def left_out(
        self, path: str, storages: Sequence[int], merged: Collection[tuple[str, int]] = ()
    ) -> set[int]:
        """Return the storages that the step of a module does not bring, as its operators do."""
        return {s for s in storages if self._is_by_operator(path, s, merged)}

    def _is_by_operator(self, path: str, storage: int, merged: Collection[tuple[str, int]]) -> bool:
        whole = (path, storage) in self.whole or (path, storage) in merged
        return storage in self.roots and not whole

    def keeps(
        self,
        path: str,
        read: SparseRead | int | None,
        merged: Collection[tuple[str, int]],
        resident: Collection[int],
    ) -> bool:
        """Tell whether a step is a module's call, or an operator that reads what is not in memory."""
        if read is None:
            return True
        s = read if isinstance(read, int) else read.storage
        return self._is_by_operator(path, s, merged) and s not in resident

    def settle(self, orders: Sequence[Order]) -> None:
        """Stop watching what the steps of modules read whole only."""
        storages = {
            read if isinstance(read, int) else read.storage
            for order in orders
            for read in order.operators
            if read is not None
        }
        for s in {s for _, s in self.whole} & (self.roots.keys() - storages):
            self._let_go(s)

    # Plans.

    def open(self, weights: LoadedWeights, orders: Sequence[Order]) -> None:
        """Serve operators from a plan; `orders` are those of its traces."""
        self._planned = open_planned(weights, orders, self.facts, self.roots)

    def close(self) -> None:
        """Serve nothing from a plan any more."""
        self._planned = None
        for root in self.roots.values():
            root.forget()
        self.own.close()
        self.spoiled = False

    def run_to_end(self, current: Any, run: Callable[[], Any]) -> Any:
        """Run a call. What it returns of watched weights becomes tensors with memory of their own."""
        output = run()
        if self._twins and any(not isinstance(value, nn.Parameter) for value in watched_in(output)):
            output = pytree.tree_map_only(WatchedTensor, _cloned, output)
        self.release(current)
        return output

    def release(self, current: Any) -> None:
        """Give back what an operator of its own step has read whole, before another step begins."""
        if self._planned is not None:
            self._planned.release(current)
        current.reads.held = None

    # Operators.

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that reads watched tensors."""
        with self._lock:
            current, first = self._current, next(iter(watched_in(args, kwargs)))
            if current is None:
                raise StreamError(root_of(first).says)
            begun, self.own.read_ns = time.perf_counter_ns(), 0
            self._measure(0)
            written = written_by(func, args, kwargs)
            for watched in written:
                self._have_stay(root_of(watched).storage)
            seen: list[Seen] = []
            form = form_of(func, args, kwargs) if not written else None
            call = self._contracted(current, form, seen) if form is not None else None
            try:
                if call is not None:
                    return call()
                tiles = form is not None and form.operator == LINEAR and root_of(first).nbytes >= TILED
                return self._by_geometry(current, func, args, kwargs, seen, may_be_whole=not tiles)
            finally:
                ended = time.perf_counter_ns()
                took = ended - begun - self.own.read_ns
                for seen_read in seen:
                    lead = 0 if current.open is not None else max(0, begun - current.mark)
                    seen_read.time = StepTime(
                        seen_read.time.lead_ns + lead, seen_read.time.read_ns + took // len(seen)
                    )
                current.inner_ns += ended - begun
                if current.open is None:
                    current.mark = ended

    def _measure(self, unit_bytes: int) -> None:
        """Have the memory of an observed pass measured, of which `unit_bytes` bytes are units."""
        current = self._current
        if current is not None and current.meter is not None:
            current.meter.look(current.own_bytes + unit_bytes)

    def _room(self) -> int:
        """Return the bytes that reads by units without a plan may take at once."""
        current = self._current
        if current is None or current.meter is None:
            return self._cap.room - (self._planned.weights.plan.budget if self._planned else 0)
        taken: int = current.own_bytes + max(0, current.meter.peak - self._cap.spare)
        return max(0, self._cap.room - taken)

    def _have_stay(self, storage: int) -> None:
        if storage not in self._stayed:
            name, ((twin, _), *more) = self._twins[storage]
            if more:
                raise StreamError(f"{self.roots[storage].says}, and the call writes to one: {IN_MEMORY}")
            self._let_go(storage)
            value = self._stay(self._current, id(twin))
            self._stayed[storage] = value.data_ptr() - self.facts.parts[name].offset

    def _contracted(self, current: Any, form: Form, seen: list[Seen]) -> Callable[[], Any] | None:
        """Return what runs an operator that names the units it reads; None where its geometry has to tell."""
        contract = CONTRACTS[form.operator]
        weight, index = contract.operands(form.arguments)
        view, s = part_of(weight), root_of(weight).storage
        path = self._home(current, s)
        computes = contract.index is None or contract.ends
        if computes and torch.is_autocast_enabled("cpu"):  # which would convert all of the weight
            return None
        read = read_of(form, view, self.facts.storages[s].nbytes, TILED)
        if read is None or (path, s) in self.whole or self._fixed(s) is not None:
            return None
        plan = self._planned
        planned = plan.step_of(current, path, read) if plan is not None else None
        if planned is None and form.operator != LINEAR and not reads_units_only(read):
            return None
        route = ("index", id(index), contract.ends) if index is not None else ("tiles", s)
        current.reads.kept.append(index)
        seen.append(self._note(current, path, read, route))
        replaced = contract.replaced(form.arguments, geometry_of(weight), index)
        if plan is not None and planned is not None:
            call = plan.call(current.order, *planned)
            return lambda: call(*replaced)
        if plan is not None and plan.takes_step(current, path, s):
            plain = root_of(weight).tensor(weight, plan.arena[s])
            return lambda: operator_of(read)(*contract.replaced(form.arguments, plain, index))
        return lambda: self.own.call(read)(*replaced)

    def _by_geometry(
        self,
        current: Any,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seen: list[Seen],
        *,
        may_be_whole: bool,
    ) -> Any:
        """Run any other operator: all units in which its operands have bytes are held."""
        spans: dict[int, list[tuple[int, int]]] = {}
        anywhere = "as_strided" in getattr(func, "__name__", "")  # it may read all that lies around a view
        for value in watched_in(args, kwargs):
            place = (0, root_of(value).nbytes) if anywhere else bytes_of_view(part_of(value))
            spans.setdefault(root_of(value).storage, []).append(place)
        addresses: dict[int, int] = {}
        with ExitStack() as stack:
            plan = self._planned
            bringing = Bringing(
                current, stack, seen, plan.units.pool.nbytes if plan and plan.pool else 0, may_be_whole
            )
            for s, places in spans.items():
                fixed = self._fixed(s)
                addresses[s] = self._brought(s, places, bringing) if fixed is None else fixed
            return self._plainly(func, args, kwargs, addresses)

    def _brought(self, s: int, places: Sequence[tuple[int, int]], to: Bringing) -> int:
        """Have in memory what an operator reads of a storage; returns the address of the storage."""
        current, path, needed = to.current, self._home(to.current, s), [(0, self.facts.storages[s].nbytes)]
        read, plan = self._slices(path, s), self._planned
        planned = plan.step_of(current, path, read) if plan is not None and read is not None else None
        read = planned[1] if planned is not None else read
        numbers, counts = units_in(places, read) if read is not None else None, True
        if numbers is not None and read is not None and len(numbers) < read.count:
            if numbers:
                to.note(self._note(current, path, replace(read, operator=SLICES), ("slices", path)), numbers)
            if plan is not None and planned is not None and plan.hold(*planned, numbers, to):
                return plan.pool[s]
            needed = [read.unit(number) for number in numbers]
        elif to.may_be_whole and s in self._steps.readers.storages.get(path, ()):
            self.whole.add((path, s))
            current.reads.whole = True
        elif to.whole in (None, s):
            to.whole = s
            to.note(self._note(current, path, s, None))
        else:
            counts = False
        if to.whole in (None, s) and plan is not None and plan.takes_step(current, path, s):
            to.whole = s
            return plan.arena[s]
        self._have_room(current, sum(stop - start for start, stop in needed), self.own.held_bytes)
        to.held.enter_context(self.own.holding(s, needed, counts=counts))
        return self.own.address(s)

    def _fixed(self, storage: int) -> int | None:
        """Return the address of a storage that is in memory throughout."""
        fixed = self._stayed.get(storage)
        return fixed if fixed is not None or self._planned is None else self._planned.fixed.get(storage)

    def _plainly(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], addresses: Mapping[int, int]
    ) -> Any:
        """Run a function on plain tensors. What it returns of their memory is watched again."""
        roots = {root_of(value) for value in watched_in(args, kwargs)}
        moving = [root for root in roots if root.storage not in self._stayed]

        def opened(watched: Any) -> torch.Tensor:
            return root_of(watched).tensor(watched, addresses[root_of(watched).storage])

        def closed(value: Any) -> Any:
            for root in roots:
                address = addresses[root.storage]
                if (
                    type(value) is torch.Tensor
                    and value.layout == torch.strided
                    and root.covers(address, value)
                ):
                    return root.like(value, address)
                array = (
                    getattr(value, "__array_interface__", None) if type(value).__module__ == "numpy" else None
                )
                if array is not None and address <= array["data"][0] < address + root.nbytes:
                    return value.copy()
            return value

        args, kwargs = pytree.tree_map_only(WatchedTensor, opened, (tuple(args), dict(kwargs)))
        before = [root.versions() for root in moving]
        result = func(*args, **kwargs)
        if [root.versions() for root in moving] != before:
            self.spoiled = True
            raise StreamError(f"{moving[0].says}, and {func.__name__} has written to it: {IN_MEMORY}")
        plain = (
            isinstance(result, tuple | list)
            or type(result) is torch.Tensor
            or type(result).__module__ == "numpy"
        )
        return pytree.tree_map(closed, result) if plain else result

    # What a pass has read.

    def _slices(self, path: str, storage: int) -> SparseRead | None:
        """Return the read of slices of a storage; None where it has none, or is read whole."""
        root = self.roots.get(storage)
        if root is None or (path, storage) in self.whole:
            return None
        read = SparseRead(root.part, SLICES, 0, 0)
        nbytes = self.facts.storages[storage].nbytes
        return read if nbytes >= LEAST and has_units(read, nbytes) else None

    def _note(self, current: Any, path: str, read: SparseRead | int, route: object) -> Seen:
        """Note an operator as a step of the pass; reads in a row, and slices for one module, are one step."""
        reads = current.reads
        storage = read if isinstance(read, int) else read.storage
        name = self._twins[storage][0]
        if isinstance(read, int):
            last: Seen | None = current.steps[-1] if current.steps else None
            if last is not None and (last.owner, last.read) == (path, read):
                return last
            new = Seen(f"{path or 'model'}: {name}", path, read=read)
        else:
            key = path, storage
            if read.operator == SLICES and key in reads.slices:
                known: Seen = reads.slices[key]
                return known
            number = reads.routes.setdefault(route, len(reads.routes))
            new = Seen(f"{path or 'model'}: units of {name}", path, read=replace(read, route=number))
            if read.operator == SLICES:
                reads.slices[key] = new
        current.steps.append(new)
        return new


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
