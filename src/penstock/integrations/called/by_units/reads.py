"""What a pass reads by units, and lists of modules alike, whose weights become the units of stacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock.integrations.called.by_units.watched import Form
from penstock.integrations.called.facts import Order, StepTime
from penstock.integrations.called.measuring import OwnMemory
from penstock.integrations.called.places import is_compiled
from penstock.passes.sparse.calls import SparseCall, find_operator
from penstock.passes.sparse.contracts import CONTRACTS, LINEAR, MOST_RESULT, tiled
from penstock.runtime.arena.reading import tensor_at
from penstock.runtime.sparse.units import PooledUnits
from penstock.runtime.system.memory import PAGE, Reservation, drop_pages, round_down, round_up
from penstock.schedule.facts.model import ITEM_SIZES, Part, SparseRead, part_nbytes
from penstock.schedule.sparse.pool import LEAST, LEAST_UNIT

SLICES = "aten.index_select.default"
"""The operator that stands for reads of slices by any operator: it is told which units."""


_NO_TIME = StepTime(0, 0)


@dataclass(eq=False, slots=True)
class Seen:
    """A step of a pass: the call of a module, or an operator that reads units, or a whole storage.

    `read` says which; reads of slices have asked for the units `numbers`.
    """

    path: str
    owner: str
    time: StepTime = _NO_TIME
    read: SparseRead | int | None = None
    numbers: frozenset[int] = frozenset()

    def as_read(self) -> SparseRead | int | None:
        """Return the read with the number of units that were asked for."""
        if isinstance(self.read, SparseRead) and self.numbers:
            return replace(self.read, asked=len(self.numbers))
        return self.read


@dataclass(eq=False)
class PassReads:
    """What one pass has read: routes by what names units, reads of slices, turns of reads.

    `kept` has what routes name by id, and `held` the step of an operator that has a storage in the arena.
    `whole` says that the step of a module has read whole what was watched.
    """

    routes: dict[object, int] = field(default_factory=dict)
    slices: dict[tuple[str, int], Seen] = field(default_factory=dict)
    turns: dict[object, int] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    held: tuple[int, tuple[str, int]] | None = None
    whole: bool = False

    def is_like(self, order: Order, steps: Sequence[Seen], least: int) -> bool:
        """Tell whether steps ask for about as many units as those of an order: half to twice as many.

        Other numbers count where they change the bytes that the order asks for by more than `least`. A prompt
        and a token ask for other numbers of rows of an embedding, and one plan serves both.
        """
        differing = 0
        for read, seen in zip(order.operators, steps, strict=False):
            if isinstance(read, SparseRead) and isinstance(asked := seen.as_read(), SparseRead):
                low, high = sorted((read.asked, asked.asked))
                differing += (high - low) * read.unit_nbytes if high > 2 * low else 0
        return differing <= least


def operator_of(read: SparseRead) -> torch._ops.OpOverload:
    operator = find_operator(read.operator)
    assert operator is not None, "an operator was called that nothing has defined"
    return operator


def matrix(read: SparseRead) -> object:
    """Return what two reads have in common whose operators are given the same tensor."""
    view = read.view
    if read.slices > 1:
        return (view.shape[0] * view.shape[1], *view.shape[2:]), view.stride[1:], view.offset, view.dtype
    return view.shape, view.stride, view.offset, view.dtype


def read_of(form: Form, view: Part, nbytes: int, least: int) -> SparseRead | None:
    """Return the read of an operator that names units, or None. Heads of `least` bytes have tiles."""
    contract, arguments = CONTRACTS[form.operator], form.arguments
    index = contract.operands(arguments)[1]
    if contract.index is None:
        tiles = tiled(view) if part_nbytes(view) == nbytes >= least else None
        rows = arguments[0].numel() // max(1, arguments[0].shape[-1])
        if tiles is None or rows * prod(view.shape[:1]) * ITEM_SIZES[view.dtype] > MOST_RESULT:
            return None
        return SparseRead(tiles, LINEAR, 0, tiles.shape[0], slices=tiles.shape[1], tiles=True)
    if not view.shape or 0 in view.shape or index.dtype not in (torch.int64, torch.int32):
        return None
    asked = min(view.shape[0], arguments[contract.rows].shape[0] if contract.ends else index.numel())
    read = SparseRead(view, form.operator, 0, asked)
    return read if has_units(read, nbytes) else None


def has_units(read: SparseRead, nbytes: int) -> bool:
    fits = read.view.offset >= 0 and read.count > 1 and read.unit(read.count - 1)[1] <= nbytes
    return fits and LEAST_UNIT <= read.unit_nbytes <= read.unit_stride


def units_in(places: Sequence[tuple[int, int]], read: SparseRead) -> list[int] | None:
    """Return the units in which spans of a storage have bytes, ascending; None for bytes beside units."""
    numbers: set[int] = set()
    for start, stop in places:
        first, last = start - read.view.offset, stop - read.view.offset
        if first == last:
            continue
        if first < 0 or last > read.count * read.unit_stride:
            return None
        numbers |= set(range(first // read.unit_stride, -(-last // read.unit_stride)))
    return sorted(numbers)


class OwnUnits:
    """Units in memory of their own, while one operator runs: where no plan has any."""

    def __init__(
        self, own_memory: OwnMemory, room: Callable[[], int], measure: Callable[[int], None]
    ) -> None:
        self._own, self._room, self._measure = own_memory, room, measure
        self._memory: dict[int, Reservation] = {}
        self.held_bytes = 0
        self.read_ns = 0

    def address(self, storage: int) -> int:
        """Return where a storage begins in address space that takes memory only for units."""
        memory, facts = self._memory.get(storage), self._own.facts.storages[storage]
        if memory is None:
            memory = self._memory[storage] = Reservation(facts.phase + facts.nbytes)
            memory.map_anonymous(0, memory.nbytes)
        return memory.address + facts.phase

    @contextmanager
    def holding(
        self, storage: int, spans: Sequence[tuple[int, int]], *, counts: bool = True
    ) -> Iterator[None]:
        """Have spans of a storage in memory. What no plan will have does not count as units."""
        begun, base = time.perf_counter_ns(), self.address(storage)
        nbytes = sum(stop - start for start, stop in spans) if counts else 0
        try:
            with _disable_current_modes():
                for start, stop in _joined(spans):
                    self._own.read_span(storage, start, stop, base)
            self.held_bytes += nbytes
            self.read_ns += time.perf_counter_ns() - begun
            yield
        finally:
            self._measure(self.held_bytes)
            self.held_bytes = max(0, self.held_bytes - nbytes)
            for start, stop in spans:
                first = round_down(base + start, PAGE)
                drop_pages(first, round_up(base + stop, PAGE) - first)

    def call(self, read: SparseRead) -> SparseCall:
        """Return what runs the operator of a read on units in memory of their own."""
        return SparseCall(operator_of(read), read, _OwnRead(self, read, self._room), 0, 0)

    def close(self) -> None:
        """Give back the address space."""
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()


class _OwnRead:
    """The units of one read, in memory of their own."""

    pool: Any = None
    certify = PooledUnits.certify

    def __init__(self, own_units: OwnUnits, read: SparseRead, room: Callable[[], int]) -> None:
        self._own, self._read, self._room = own_units, read, room

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


_SMALL = 0.05
"""Weights of modules in a list stay in memory, where they are at most this share of those that are units."""


class Siblings:
    """The lists of a module whose parts are alike.

    Args:
        module: The module.
        own: What reads its weights, with its facts.
        uses: By storage, the number of weights in it.
        is_watched: Tells whether a storage is read by units already.
    """

    def __init__(
        self,
        module: nn.Module,
        own_memory: OwnMemory,
        uses: Mapping[int, int],
        is_watched: Callable[[int], bool],
    ) -> None:
        self._own, self.lists = own_memory, _sibling_lists(module)
        self._module, self._uses, self._is_watched = module, uses, is_watched

    def chosen(self, method: str, steps: Sequence[Seen]) -> list[str]:
        """Return the lists of modules of which a pass has chosen some by values, and lists like those.

        In such a list a pass leaves modules out that are not the last ones, or calls them in another order.
        """
        chosen: set[object] = set()
        inside = f"{method}." if method else ""
        for path, names in self.lists.items():
            if not f"{path}.".startswith(inside):
                continue
            numbers: list[int] = []
            for step in steps:
                if step.owner.startswith(f"{path}."):
                    number = names.index(step.owner[len(path) + 1 :].partition(".")[0])
                    if not numbers or numbers[-1] != number:
                        numbers.append(number)
            last = -1
            for number in numbers:
                if number not in (0, last + 1):
                    chosen.add(self._like(path))
                last = number
        return [path for path in self.lists if self._like(path) in chosen and self.groups(path) is not None]

    def groups(self, path: str) -> tuple[list[list[str]], set[int]] | None:
        """Return the weights of a list that become one storage each, and storages too small for that.

        None where the small ones, which then stay in memory, are more than a few hundredths.
        """
        groups: list[list[str]] = []
        small: set[int] = set()
        names, nbytes = self.lists[path], 0
        for name, value in self._module.get_submodule(f"{path}.{names[0]}").named_parameters():
            fqns = [f"{path}.{part}.{name}" for part in names]
            if self._may_stack(fqns):
                groups.append(fqns)
                nbytes += value.nbytes * len(names)
            else:
                small |= {self._own.facts.parts[part].storage for fqn in fqns for part in self._parts_of(fqn)}
        small_bytes = self._own.facts.bytes_of(small)
        return (groups, small) if groups and small_bytes <= _SMALL * nbytes else None

    def _parts_of(self, fqn: str) -> list[str]:
        return [name for name in self._own.facts.parts if name == fqn or name.startswith(f"{fqn}.")]

    def _like(self, path: str) -> object:
        return _structure_of(self._module.get_submodule(f"{path}.{self.lists[path][0]}")), len(
            self.lists[path]
        )

    def _may_stack(self, fqns: Sequence[str]) -> bool:
        if not all(fqn in self._own.facts.parts for fqn in fqns):
            return False
        parts = [self._own.facts.parts[fqn] for fqn in fqns]
        storages = [self._own.facts.storages[part.storage] for part in parts]
        alone = all(self._uses[p.storage] == 1 and not self._is_watched(p.storage) for p in parts)
        first = storages[0]
        same = all((s.nbytes, s.phase, s.kind) == (first.nbytes, first.phase, "streamable") for s in storages)
        large = first.nbytes >= LEAST_UNIT and first.nbytes * len(fqns) >= LEAST
        return alone and same and large and parts[0].offset == 0 and part_nbytes(parts[0]) == first.nbytes


def _sibling_lists(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the lists of modules that have equal parts, by path: the names of the modules in them."""
    lists: dict[str, tuple[str, ...]] = {}
    for path, parts in module.named_modules():
        if isinstance(parts, nn.ModuleList | nn.ModuleDict) and len(parts) > 1:
            structures = {_structure_of(part) for part in parts.children()}
            compiled = any(map(is_compiled, parts.modules()))
            if len(structures) == 1 and not compiled and next(iter(structures))[1]:
                lists[path] = tuple(parts._modules)
    return lists


def _structure_of(module: nn.Module) -> tuple[type, tuple[object, ...]]:
    """Return what siblings have in common: the class, and the geometries of the weights."""
    named = module.named_parameters(remove_duplicate=False)
    return type(module), tuple((name, value.shape, value.stride(), value.dtype) for name, value in named)
