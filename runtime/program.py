"""An artifact that is open: its facts, plans for it, and streamed modules loaded from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.passes.activations import Activations
from penstock.passes.calls.tracers import outside_dynamo
from penstock.passes.lowering import eager
from penstock.passes.lowering.archive import check_fits, check_ranks, open_programs, read_code
from penstock.runtime.arena.kinds import cpu_arenas
from penstock.runtime.cache import RECORD
from penstock.runtime.capabilities import AUTO, Choice, Kind, candidates, choose, planned_for
from penstock.runtime.files.artifact_files import (
    Progress,
    check_folder,
    read_artifact,
    replace_payload,
    verify_weights,
)
from penstock.runtime.files.safetensors_file import reading
from penstock.runtime.files.source import Source
from penstock.runtime.loading import load_module
from penstock.runtime.machine.calibrate import THIS_CPU
from penstock.runtime.memory_split import HostUse, MemorySplit, Reserve, check_load, parse_host_memory
from penstock.runtime.module import StreamedModule
from penstock.runtime.options import LoadOptions, LoadRequest
from penstock.runtime.planning import (
    PlanRequest,
    checked_patterns,
    checked_traces,
    find_ladder,
    find_plan,
    find_plan_to_load,
    least_budget,
)
from penstock.runtime.registered import Routes, kind_of, read_routes
from penstock.schedule.facts.errors import PayloadError, SourceError
from penstock.schedule.facts.model import Hardware, Trace, Wrap
from penstock.schedule.facts.sizes import parse_size
from penstock.schedule.payload.codec import Payload, verify_payload
from penstock.schedule.plan import Plan
from penstock.schedule.verify.proof import verify_plan

if TYPE_CHECKING:
    import networkx

_log = logging.getLogger(__name__)


def open(path: str | PathLike[str], *, trust: bool = False) -> Program:
    """Open the artifact folder `path` and check it: payload, plans, lowered program, weight files' stamps.

    An artifact may come from a stranger: all of it is data (docs/security.md), of which only torch's
    operators run. What cannot be stored so is code, and runs with your rights: what Inductor compiled, a
    program that has no form as data, and operators of libraries that penstock does not know. It is loaded
    with `trust` only.

    A program that calls collectives is opened by the rank that compiled it only, in a world of the same size
    and with the same process groups; any other may open.

    Raises PayloadError, PlanError or SourceError that says what is wrong. `Program.verify` checks every byte
    of the weights.
    """
    program = read_program(path, trust=trust)
    check_ranks(program.path, program.payload)
    return program


@outside_dynamo
def read_program(path: str | PathLike[str], *, trust: bool = False) -> Program:
    """Do what `open` does, on any rank: for facts, as the program itself does not load on another one."""
    if not isinstance(path, str | PathLike):
        raise SourceError(f"expected the folder of an artifact, got {type(path).__name__}")
    folder = Path(path)
    with reading(folder):
        payload, digest = read_artifact(folder)
        with Source(payload.files, folder, mode="buffered", storages=payload.storages):
            pass  # opening compares every stamp
    return Program(folder, payload, trust=trust, digest=digest)


class Program:
    """A compiled program on disk. It holds facts only; weights are loaded by `load`."""

    def __init__(
        self,
        path: Path,
        payload: Payload,
        variant: str | None = None,
        *,
        trust: bool = False,
        digest: str = "",
    ) -> None:
        """`variant` names one of the ways to keep values that the artifact has, by default the first.

        With `trust` the artifact may run code. `digest` is that of its content, which is empty for facts that
        are not as they are on the disk.
        """
        self.path, self.trust, self.digest = path, trust, digest
        self._stored, self._variant = payload, variant

    def __repr__(self) -> str:
        return f"Program({str(self.path)!r}, {self.payload!r})"

    @cached_property
    def kind(self) -> Kind:
        """What the program is for."""
        return kind_of(self.path, self._stored, self._variant)

    @cached_property
    def payload(self) -> Payload:
        """The facts of the program; of a program that is trained, those of one variant."""
        return self.kind.payload(self._stored)

    @cached_property
    def variants(self) -> Mapping[str, Program]:
        """By name, the ways to keep what a backward needs, each a program; none if it is not trained.

        The program of a variant has this variant only.
        """
        if self._variant is not None:
            return {self._variant: self}
        return {
            name: Program(self.path, self._stored, name, trust=self.trust, digest=self.digest)
            for name in self.kind.variants
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; each storage is counted once."""
        return sum(s.nbytes for s in self._stored.storages if s.kind != "produced")

    @property
    def value_bytes(self) -> int:
        """Bytes of what a forward keeps among the weights, if it was compiled with `spill=True`."""
        return sum(s.nbytes for s in self._stored.storages if s.kind == "produced")

    @property
    def largest_budget(self) -> int:
        """Bytes of all that a budget holds: the weights, and what a forward keeps among them."""
        return self.weight_bytes + self.value_bytes

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest budget that `load` accepts on the default device, in the arena that needs least.

        Another arena may need more (`floor`), and so does a load whose options name it.
        """
        return self.floor()

    def floor(self, device: str = "cpu", arena: str | None = None) -> int:
        """Returns the smallest budget in bytes for an arena of `arenas()`, or for the best of them."""
        return least_budget(self.payload, device, arena)

    def read_graph(self) -> networkx.DiGraph:
        """Returns which step reads which storage; `Payload.read_graph` lists the attributes."""
        return self.payload.read_graph()

    def arenas(self) -> tuple[str, ...]:
        """Returns the kinds of arena that this system and these files allow, the preferred first."""
        return tuple(cpu_arenas(self.payload))

    @outside_dynamo
    def plan(
        self,
        budget: int | str,
        *,
        hardware: Hardware | str = "auto",
        keep: Sequence[str] = (),
        wrap: Wrap | None = None,
        device: str = "cpu",
        arena: str | None = None,
        traces: Sequence[Trace] | None = None,
        host_memory: int | str | None = None,
        activations: str = AUTO,
        routes: str | PathLike[str] | Routes | None = None,
    ) -> Plan:
        """Decide what stays and what streams within `budget` (bytes, `32MiB`, or `50%` of the weights).

        `keep` holds patterns of FQNs that stay on the device. `arena` asks for a kind of arena instead of the
        fastest. `hardware` is measured (`auto`), a preset's name (`h200`) or a Hardware. `traces` replaces
        the modelled times, by those of `StreamedModule.measure` for example. `host_memory` limits what the
        host of that hardware holds of the weights: the rest comes from its disk. `activations` is the variant
        of a program that is trained, as in `LoadOptions`; a budget is of weights only, so "auto" keeps all.
        Without a `wrap`, copies go on across calls ("overlap"), or join at their ends ("barrier") where
        replays as graphs are faster.

        With measured hardware and modelled times, an equal plan that was made before on this machine is used
        again, and `load` runs the plan that this returns. A plan for this machine that a load would find no
        room for is logged as a warning (`lacking_room`): it may be for another process. `routes`, recorded by
        `record_routes` or the file of them, say which rows calls ask for, in place of each as often as
        another. Raises BudgetError below the floor, PlanError for a pattern that matches nothing,
        PayloadError for routes of another program.
        """
        request = PlanRequest(
            budget=self._nbytes(budget),
            device=device,
            arena=arena,
            keep=checked_patterns(keep),
            hardware=hardware,
            traces=checked_traces(traces),
            wrap=wrap,
            host_memory=parse_host_memory(host_memory, self.largest_budget),
            routes=read_routes(Path(routes)) if isinstance(routes, str | PathLike) else routes,
        )
        program = candidates(self, activations)[0]
        plan = find_plan(self.path, program.payload, request)
        if plan.hardware.name == THIS_CPU and (lacking := program.lacking_room(plan, device)):
            _log.warning("%s", lacking)
        return plan

    def lacking_room(self, plan: Plan, device: str = "cpu") -> str:
        """Say what a load of a plan would not find room for in this process now, and which budget would fit.

        The text is empty if all fits. `load` refuses such a plan, unless its arena maps files: the system can
        take these back, and read them again. What calls take beside weights is known from the program, and
        counts as nothing where that is code which nobody trusts.
        """
        try:
            beside = self.beside_bytes
        except PayloadError:
            beside = 0
        used = HostUse.of(plan, self.payload, device, beside)
        return used.lacking(partial(self.floor, device))

    def write_ladder(self) -> Program:
        """Write a ladder of verified plans into the artifact, in place of those it has, and open it again.

        A program without Python, such as `penstock-run`, has no planner, and runs the largest of them that
        its budget allows. They reach from the floor to one that streams nothing, and are for this machine.
        """
        replace_payload(self.path, replace(self._stored, plans=find_ladder(self.path, self._stored)))
        return open(self.path, trust=self.trust)

    @outside_dynamo
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
        spill: str | PathLike[str] | None = None,
        digest: str | None = None,
        options: LoadOptions | None = None,
    ) -> StreamedModule:
        """Returns a module that runs this program with at most `budget` bytes of weights, or as `plan` says.

        Results have the bits of the exported model's call under `torch.no_grad()`, in whatever mode they are
        asked for; with grad mode on, torch itself takes another kernel for an LSTM.
        `device_memory` is a cap on all memory of the device, in place of a budget; the bytes that it leaves
        for weights are logged (`split_memory`). `host_memory` is a cap on the weights that the host of a
        device holds, by default 80 % of the available memory; other weights are read from the files in every
        pass. `spill` is the folder for what leaves memory in training, by default the system's for temporary
        files. `digest` is what all bytes must have (`Program.digest`), which are read first. `options` say
        how weights are brought into memory (`LoadOptions`). Close the module, or use it as a context manager.
        """
        (run := LoadRequest.of(options, device=device, spill=spill)).check(self.payload)
        if digest is not None:
            self.verify(strict=True, digest=digest)
        asked = PlanRequest(
            budget=0,
            device=device,
            arena=run.arena,
            keep=checked_patterns(keep),
            host_memory=parse_host_memory(host_memory, self.largest_budget),
            spill=None if spill is None else fspath(spill),
        )
        check_load(asked, budget, plan, device_memory, activations=run.activations != AUTO, reserve=reserve)
        if plan is not None:
            planned = planned_for(self, plan)
            verify_plan(planned.payload.storages, planned.payload.traces, plan)
            return load_module(planned, plan, run)
        request = replace(asked, budget=0 if budget is None else self._nbytes(budget))
        programs = candidates(self, run.activations)
        plan_for = partial(_choice, request, device_memory, reserve, context_length)
        chosen = choose(programs if budget is None else programs[:1], plan_for)
        return load_module(chosen.program, chosen.plan, run, split=chosen.split)

    def _nbytes(self, budget: int | str) -> int:
        if budget == 0 and not isinstance(budget, bool) and not self.largest_budget:
            return 1  # `floor_bytes` is 0 for a program without weights, and any budget will do
        return parse_size(budget, total=self.largest_budget or 100)

    @cached_property
    def activation_bytes(self) -> int:
        """The most bytes of intermediate values that any method keeps at once, at the exported sizes."""
        return max(activations.peak() for activations in self._activations_by_method.values())

    @property
    def beside_bytes(self) -> int:
        """The most bytes that calls take beside weights: activations, and what is trained with its copies."""
        return self.activation_bytes + self.trained_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of what a forward keeps for its backward, at the exported sizes."""
        return max(activations.held_bytes() for activations in self._activations_by_method.values())

    @cached_property
    def _activations_by_method(self) -> dict[str, Activations]:
        with open_programs(self.path, self.payload) as archive:
            codes = {m.name: read_code(archive, m.name, trust=self.trust) for m in self.payload.methods}
            return {name: code.activations() for name, code in codes.items()}

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained, with their gradients, and two moments of AdamW."""
        return self.kind.resident_bytes

    @cached_property
    def lowered(self) -> eager.LoweredProgram:
        """The eager program as code, read from the artifact once."""
        return eager.load(self.path, self.payload, trust=self.trust)

    def split_memory(
        self,
        device_memory: int | str,
        *,
        reserve: Reserve = 0,
        context_length: int | None = None,
        device: str = "cpu",
    ) -> MemorySplit:
        """Returns the division of all memory that a device may hold (bytes or `12GB`).

        Activations are taken from it first, with what a forward keeps for its backward; what is trained, with
        gradients and two moments of AdamW; on an accelerator, the memory of libraries and of other processes;
        and then `reserve`, which is bytes, or a function of `context_length` (for a KV cache outside the
        program). The rest is left for weights.
        """
        return MemorySplit.of(
            device_memory,
            device,
            activations=self.activation_bytes,
            reserve=reserve,
            context_length=context_length,
            trained=self.trained_bytes,
        )

    def verify(
        self, progress: Progress | None = None, *, strict: bool = False, digest: str | None = None
    ) -> int:
        """Hash every weight byte and prove every plan; returns the bytes hashed.

        `strict` accounts for every byte of the artifact's folder: no file is there that is no part of it,
        nothing lies between the weights, and the stored code is what the payload says. With a `digest` (also
        with `sha256:` before it), the artifact must be that one. Raises SourceError naming the first weight
        whose bytes changed since it was compiled, or that cannot be verified because the payload does not say
        what its bytes were; and for another digest, or a byte that nothing accounts for.
        """
        if digest is not None and digest.lower().removeprefix("sha256:") != self.digest:
            raise SourceError(
                f"{self.path} is not the artifact of the digest {digest:.80}: its own is "
                f"{self.digest or 'not known'}; get that artifact, or ask for its digest again"
            )
        verify_payload(self._stored)
        if strict:
            with reading(self.path):
                self._check_folder()
        return verify_weights(self.payload, self.path, progress)

    def _check_folder(self) -> None:
        """Raise an error unless the folder holds what the payload says, and its code fits the payload."""
        with open_programs(self.path, self._stored) as archive:
            for method in self._stored.methods:
                code = read_code(archive, method.name, trust=self.trust)
                check_fits(self._stored, method, code, trust=self.trust)
        self.kind.check()
        check_folder(self.path, self._stored, [RECORD, *self.kind.files])


def _choice(
    request: PlanRequest,
    cap: int | str | None,
    reserve: Reserve,
    context_length: int | None,
    program: Program,
) -> Choice:
    """The plan of a variant for a request, whose budget is what a cap leaves for weights if there is one."""
    split = None
    if cap is not None:
        split = program.split_memory(
            cap, reserve=reserve, context_length=context_length, device=request.device
        )
        _log.info("%s", split)
        least = program.floor(request.device, request.arena)
        request = replace(request, budget=min(split.budget(least), program.largest_budget))
    plan = find_plan_to_load(program.path, program.payload, request, program.beside_bytes)
    return Choice(program, plan, split)
