"""Reads of single units: rows of tables, experts of stacks, tiles of heads. Seen in a first pass, then from a pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from penstock.integrations.called.facts import ModuleFacts, Order, StepTime
from penstock.integrations.called.own_memory import OwnMemory
from penstock.integrations.called.watched import (
    Form,
    Root,
    WatchedTensor,
    bytes_of_view,
    form_of,
    geometry_of,
    part_of,
    refuse_write,
    root_of,
    watched_in,
)
from penstock.passes.sparse.calls import SparseCall
from penstock.passes.sparse.contracts import CONTRACTS
from penstock.passes.sparse.operators import find_operator
from penstock.passes.sparse.tiles import LEAST as TILED
from penstock.passes.sparse.tiles import LINEAR, MOST_RESULT, tiled
from penstock.runtime.arena.base import tensor_at
from penstock.runtime.sparse.base import PooledUnits
from penstock.runtime.sparse.trial import reads_units_only
from penstock.runtime.stream.passes import LoadedWeights
from penstock.runtime.system.memory import PAGE, Reservation, drop_pages, round_down, round_up
from penstock.schedule.facts.catalog import ITEM_SIZES
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Part, SparseRead
from penstock.schedule.sparse.division import LEAST, LEAST_UNIT

_SLICES = "aten.index_select.default"
"""The operator that stands for reads of slices by any operator: it reads as they do, which units it is told."""


@dataclass(eq=False)
class Seen:
    """A step of a pass: the call of a module, or a read by units with `read`, which names the units `numbers`."""

    path: str
    owner: str
    time: StepTime = StepTime(0, 0)
    read: SparseRead | None = None
    numbers: set[int] = field(default_factory=set)

    def as_read(self) -> SparseRead | None:
        """Return the read with the number of units that were asked for."""
        if self.read is None or not self.numbers:
            return self.read
        return replace(self.read, asked=len(self.numbers))


@dataclass(eq=False)
class PassReads:
    """What one pass has read by units: routes by what names units, reads of slices, turns of reads.

    `whole` are paths and storages that were seen to be read whole, and `kept` holds what routes name by id.
    """

    routes: dict[object, int] = field(default_factory=dict)
    slices: dict[tuple[str, int, str], Seen] = field(default_factory=dict)
    turns: dict[tuple[str, int, str], int] = field(default_factory=dict)
    whole: list[tuple[str, int]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)

    def is_like(self, order: Order, steps: Sequence[Seen]) -> bool:
        """Tell whether steps ask for about as many units as those of an order."""
        for read, one in zip(order.sparse, steps, strict=False):
            asked = one.as_read()
            if read is not None and asked is not None and not read.asked <= 2 * asked.asked <= 4 * read.asked:
                return False
        return True


def candidates(module: nn.Module, facts: ModuleFacts) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights that are observed for reads by units: tables, stacks, and heads large enough for tiles.

    A storage of several weights is none. Only what is read by units stays watched, as code that asks for functions
    of a tensor's own would take other branches.
    """
    uses: dict[int, int] = {}
    named = dict(module.named_parameters())
    for name in named:
        if name in facts.parts:
            s = facts.parts[name].storage
            uses[s] = uses.get(s, 0) + 1
    for path, one in module.named_modules():
        for key, value in one._parameters.items():
            name = f"{path}.{key}" if path else key
            if value is None or name not in named or name not in facts.parts:
                continue
            part = facts.parts[name]
            storage = facts.storages[part.storage]
            if storage.kind != "streamable" or storage.nbytes < LEAST or uses[part.storage] > 1 or len(part.shape) < 2:
                continue
            stack = len(part.shape) > 2 and not isinstance(one, nn.modules.conv._ConvNd)
            if isinstance(one, nn.Embedding | nn.EmbeddingBag) or stack or storage.nbytes >= TILED:
                yield name, value


class OwnUnits:
    """Units in memory of their own, while one operator runs: in passes without a plan, and where a plan has none."""

    def __init__(
        self, facts: ModuleFacts, own: OwnMemory, room: Callable[[], int], measure: Callable[[int], None]
    ) -> None:
        self._facts, self._own, self._room, self._measure = facts, own, room, measure
        self._memory: dict[int, Reservation] = {}
        self._held = 0
        self.read_ns = 0

    def address(self, storage: int) -> int:
        """Return where a storage begins in address space that takes memory only for units."""
        memory = self._memory.get(storage)
        if memory is None:
            one = self._facts.storages[storage]
            memory = self._memory[storage] = Reservation(one.phase + one.nbytes)
            memory.map_anonymous(0, memory.nbytes)
        return memory.address + self._facts.storages[storage].phase

    @contextmanager
    def holding(self, storage: int, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Have the bytes of spans of a storage in memory."""
        begun, base = time.perf_counter_ns(), self.address(storage)
        nbytes = sum(stop - start for start, stop in spans)
        try:
            with _disable_current_modes():
                for start, stop in _joined(spans):
                    self._own.read_span(storage, start, stop, base)
            self._held += nbytes
            self.read_ns += time.perf_counter_ns() - begun
            yield
        finally:
            self._measure(self._held)
            self._held = max(0, self._held - nbytes)
            for start, stop in spans:
                first = round_down(base + start, PAGE)
                drop_pages(first, round_up(base + stop, PAGE) - first)

    def call(self, read: SparseRead) -> SparseCall:
        """Return what runs the operator of a read on units in memory of their own."""
        operator = find_operator(read.operator)
        assert operator is not None, "an operator was called that nothing has defined"
        return SparseCall(operator, read, _OwnRead(self, read, self._room), 0, 0)

    def close(self) -> None:
        """Give back the address space."""
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()


class _OwnRead:
    """The units of one read, in memory of their own."""

    pool: Any = None
    certify = PooledUnits.certify

    def __init__(self, own: OwnUnits, read: SparseRead, room: Callable[[], int]) -> None:
        self._own, self._read, self._room = own, read, room

    def tensor(self, read: SparseRead) -> torch.Tensor:
        with torch.inference_mode(False):
            return tensor_at(self._own.address(read.storage), read.view)

    def ask(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        most = max(1, self._room() // max(1, self._read.unit_nbytes))
        return [list(units[k : k + most]) for k in range(0, len(units), most)]

    def hold(self, graph: int, step: int, units: Sequence[int], *, alone: bool) -> Any:
        return self._own.holding(self._read.storage, [self._read.unit(number) for number in units])


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


class Planned(NamedTuple):
    """What a plan has for reads by units: by order, the numbers of the steps of each read, and their calls."""

    units: PooledUnits
    graphs: list[dict[tuple[str, int, str], list[tuple[int, SparseRead]]]]
    calls: dict[tuple[int, int], SparseCall]
    addresses: dict[int, int]


class UnitReads:
    """The reads by units of a module's calls. `current` returns the pass that runs, and None outside of passes.

    Attributes:
        roots: The storages that are watched.
        whole: Paths of modules and storages that they have read whole.
    """

    def __init__(
        self, module: nn.Module, facts: ModuleFacts, own: OwnMemory, current: Callable[[], Any], room: Callable[[], int]
    ) -> None:
        self.roots: dict[int, Root] = {}
        self.whole: set[tuple[str, int]] = set()
        self.own = OwnUnits(facts, own, room, self._measure)
        self._facts, self._current = facts, current
        self._twins: dict[int, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._planned: Planned | None = None
        self._lock = threading.RLock()
        self._plain: type = nn.Parameter
        for name, twin in candidates(module, facts):
            part = facts.parts[name]
            if part.storage not in self.roots:
                says = f"the parameter {name} is not in memory: only calls of the model bring units of it"
                root = Root(part, facts.storages[part.storage].nbytes, says, self._run)
                self.roots[part.storage] = root
                self._twins[part.storage], self._names[part.storage] = twin, name
                self._plain = type(twin)
                root.watch(twin)

    def left_out(self, path: str, storages: Sequence[int], merged: Collection[tuple[str, int]] = ()) -> set[int]:
        """Return the storages that the step of a module does not bring, as reads by units do."""
        pairs = ((path, s) for s in storages if s in self.roots)
        return {s for path, s in pairs if (path, s) not in self.whole and (path, s) not in merged}

    def keeps(self, path: str, read: SparseRead | None, merged: Collection[tuple[str, int]]) -> bool:
        """Tell whether a step is one of its own: the call of a module, or a read by units that a plan may serve."""
        if read is None:
            return True
        return read.storage in self.roots and (path, read.storage) not in self.whole.union(merged)

    def settle(self, orders: Sequence[Order]) -> None:
        """Stop watching what calls read whole only."""
        by_units = {read.storage for order in orders for read in order.sparse if read is not None}
        for s in {s for _, s in self.whole} & (self.roots.keys() - by_units):
            self._twins[s].__class__ = self._plain
            del self.roots[s]

    # Plans.

    def open(self, weights: LoadedWeights, orders: Sequence[Order]) -> None:
        """Serve reads from the pool of a plan; `orders` are those of its traces."""
        self._planned = None
        if weights.units is None:
            return
        graphs: list[dict[tuple[str, int, str], list[tuple[int, SparseRead]]]] = []
        for trace in weights.plan.traces:
            found: dict[tuple[str, int, str], list[tuple[int, SparseRead]]] = {}
            for number, step in enumerate(trace.steps):
                for read in step.sparse:
                    if weights.units.pool.has(read):
                        key = orders[len(graphs)].owners[number], read.storage, read.operator
                        found.setdefault(key, []).append((number, read))
            graphs.append(found)
        pool = weights.units.pool
        addresses = {s: weights.units._address(s) for s in pool.storages}
        self._planned = Planned(weights.units, graphs, {}, addresses)

    def close(self) -> None:
        """Serve no reads from a pool any more."""
        self._planned = None
        for root in self.roots.values():
            root.forget()
        self.own.close()

    # Operators.

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that reads watched tensors."""
        with self._lock:
            current, first = self._current(), next(iter(watched_in(args, kwargs)))
            if current is None:
                raise StreamError(root_of(first).says)
            refuse_write(func, args, kwargs)
            begun, self.own.read_ns = time.perf_counter_ns(), 0
            self._measure(0)
            seen: list[Seen] = []
            form = form_of(func, args, kwargs)
            call = self._contracted(current, form, seen) if form is not None else None
            try:
                return call() if call is not None else self._by_geometry(current, func, args, kwargs, seen)
            finally:
                ended = time.perf_counter_ns()
                took = ended - begun - self.own.read_ns
                for one in seen:
                    lead = 0 if current.open is not None else max(0, begun - current.mark)
                    one.time = StepTime(one.time.lead_ns + lead, one.time.read_ns + took // len(seen))
                current.inner_ns += ended - begun
                if current.open is None:
                    current.mark = ended

    def _measure(self, held: int) -> None:
        """Have the memory of an observed pass measured, of which `held` bytes are units."""
        current = self._current()
        if current is not None and current.meter is not None:
            current.meter.look(current.own_bytes + held)

    def _contracted(self, current: Any, form: Form, seen: list[Seen]) -> Callable[[], Any] | None:
        """Return what runs an operator that names the units it reads; None where its geometry has to tell."""
        contract = CONTRACTS[form.operator]
        weight, index = contract.operands(form.arguments)
        if contract.index is None or contract.ends:
            if torch.is_autocast_enabled("cpu") or isinstance(form.arguments[contract.rows], WatchedTensor):
                return None
        path, view, reads = current.path, part_of(weight), current.reads
        if (path, view.storage) in self.whole:
            return None
        read = _read_of(form, view, self._facts.storages[view.storage].nbytes)
        if read is None:
            return None
        given = contract.replaced(form.arguments, geometry_of(weight), index)
        planned = self._step_of(current, path, read)
        if planned is None and form.operator != LINEAR and not reads_units_only(read):
            return None
        route = ("index", id(index), contract.ends) if index is not None else ("tiles", view.storage)
        reads.kept.append(index)
        seen.append(self._note(current, path, read, route, again=False))
        if planned is None:
            return lambda: self.own.call(read)(*given)
        number, known = planned
        plan, graph = self._planned, current.order
        assert plan is not None
        call = plan.calls.get((graph, number))
        if call is None:
            operator = find_operator(known.operator)
            assert operator is not None, "an operator was called that nothing has defined"
            call = plan.calls[graph, number] = SparseCall(operator, known, plan.units, graph, number)
        return lambda: call(*given)

    def _by_geometry(
        self, current: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], seen: list[Seen]
    ) -> Any:
        """Run any other operator: it reads the units in which its operands have bytes, all of which are held."""
        path, spans = current.path, dict[int, list[tuple[int, int]]]()
        for one in watched_in(args, kwargs):
            spans.setdefault(root_of(one).storage, []).append(bytes_of_view(part_of(one)))
        addresses: dict[int, int] = {}
        with ExitStack() as held:
            left = self._planned.units.pool.nbytes if self._planned is not None else 0
            for s, places in spans.items():
                read = self._slices(path, s)
                planned = self._step_of(current, path, read) if read is not None else None
                if planned is not None:
                    read = planned[1]
                numbers = _units_in(places, read) if read is not None else None
                if read is None or numbers is None or len(numbers) == read.count:
                    self._note_whole(current, path, s)
                    numbers = None
                elif numbers:
                    one = self._note(current, path, read, ("slices", path), again=True)
                    one.numbers |= set(numbers)
                    if one not in seen:
                        seen.append(one)
                if planned is not None and numbers is not None:
                    taken = self._hold(held, current.order, planned, numbers, left)
                    if taken:
                        left -= taken
                        assert self._planned is not None
                        addresses[s] = self._planned.addresses[s]
                        continue
                whole = [(0, self._facts.storages[s].nbytes)]
                units = [read.unit(number) for number in numbers] if numbers is not None and read else whole
                held.enter_context(self.own.holding(s, units))
                addresses[s] = self.own.address(s)
            return self._plainly(func, args, kwargs, addresses)

    def _hold(
        self, held: ExitStack, graph: int, planned: tuple[int, SparseRead], numbers: Sequence[int], left: int
    ) -> int:
        """Have units in the pool, and return the bytes that they take; 0 where they do not fit."""
        plan, (number, read) = self._planned, planned
        assert plan is not None
        edges = [plan.units.pool.granules(read, one) for one in numbers]
        nbytes = sum(stop - first for first, stop in edges) * plan.units.pool.granule
        if nbytes > left or not numbers:
            return 0
        plan.units.ask(graph, number, numbers)
        held.enter_context(plan.units.hold(graph, number, numbers, alone=True))
        return nbytes

    def _plainly(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], addresses: Mapping[int, int]
    ) -> Any:
        """Run a function on plain tensors. What it returns of their memory is watched again."""
        roots = [(root_of(one), addresses[root_of(one).storage]) for one in watched_in(args, kwargs)]

        def opened(one: Any) -> torch.Tensor:
            return root_of(one).tensor(one, addresses[root_of(one).storage])

        args, kwargs = pytree.tree_map_only(WatchedTensor, opened, (tuple(args), dict(kwargs)))
        before = [root.versions() for root, _ in roots]
        made = func(*args, **kwargs)
        if [root.versions() for root, _ in roots] != before:
            self.close()
            raise StreamError(f"{roots[0][0].says}, and {func.__name__} has written to it: restore() the model first")

        def closed(one: Any) -> Any:
            for root, address in roots:
                if type(one) is torch.Tensor and one.layout == torch.strided and root.covers(address, one):
                    return root.like(one, address)
                if type(one).__module__ == "numpy" and hasattr(one, "__array_interface__"):
                    place = one.__array_interface__["data"][0]
                    if address <= place < address + root.nbytes:
                        return one.copy()
            return one

        if isinstance(made, tuple | list) or type(made) is torch.Tensor or type(made).__module__ == "numpy":
            return pytree.tree_map(closed, made)
        return made

    # What a pass has read.

    def _slices(self, path: str, storage: int) -> SparseRead | None:
        """Return the read of slices of a storage; None where it has none, or is read whole."""
        if (path, storage) in self.whole:
            return None
        root = self.roots.get(storage)
        if root is None:
            return None
        read = SparseRead(root.part, _SLICES, 0, 0)
        return read if _has_units(read, self._facts.storages[storage].nbytes) else None

    def _step_of(self, current: Any, path: str, read: SparseRead) -> tuple[int, SparseRead] | None:
        """Return the step of the plan that reads as an operator does now; None where there is none."""
        if self._planned is None or current.order is None:
            return None
        graph = self._planned.graphs[current.order]
        steps = graph.get((path, read.storage, read.operator))
        if steps is None and read.operator == _SLICES:
            steps = next((found for (_, s, _), found in graph.items() if s == read.storage), None)
        if steps is None:
            return None
        turns = current.reads.turns
        turn = turns.get((path, read.storage, read.operator), 0)
        turns[path, read.storage, read.operator] = turn + 1
        number, known = steps[turn % len(steps)]
        same = known.operator == _SLICES or _matrix(known) == _matrix(read)
        return (number, known) if same or read.operator == _SLICES else None

    def _note(self, current: Any, path: str, read: SparseRead, route: object, *, again: bool) -> Seen:
        """Note a read by units as a step of the pass; reads of slices by one module are one step."""
        key, reads = (path, read.storage, read.operator), current.reads
        if again and key in reads.slices:
            return reads.slices[key]
        number = reads.routes.setdefault(route, len(reads.routes))
        label = f"{path or 'model'}: units of {self._names[read.storage]}"
        one = Seen(label, path, read=replace(read, route=number))
        current.steps.append(one)
        if again:
            reads.slices[key] = one
        return one

    def _note_whole(self, current: Any, path: str, storage: int) -> None:
        if (path, storage) not in self.whole:
            self.whole.add((path, storage))
            current.reads.whole.append((path, storage))


def _matrix(read: SparseRead) -> object:
    """Return what two reads have in common whose operators are given the same tensor."""
    view = read.view
    if read.slices > 1:
        return (view.shape[0] * view.shape[1], *view.shape[2:]), view.stride[1:], view.offset, view.dtype
    return view.shape, view.stride, view.offset, view.dtype


def _read_of(form: Form, view: Part, nbytes: int) -> SparseRead | None:
    """Return the read of an operator that names units; None where it reads none, or cannot be trusted to."""
    contract, given = CONTRACTS[form.operator], form.arguments
    index = contract.operands(given)[1]
    if contract.index is None:
        tiles = tiled(view) if nbytes >= TILED else None
        rows = given[0].numel() // max(1, given[0].shape[-1])
        if tiles is None or rows * prod(view.shape[:1]) * ITEM_SIZES[view.dtype] > MOST_RESULT:
            return None
        return SparseRead(tiles, LINEAR, 0, tiles.shape[0], slices=tiles.shape[1], tiles=True)
    if not view.shape or 0 in view.shape or index.dtype not in (torch.int64, torch.int32):
        return None
    asked = min(view.shape[0], given[contract.rows].shape[0] if contract.ends else index.numel())
    read = SparseRead(view, form.operator, 0, asked)
    return read if _has_units(read, nbytes) else None


def _has_units(read: SparseRead, nbytes: int) -> bool:
    fits = read.view.offset >= 0 and read.count > 1 and read.unit(read.count - 1)[1] <= nbytes
    return fits and LEAST_UNIT <= read.unit_nbytes <= read.unit_stride


def _units_in(places: Sequence[tuple[int, int]], read: SparseRead) -> list[int] | None:
    """Return the units in which spans of a storage have bytes, ascending; None where some lie beside units."""
    numbers: set[int] = set()
    for start, stop in places:
        first, last = start - read.view.offset, stop - read.view.offset
        if first == last:
            continue
        if first < 0 or last > read.count * read.unit_stride:
            return None
        numbers |= set(range(first // read.unit_stride, -(-last // read.unit_stride)))
    return sorted(numbers)
