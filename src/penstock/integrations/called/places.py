"""The places of a module's weights, what stands in them, and which modules read which."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import nn

from penstock.integrations.called.facts import ModuleFacts, joined, registered_weights
from penstock.integrations.called.measuring import OwnMemory, plain_tensors_only, use_count
from penstock.integrations.emptied.absent import AbsentTensor
from penstock.passes.weights.lifted import storage_bytes
from penstock.passes.weights.subclasses import plain_tensors

Values = Mapping[int, torch.Tensor]
"""Tensors with values, each by the id of the twin for which it stands."""

NO_VALUES: Values = {}
"""The values of no twin."""


@dataclass(frozen=True, eq=False)
class Place:
    """An entry of a module's parameters or buffers, and the twin that stands in it outside of steps."""

    owner: str
    entries: dict[str, Any]
    key: str
    twin: torch.Tensor

    @property
    def fqn(self) -> str:
        """The name under which the weight is registered here."""
        return joined(self.owner, self.key)


@dataclass(frozen=True, eq=False)
class Step:
    """The call of a module that reads weights: the places that it fills.

    `flat` are modules of torch that keep a list of their weights beside their places.
    """

    path: str
    places: tuple[Place, ...]
    flat: tuple[nn.Module, ...]

    @cached_property
    def twins(self) -> tuple[int, ...]:
        """The ids of the twins of all places."""
        return tuple(dict.fromkeys(id(place.twin) for place in self.places))

    def fill(self, values: Values) -> list[tuple[Place, torch.Tensor]]:
        """Put values in the places of their twins; returns what was put where.

        A place in which something else stands, as a forward may replace a parameter for a moment, is left
        alone.
        """
        filled = []
        for place in self.places:
            value = values.get(id(place.twin))
            if value is not None and place.entries.get(place.key) is place.twin:
                place.entries[place.key] = value
                filled.append((place, value))
        if self.flat:
            refresh(self.flat)
        return filled

    def empty(self, filled: Sequence[tuple[Place, torch.Tensor]]) -> None:
        """Put the twins back that `fill` has replaced."""
        for place, value in filled:
            if place.entries.get(place.key) is value:
                place.entries[place.key] = place.twin
        if self.flat:
            refresh(self.flat)


class Places:
    """All places of a module whose weights have `parts`, which are the names of plain tensors in files.

    Args:
        module: The module.
        twins: The twins to find, by id; None if all weights of the module are.
        staying: Values that stand in places instead of their twins.

    Attributes:
        twins: The twins, by id.
        names: Their names, by id; a tied weight has the first of its names.
        flat: Modules of torch that keep a list of their weights beside their places.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Container[str] = (),
        twins: Values | None = None,
        staying: Values | None = None,
    ) -> None:
        self._module, self._modules = module, dict(module.named_modules())
        standing = {id(value): twin for twin, value in (staying or {}).items()}
        self.all: list[Place] = []
        for path, entries, key, value in registered_weights(module):
            twin, place = standing.get(id(value), id(value)), Place(path, entries, key, value)
            if twins is None:
                if all(name in parts for name in plain_tensors(place.fqn, value)):
                    self.all.append(place)
            elif twin in twins:
                self.all.append(Place(path, entries, key, twins[twin]))
        self.flat = tuple(part for part in self._modules.values() if "_flat_weights" in vars(part))
        self.twins = {id(place.twin): place.twin for place in self.all}
        self.names = {id(place.twin): place.fqn for place in reversed(self.all)}

    def renamed(self, facts: ModuleFacts, before: Mapping[int, str]) -> ModuleFacts:
        """Return facts under the names of these places; `before` has the present ones by twin."""
        known = {weight.fqn: weight for weight in facts.weights}
        weights = [
            replace(known[before[id(place.twin)] + suffix], fqn=place.fqn + suffix)
            for place in self.all
            for suffix in plain_tensors("", place.twin)
        ]
        return replace(facts, weights=tuple(weights))

    def bytes_of_others(self) -> int:
        """Return the bytes of parameters and buffers in memory that are no twins."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        plain = {id(part): part for tensor in tensors for part in plain_tensors("", tensor).values()}
        return sum(part.nbytes for part in plain.values() if not isinstance(part, AbsentTensor))

    def step(self, path: str, fqns: Iterable[str], foreign: Iterable[str]) -> Step:
        """Return the step of the module at `path`: it reads weights `fqns`; other modules own `foreign`."""
        own_names, foreign_names = set(fqns), set(foreign)
        places = tuple(p for p in self.all if p.fqn in own_names or self.names[id(p.twin)] in foreign_names)
        owners = {place.owner: self._modules[place.owner] for place in places}
        return Step(path, places, tuple(owner for owner in owners.values() if "_flat_weights" in vars(owner)))

    def settle(self, standing: Values, known: Sequence[Values]) -> None:
        """Put in each place what `standing` has for its twin, or else the twin.

        Only twins and what `known` has for them are replaced: anything else is the user's.
        """
        for place in self.all:
            twin, there = id(place.twin), place.entries.get(place.key)
            ours = (place.twin, *(values.get(twin) for values in known))
            if there is not None and any(there is candidate for candidate in ours):
                place.entries[place.key] = standing.get(twin, place.twin)
        refresh(self.flat)


def write_back(values: Values, twins: Values) -> None:
    """Give twins that have memory again the values that stayed in memory beside it."""
    with torch.no_grad():
        for twin, value in values.items():
            if value.stride() == twins[twin].stride():
                twins[twin].copy_(value)
            else:
                twins[twin].data = value.data


def refresh(recurrent: Iterable[Any]) -> None:
    """Bring the lists of weights of torch's recurrent modules up to date."""
    for module in recurrent:
        module.__dict__["_flat_weights"] = [module._parameters.get(key) for key in module._flat_weights_names]


class Watched:
    """A weight, and facts by which a later use is noticed; `sums` are `sums_of` it as its files have it."""

    def __init__(self, value: torch.Tensor, sums: Sequence[object] | None = None) -> None:
        self.value, self._sums = value, sums
        self.parts = tuple(plain_tensors("", value).values())
        self._states = self._now()
        self._uses = 0

    def start(self) -> None:
        """Take the references that there are now for granted."""
        self._uses = self._count()

    @property
    def is_viewed(self) -> bool:
        """Tell whether more refers to the weight, or to its memory, than at the start."""
        return self._count() > self._uses

    @property
    def is_written(self) -> bool:
        """Tell whether the weight was written, also through `.data` or numpy, or given other memory."""
        return self._now() != self._states or self._sums != (self._sums and sums_of(self.value))

    def _now(self) -> list[tuple[int, int]]:
        return [(part._version, part.data_ptr()) for part in self.parts]

    def _count(self) -> int:
        return sum(use_count(part) + sys.getrefcount(part) for part in (*self.parts, self.value))


_FACTORS = torch.from_numpy(numpy.random.default_rng(0).integers(-(2**63), 2**63 - 1, 4096))


def sums_of(value: torch.Tensor) -> list[object]:
    """Return sums of a weight's memory on the CPU, each word times a factor: 0.07 s of a core for 469 MiB."""
    with plain_tensors_only():
        return [_sums_of(part) for part in plain_tensors("", value).values() if part.device.type == "cpu"]


def _sums_of(plain: torch.Tensor) -> tuple[list[int], int]:
    memory, row = storage_bytes(plain).numpy(), _FACTORS.nbytes
    # Words begin at byte 3: an even factor takes the highest bit away, so that may be the sign of no number.
    end = len(memory) - (len(memory) - 3) % row
    words = torch.from_numpy(memory[3:end].view(numpy.int64)).view(-1, len(_FACTORS))
    return (words @ _FACTORS).tolist(), hash(bytes(memory[:3]) + bytes(memory[end:]))


_overriding = threading.Lock()
_users = 0
"""The models for which `torch.overrides.has_torch_function` leaves twins out."""


def leave_twins_out(more: int) -> None:
    """Let layers of torch.nn choose their kernels as if twins were plain parameters, for `more` models.

    They ask `torch.overrides.has_torch_function` of their weights, and take slower kernels, with other bits,
    where one has a function of its own.
    """
    global _users
    overrides: Any = torch.overrides
    with _overriding:
        before, _users = _users, _users + more
        if not before:
            original = overrides.has_torch_function

            def has_torch_function(values: Iterable[Any]) -> bool:
                return bool(original([value for value in values if not isinstance(value, AbsentTensor)]))

            has_torch_function.penstock_original = original  # type: ignore[attr-defined]
            overrides.has_torch_function = has_torch_function
        elif not _users:
            overrides.has_torch_function = overrides.has_torch_function.penstock_original


_HOLD_FOR_PARENT = (nn.ParameterList, nn.ParameterDict)
"""Modules that hold parameters and have no forward of their own: the module around them reads these."""

_READ_THEIR_PARTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Layers of torch.nn whose forward reads the weights of the modules inside, without calling them."""

COMPILED = "_compiled_call_impl"
"""What a call of a module runs once its `compile()` was called."""

_SMALL_SHARE, _SMALL_BYTES = 0.01, 4096
"""Weights of a module with readers inside stay in memory up to this share of all weights, or these bytes.

Class tokens and small tables are such. Larger ones are read from their file by each operator that asks for
them.
"""


@dataclass
class Learned:
    """What calls have shown of a module.

    Attributes:
        reads: By FQN, the paths of modules that read a weight which is registered in another module.
        resident: Storages that stay in memory, because something writes them or keeps views of them.
        small: Storages that stay in memory, because other weights of their modules are read by units.
        backward: By the name of a step of a backward, the storages that it reads.
        vectors_stay: Weights of one dimension stay in memory.
    """

    reads: dict[str, set[str]] = field(default_factory=dict)
    resident: set[int] = field(default_factory=set)
    small: set[int] = field(default_factory=set)
    backward: dict[str, tuple[int, ...]] = field(default_factory=dict)
    vectors_stay: bool = False


@dataclass(frozen=True)
class Readers:
    """The modules whose calls are steps.

    Attributes:
        fqns: By path, the names of the weights that a step reads.
        storages: By path, the storages of these weights that a plan moves, ascending.
        resident: Storages that stay in memory, because a module with readers inside reads them.
    """

    fqns: Mapping[str, tuple[str, ...]]
    storages: Mapping[str, tuple[int, ...]]
    resident: frozenset[int]


class StepWeights:
    """Which weights the steps of a module read; `find` is called before anything else.

    Attributes:
        module: The module.
        own: What reads weights from their files, with the facts of the module.
        places: The places of its weights.
        learned: What calls have shown of it.
        readers: The modules whose calls are steps.
        steps: The steps, by path.
        sums: `sums_of` weights as their files have them, by twin, as far as calls have read them alone.
    """

    readers: Readers
    steps: dict[str, Step]

    def __init__(self, module: nn.Module, own_memory: OwnMemory, places: Places) -> None:
        self.own, self.places, self.learned = own_memory, places, Learned()
        self.sums: dict[int, list[object]] = {}
        self.module = module

    def find(self) -> None:
        """Find the readers and the steps, with what calls have shown so far."""
        self.readers = find_readers(self.module, self.facts, self.learned)
        reads = self.learned.reads
        self.steps = {
            path: self.places.step(path, fqns, [fqn for fqn in fqns if path in reads.get(fqn, ())])
            for path, fqns in self.readers.fqns.items()
        }

    @property
    def facts(self) -> ModuleFacts:
        """The facts of the module; weights that become units of a stack change them."""
        return self.own.facts

    def storages_of(self, twin: int) -> set[int]:
        """Return the storages of a weight."""
        parts = plain_tensors(self.places.names[twin], self.places.twins[twin])
        return {self.facts.parts[name].storage for name in parts}

    @property
    def resident(self) -> set[int]:
        """The storages that stay in memory in every plan."""
        return self.learned.resident | self.learned.small | self.readers.resident


def find_readers(module: nn.Module, facts: ModuleFacts, learned: Learned) -> Readers:
    """Return the readers of a module. What is registered in a module is read by its own forward.

    No reader has readers inside, as one step is open at a time.
    """
    modules = dict(module.named_modules())
    readers: dict[str, list[str]] = {}
    storages_of: dict[str, tuple[int, ...]] = {}
    for path, _, key, value in registered_weights(module):
        fqn = joined(path, key)
        if not all(name in facts.parts for name in plain_tensors(fqn, value)):
            continue  # a part that has come since: it is in memory
        storages_of[fqn] = tuple(facts.parts[name].storage for name in plain_tensors(fqn, value))
        readers.setdefault(_reader_of(path, modules), []).append(fqn)
    resident: set[int] = set()
    if learned.vectors_stay:
        resident |= {part.storage for part in facts.parts.values() if len(part.shape) < 2}
    small = max(_SMALL_SHARE * facts.nbytes, _SMALL_BYTES)
    for path in [path for path in readers if not can_read(path, readers)]:
        storages = {s for fqn in readers.pop(path) for s in storages_of[fqn]}
        if facts.bytes_of(storages) <= small:
            resident |= storages
    for fqn, paths in learned.reads.items():
        for path in paths if fqn in storages_of else ():
            if can_read(path, readers):
                readers.setdefault(path, []).append(fqn)
    moved = {
        path: tuple(sorted({s for fqn in fqns for s in storages_of[fqn]} - resident - learned.resident))
        for path, fqns in readers.items()
    }
    for step, reads in learned.backward.items():
        moved[step] = tuple(s for s in reads if s not in resident | learned.resident)
    return Readers(
        {
            path: tuple(dict.fromkeys(readers[path]))
            for path, storages in moved.items()
            if storages and path in readers
        },
        {path: storages for path, storages in moved.items() if storages},
        frozenset(resident),
    )


def is_compiled(module: nn.Module) -> bool:
    """Tell whether the user has compiled a module: its parts then run in one piece of code."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _reader_of(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the module whose step reads the parameters that are registered at `path`."""
    while path and isinstance(modules[path], _HOLD_FOR_PARENT):
        path = path.rpartition(".")[0]
    reader = path
    while path:
        path = path.rpartition(".")[0]
        if isinstance(modules[path], _READ_THEIR_PARTS) or is_compiled(modules[path]):
            reader = path
    return reader


def can_read(path: str, readers: Collection[str]) -> bool:
    """Tell whether the module at `path` may be a step: it has no other reader inside."""
    return not any(other != path and (not path or other.startswith(f"{path}.")) for other in readers)
