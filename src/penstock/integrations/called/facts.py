"""The facts that plans are made of, taken from a module and its weight files: nothing is exported."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from penstock.integrations.kept import KeptWeights, in_file, names_of
from penstock.passes.sparse.contracts import with_common_units
from penstock.passes.weights.lifted import part_of
from penstock.passes.weights.subclasses import plain_tensors
from penstock.runtime.checkpoint.binding import Rules, find_values
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.files.artifact_files import stamp_file
from penstock.runtime.system.memory import round_up
from penstock.schedule.facts.model import (
    ALIGNMENT,
    Method,
    Part,
    SparseRead,
    Step,
    Storage,
    Trace,
    Weight,
    WeightFile,
    Work,
)
from penstock.schedule.payload.codec import Payload
from penstock.schedule.space.layout import place_in_file

NO_FOLDER = Path(os.devnull, "none")
"""In place of an artifact's folder, which these modules have not: the paths of their files are absolute."""

LARGE_BUFFER = 1 << 20
"""Buffers of these bytes stream as parameters do; smaller ones stay in memory."""

_FEW_UNITS = 32
"""Calls have one order if the units that they read differ by less than this part of all weights' bytes."""

_GUESSED_BYTES_PER_NS = 8
"""The memory bandwidth that steps without measured times are taken to compute with."""


class StepTime(NamedTuple):
    """Nanoseconds of a step: `lead_ns` from the end of the step before to its start, `read_ns` of its own."""

    lead_ns: int
    read_ns: int


@dataclass(frozen=True)
class Order:
    """The steps of one call: the paths of the modules that read weights, in the order in which they ran.

    `entry` is the path of the module that was called. `times` has a time for each step, `tail_ns` is the
    compute after the last one; they are those of one observed call. A step that is an operator has in
    `operators` the units that it reads, or the storage that it reads whole, and in `owners` the path of the
    module that calls it; its own path is a sentence. `operators` is empty if there are none.
    """

    entry: str
    paths: tuple[str, ...]
    times: tuple[StepTime, ...] = ()
    tail_ns: int = 0
    operators: tuple[SparseRead | int | None, ...] = ()
    owners: tuple[str, ...] = ()

    def reduced(self, keeps: Callable[[str, SparseRead | int | None], bool]) -> Order:
        """Return the order without the steps that `keeps`, which is told owner and read, says no to."""
        owners, reads = self.owners or self.paths, self.operators or (None,) * len(self.paths)
        remaining = [k for k, step in enumerate(zip(owners, reads, strict=True)) if keeps(*step)]
        if len(remaining) == len(self.paths):
            return self
        times: list[StepTime] = []
        lead = 0
        for k, time in enumerate(self.times):
            if k in remaining:
                times.append(StepTime(time.lead_ns + lead, time.read_ns))
                lead = 0
            else:
                lead += time.lead_ns + time.read_ns
        paths = tuple(self.paths[k] for k in remaining)
        operators, kept_owners = tuple(reads[k] for k in remaining), tuple(owners[k] for k in remaining)
        return Order(self.entry, paths, tuple(times), self.tail_ns + lead, operators, kept_owners)

    def timed(self, times: Sequence[StepTime]) -> Order:
        """Return the order with the times of another call, if that had a time for each step."""
        return replace(self, times=tuple(times)) if len(times) == len(self.times) else self

    @property
    def unit_bytes(self) -> int:
        """The most bytes of units that the operators ask for."""
        return sum(read.asked * read.unit_nbytes for read in self.operators if isinstance(read, SparseRead))

    def by_units(self) -> set[tuple[str, int]]:
        """Return the paths of modules and the storages of which these read units."""
        steps = zip(self.owners, self.operators, strict=True)
        return {(path, read.storage) for path, read in steps if isinstance(read, SparseRead)}


@dataclass(frozen=True)
class ModuleFacts:
    """The weights of a module, and where their bytes lie in files.

    `weights` has every name of a parameter, so that tied weights are several, whose parts name one storage.
    """

    files: tuple[WeightFile, ...]
    storages: tuple[Storage, ...]
    weights: tuple[Weight, ...]

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The places of plain tensors: by FQN, or by `FQN.PART` for the parts of a quantised weight."""
        return {weight.fqn: weight.parts[0] for weight in self.weights}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return self.bytes_of(range(len(self.storages)))

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Return the bytes of some storages."""
        return sum(self.storages[s].nbytes for s in storages)

    @property
    def few_unit_bytes(self) -> int:
        """Bytes of units that change little in a plan."""
        return self.nbytes // _FEW_UNITS

    def stacked(self, groups: Sequence[Sequence[str]]) -> ModuleFacts:
        """Return the facts in which the weights of each group are one storage, one behind the other.

        The weights of a group have equal geometries, and each is all of its storage.
        """
        storages, parts = list(self.storages), dict[str, Part]()
        for group in groups:
            members = [self.parts[fqn].storage for fqn in group]
            stride = round_up(self.storages[members[0]].nbytes, ALIGNMENT)
            extents = [
                replace(extent, storage_offset=extent.storage_offset + unit * stride)
                for unit, s in enumerate(members)
                for extent in self.storages[s].extents
            ]
            whole = Storage(
                stride * len(group), "streamable", tuple(extents), phase=self.storages[members[0]].phase
            )
            for unit, fqn in enumerate(group):
                parts[fqn] = replace(self.parts[fqn], storage=len(storages), offset=unit * stride)
            for s in members:
                storages[s] = Storage(0, "returned")
            storages.append(whole)
        weights = (
            replace(weight, parts=(parts[weight.fqn],)) if weight.fqn in parts else weight
            for weight in self.weights
        )
        return ModuleFacts(self.files, tuple(storages), tuple(weights))

    def payload(
        self,
        orders: Sequence[Order],
        reads: Sequence[Mapping[str, tuple[int, ...]]],
        resident: Collection[int],
    ) -> Payload:
        """Return a payload with one method for each order, whose number is that of the order.

        Args:
            orders: The orders to plan for.
            reads: For each order, by the path of a module, the storages that its step reads, ascending.
            resident: Storages that always stay in memory.
        """
        storages = tuple(
            replace(storage, kind="returned") if s in resident else storage
            for s, storage in enumerate(self.storages)
        )
        names = [f"call {graph} of {order.entry or 'the model'}" for graph, order in enumerate(orders)]
        traces = [
            self._trace(*trace_facts)
            for trace_facts in zip(names, range(len(orders)), orders, reads, strict=True)
        ]
        return Payload(
            lowering="eager",
            torch=torch.__version__.split("+")[0],
            files=self.files,
            storages=storages,
            weights=self.weights,
            methods=tuple(Method(name, graph, ()) for graph, name in enumerate(names)),
            traces=with_common_units(traces),
        )

    def _trace(self, name: str, graph: int, order: Order, reads: Mapping[str, tuple[int, ...]]) -> Trace:
        # Rates decide whether reads by units are worth it. The times of one call on a busy machine would
        # decide by chance.
        measured = bool(order.times) and not order.by_units()
        steps = []
        for k, path in enumerate(order.paths):
            time = order.times[k] if measured else None
            read = order.operators[k] if order.operators else None
            if isinstance(read, SparseRead):
                nbytes = min(read.asked, read.count) * read.unit_nbytes
                work = Work(2 * prod(read.view.shape) if read.tiles else 0, nbytes)
                guessed_ns = nbytes // _GUESSED_BYTES_PER_NS
                steps.append(Step(path, (read.storage,), 0, guessed_ns, read_work=work, sparse=(read,)))
                continue
            storages = reads[path] if read is None else (read,)
            nbytes = self.bytes_of(storages)
            time = time or StepTime(0, nbytes // _GUESSED_BYTES_PER_NS)
            steps.append(
                Step(path or "model", storages, time.lead_ns, time.read_ns, read_work=Work(0, nbytes))
            )
        times: Literal["measured", "modelled"] = "measured" if measured else "modelled"
        return Trace(name, graph, "", tuple(steps), order.tail_ns if measured else 0, 0, times)


def registered_weights(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield what streams of a module: parameters, and large buffers that are saved with it.

    Each is the path of the module in which it is registered, the dictionary that holds it there, its key, its
    value.
    """
    for path, child in module.named_modules():
        for key, value in child._parameters.items():
            if value is not None:
                yield path, child._parameters, key, value
        for key, value in child._buffers.items():
            saved = key not in child._non_persistent_buffers_set
            if value is not None and value.nbytes >= LARGE_BUFFER and saved:
                yield path, child._buffers, key, value


def joined(path: str, key: str) -> str:
    """Return the FQN of what is registered as `key` in the module at `path`."""
    return f"{path}.{key}" if path else key


def make_facts(
    module: nn.Module,
    weight_files: Sequence[KeptWeights],
    trained: Sequence[nn.Parameter] = (),
    *,
    aligned: bool = False,
) -> ModuleFacts:
    """Return the facts of a module whose weights are in `weight_files`, without those that are trained.

    The parameters may be on the meta device. With `aligned`, no weight has a phase. Raises SourceError for a
    parameter that no file holds.
    """
    index: dict[int, int] = {}
    storages: list[Storage] = []
    weights: dict[str, Weight] = {}  # plain tensors
    wholes: dict[str, tuple[Part, ...]] = {}
    in_memory = {id(value) for value in trained}
    was_in_memory = {name for weights in weight_files for name in weights.digests}
    for path, _, key, value in registered_weights(module):
        fqn = joined(path, key)
        for name, plain in plain_tensors(fqn, value).items() if id(value) not in in_memory else ():
            memory = plain.untyped_storage()
            if memory._cdata not in index:
                index[memory._cdata] = len(storages)
                storages.append(Storage(memory.nbytes() or plain.nbytes, "streamable"))
            part = part_of(plain, index[memory._cdata])
            weights[name] = Weight(name, "parameter", "cpu", (part,))
            # The library gives a weight that was never in memory the order of its file.
            named = replace(in_file(part) if name in was_in_memory else part, name=name[len(fqn) + 1 :])
            wholes[fqn] = (*wholes.get(fqn, ()), named)
    names = names_of(weight_files)
    values = find_values(
        [Weight(fqn, "parameter", "cpu", parts) for fqn, parts in wholes.items()],
        open_checkpoint([file for weights in weight_files for file in weights.files]),
        Rules(lambda fqn: names.get(fqn, fqn)),
    )
    phases = {fqn: phase for weights in weight_files for fqn, phase in weights.phases.items()}
    placed = [_at_phase_of_file(storage) for storage in values.placed(storages)]
    for weight in weights.values():
        if weight.fqn in phases:
            s = weight.parts[0].storage
            placed[s] = replace(placed[s], phase=phases[weight.fqn])
    if aligned:
        placed = [replace(storage, phase=0) for storage in placed]
    files = tuple(stamp_file(path, recorded_path=str(path.absolute())) for path in values.files)
    return ModuleFacts(files, tuple(placed), tuple(weights.values()))


def _at_phase_of_file(storage: Storage) -> Storage:
    """Give a storage the phase at which its library maps the file."""
    place = place_in_file(storage)
    return replace(storage, phase=place[1] % ALIGNMENT if place else 0)
