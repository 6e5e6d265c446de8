"""An artifact that is open: its facts, plans for it, and streamed modules loaded from it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.passes.activations import activation_bytes
from penstock.passes.lowering import eager
from penstock.passes.lowering.archive import load_exported
from penstock.runtime.calibrate import measure_cuda
from penstock.runtime.choice import choose, cpu_arenas, floors, kept_storages, preferred
from penstock.runtime.device.cuda import CudaDevice
from penstock.runtime.device.host_limit import check_host_limit, parse_host_memory, unlimited_bytes
from penstock.runtime.device.loading import device_kind, hardware_of, load_on_device, open_device
from penstock.runtime.files.artifact_files import read_payload
from penstock.runtime.files.rates import READERS
from penstock.runtime.files.source import Source
from penstock.runtime.files.stamp import hash_storage
from penstock.runtime.loading import LoadOptions, load_on_cpu, open_source
from penstock.runtime.memory_split import CUDA_WORKSPACE, MemorySplit, Reserve, reserved_bytes
from penstock.runtime.module import StreamedModule
from penstock.runtime.remembered import remembered_plan
from penstock.runtime.sim.device import SimDevice
from penstock.runtime.system.limits import usable_bytes
from penstock.runtime.system.progress import Progress, count_bytes
from penstock.schedule.facts.costs import with_times
from penstock.schedule.facts.errors import BudgetError, PlanError, SourceError
from penstock.schedule.facts.model import Arena, Hardware, Trace, Wrap
from penstock.schedule.facts.presets import find_hardware
from penstock.schedule.facts.problem import Problem
from penstock.schedule.facts.sizes import parse_size
from penstock.schedule.payload.codec import Payload, verify_payload
from penstock.schedule.plan import Plan
from penstock.schedule.planner import Floor, make_plan
from penstock.schedule.report.reads import read_graph
from penstock.schedule.verify.proof import verify_plan

if TYPE_CHECKING:
    import networkx

_LOAD_EFFORT = 0.25
"""The share of the planner's search that a load waits for."""


def open(path: str | PathLike[str]) -> Program:
    """Open the artifact folder `path` and check it: payload, plans, lowered program, weight files' stamps.

    Raises PayloadError, PlanError or SourceError that says what is wrong. The lowered program is
    code: open artifacts from people you trust. `Program.verify` checks every byte of the weights.
    """
    folder = Path(path)
    payload = read_payload(folder)
    with Source(payload.files, folder, mode="buffered"):
        pass  # opening compares every stamp
    return Program(folder, payload)


class Program:
    """A compiled program on disk. It holds facts only: nothing is loaded until `load`."""

    def __init__(self, path: Path, payload: Payload) -> None:
        self.path = path
        self.payload = payload

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, storages counted once."""
        return sum(s.nbytes for s in self.payload.storages)

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest budget that `load` accepts on the default device."""
        return self.floor()

    def floor(self, device: str = "cpu", arena: str | None = None) -> int:
        """The smallest budget in bytes for an arena of `arenas()`, or for the best of them."""
        return min(f.upper_bytes for f in self._floors(device, arena, frozenset()).values())

    def read_graph(self) -> networkx.DiGraph:
        """Returns which step reads which storage; `penstock.schedule.report.reads` has the attributes."""
        return read_graph(self.payload)

    def arenas(self) -> tuple[str, ...]:
        """The kinds of arena that this system and these files allow, the preferred first."""
        return tuple(cpu_arenas(self.payload))

    def plan(
        self,
        budget: int | str,
        *,
        hardware: Hardware | str = "auto",
        keep: Sequence[str] = (),
        wrap: Wrap = "overlap",
        device: str = "cpu",
        arena: str | None = None,
        traces: Sequence[Trace] | None = None,
        host_memory: int | str | None = None,
        effort: float = 1.0,
    ) -> Plan:
        """Decide what stays and what streams within `budget` (bytes, `32MiB`, or `50%` of the weights).

        `keep` holds patterns of FQNs that stay on the device. `arena` asks for a kind of arena
        instead of the fastest. `hardware` is measured (`auto`), a preset's name (`h200`) or a Hardware.
        `traces` replaces the modelled times, by measured ones for example
        (`StreamedModule.measure`). `host_memory` limits what the host of that hardware holds of the
        weights: the rest comes from its disk. `effort` is the share of the usual search: `load` takes a
        quarter, which made a Llama's plans at most 0.05 % slower. Raises BudgetError below the floor,
        PlanError for a pattern that matches nothing.
        """
        payload = self.payload
        # Where there are no weights, any share of them is enough.
        nbytes = parse_size(budget, total=self.weight_bytes or 100)
        kept = kept_storages(self.payload, keep)
        found = self._floors(device, arena, kept)
        chosen, hardware = self._choose(device, hardware, found, nbytes, arena)
        hardware.check()  # before times are modelled, which divides by its rates
        problem = Problem(
            payload.storages,
            tuple(traces or (with_times(trace, hardware) for trace in payload.traces)),
            chosen,
            kept,
            hardware=hardware,
            wrap=wrap,
            host=parse_host_memory(host_memory, self.weight_bytes),
        )
        decided = make_plan(problem, nbytes, names=payload.storage_names(), effort=effort)
        verify_plan(payload.storages, payload.traces, decided)
        return decided

    def load(
        self,
        budget: int | str | None = None,
        *,
        plan: Plan | None = None,
        device: str = "cpu",
        device_memory: int | str | None = None,
        reserve: Reserve = 0,
        context_length: int | None = None,
        host_memory: int | str | None = None,
        keep: Sequence[str] = (),
        arena: str | None = None,
        page_lock: bool = True,
        readers: int = READERS,
        debug: bool = False,
        poison: bool = False,
    ) -> StreamedModule:
        """A module that runs this program with at most `budget` bytes of weights, or as `plan` says.

        `debug` makes a read of a dropped granule of a paged arena fault; `poison` overwrites freed
        bytes of a contiguous one with NaN. `device_memory` caps all that the device holds instead: what is
        left for weights is printed (`split_memory`). `host_memory` caps what the host of a device holds of
        them, by default 80 % of what is available; the rest comes from the files again and again.
        `page_lock=False` makes do with ordinary memory where the system refuses to lock it. Close the
        module, or use it as a context manager.
        """
        if sum(given is not None for given in (budget, plan, device_memory)) != 1:
            raise BudgetError(
                "load needs a budget, a plan or device_memory, and one of them only: load(budget='50%'), "
                "load(plan=plan) or load(device_memory='12GB')"
            )
        kind = device_kind(device)
        split = None
        if device_memory is not None:
            split = self.split_memory(
                device_memory, reserve=reserve, context_length=context_length, device=device
            )
            print(f"penstock: {split}", file=sys.stderr)
            budget = min(split.budget(self.floor(device, arena)), self.weight_bytes)
        elif reserve:
            raise BudgetError(
                "reserve= is taken from device_memory=: give that instead of a budget or a plan"
            )
        if kind == "cpu" and host_memory is not None:
            raise BudgetError("a CPU has no host behind it: host_memory= is for cuda and sim")
        if budget is not None:
            plan = self._plan_to_load(budget, keep=keep, device=device, arena=arena, host_memory=host_memory)
        elif keep or arena or host_memory is not None:
            raise PlanError("keep=, arena= and host_memory= are decided by the plan: give them to plan()")
        assert plan is not None
        verify_plan(self.payload.storages, self.payload.traces, plan)
        options = LoadOptions(readers, debug, poison, page_lock, split)
        if kind == "cpu":
            return load_on_cpu(self.path, self.payload, plan, options, lambda: self.lowered)
        return self._load_on_device(device, plan, options)

    def _load_on_device(self, device: str, plan: Plan, options: LoadOptions) -> StreamedModule:
        check_host_limit(plan, usable_bytes())
        opened = open_device(device, plan, page_lock=options.page_lock)
        if isinstance(opened, SimDevice):
            opened.reserve(self.activation_bytes, "activations")

        def split() -> MemorySplit:
            return options.split or self.split_memory(plan.budget, device=device)

        return load_on_device(
            self.path, self.payload, plan, opened, options, lowered=lambda: self.lowered, split=split
        )

    def _plan_to_load(
        self,
        budget: int | str,
        *,
        keep: Sequence[str],
        device: str,
        arena: str | None,
        host_memory: int | str | None,
    ) -> Plan:
        """The plan that `load` makes: where the host cannot hold all that streams, with its limit."""
        plan = partial(self.plan, budget, keep=keep, device=device, arena=arena, effort=_LOAD_EFFORT)
        if device_kind(device) == "cpu":
            nbytes = parse_size(budget, total=self.weight_bytes or 100)
            asked = (sorted(keep), arena, self.arenas())
            return remembered_plan(self.path, self.payload, nbytes, asked, plan)
        made = plan(host_memory=host_memory)
        limit = usable_bytes()
        if limit is None or unlimited_bytes(made) <= limit:
            return made
        return plan(host_memory=limit)

    @cached_property
    def activation_bytes(self) -> int:
        """The most bytes of intermediate values that any method keeps at once, at the exported sizes."""
        return max(map(activation_bytes, load_exported(self.path, self.payload).values()), default=0)

    @cached_property
    def lowered(self) -> eager.LoweredProgram:
        """The eager program as code, read from the artifact once."""
        return eager.load(self.path, self.payload)

    def split_memory(
        self,
        device_memory: int | str,
        *,
        reserve: Reserve = 0,
        context_length: int | None = None,
        device: str = "cpu",
    ) -> MemorySplit:
        """What is left for weights of all that a device may hold (bytes or `12GB`).

        Activations, on CUDA what libraries take and what other processes hold, and `reserve` are taken
        first: bytes, or a function of `context_length` (for a KV cache outside the program).
        """
        others = 0
        if device_kind(device) == "cuda":
            others = CudaDevice.of(device).held_by_others
        return MemorySplit(
            total=parse_size(device_memory, name="device_memory"),
            activations=self.activation_bytes,
            workspace=CUDA_WORKSPACE if device_kind(device) == "cuda" else 0,
            reserved=reserved_bytes(reserve, context_length),
            others=others,
        )

    def verify(self, progress: Progress | None = None) -> int:
        """Hash every weight byte and prove every plan; returns the bytes hashed.

        Raises SourceError naming the first weight whose bytes changed since it was compiled, or that
        cannot be verified because the payload does not say what its bytes were.
        """
        verify_payload(self.payload)
        names = self.payload.storage_names()
        in_files = [(s, storage) for s, storage in enumerate(self.payload.storages) if storage.extents]
        for index, storage in in_files:
            if storage.sha256 is None:
                raise SourceError(
                    f"weight {names[index]} cannot be verified: the payload lacks its sha256; compile again"
                )
        total = sum(e.nbytes for _, storage in in_files for e in storage.extents)
        report = count_bytes(progress, "verifying weights", total)
        for index, storage in in_files:
            found = hash_storage(storage, self.payload.files, self.path, progress=report)
            if found != storage.sha256:
                raise SourceError(
                    f"weight {names[index]} has changed since it was compiled: its sha256 was "
                    f"{storage.sha256} and is {found}; restore the file, or compile again"
                )
        return total

    def _choose(
        self,
        device: str,
        hardware: Hardware | str,
        floors: Mapping[str, Floor],
        budget: int,
        arena: str | None,
    ) -> tuple[Arena, Hardware]:
        """The arena of those in `floors` to plan for, and the machine; `arena` is what was asked for."""
        arenas = cpu_arenas(self.payload)
        if hardware == "auto":
            hardware = hardware_of(device) or hardware
        if hardware == "auto" and device_kind(device) == "cuda":
            with open_source(self.payload, self.path) as source:
                hardware = measure_cuda(device, self.payload.weights, source)
        if hardware == "auto":
            with open_source(self.payload, self.path) as source:
                choice = choose(self.payload.storages, arenas, floors, budget, source)
            measured = choice.measure(self.payload.weights)
            if device_kind(device) == "sim":  # what links its host to it is as fast as what is read here
                measured = replace(measured, disk_bytes_per_s=measured.link_bytes_per_s)
            return choice.arena, measured
        hardware = find_hardware(hardware) if isinstance(hardware, str) else hardware
        if not arena and hardware.disk_bytes_per_s is not None:
            # A device with a host before it has one buffer: nothing of a file is mapped there.
            floors = {"contiguous": floors["contiguous"]}
        return arenas[preferred(floors, budget)], hardware

    def _floors(self, device: str, arena: str | None, keep: frozenset[int]) -> dict[str, Floor]:
        arenas = cpu_arenas(self.payload)
        if device_kind(device) != "cpu":
            arenas = {"contiguous": arenas["contiguous"]}  # one allocation: nothing of a file is mapped there
        if arena is not None and arena not in arenas:
            raise PlanError(f"these weights cannot be in an arena {arena!r}: choose from {', '.join(arenas)}")
        return floors(self.payload, {arena: arenas[arena]} if arena else arenas, keep)
