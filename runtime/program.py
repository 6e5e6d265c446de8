"""An artifact that is open: its facts, plans for it, and streamed modules loaded from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    checked_seconds,
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
    """Open the artifact in the folder `path`, and check its payload, its plans and its files.

    An artifact may come from a stranger (docs/security.md): without `trust`, it is data of which only torch's
    own operators run. Weight files are compared with their stamps; `Program.verify` checks every byte.

    Args:
        path: The folder that `compile` wrote.
        trust: Let the artifact run code with your rights: code that Inductor compiled, a program that has no
            form as data, and operators of libraries that penstock does not know.

    Returns:
        The program. No weight has been read.

    Raises:
        SourceError: The folder is no artifact, or a file of it or of its weights is missing or has changed.
        PayloadError: `payload.json` is not what docs/payload.md specifies; or another rank compiled the
            program, which calls collectives.
        PlanError: A plan of the artifact is not safe.

    Example:
        >>> program = penstock.open("mlp.penstock")
        >>> program.weight_bytes
        66560
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
    """A compiled program on disk: what `compile` and `open` return. It holds facts; `load` reads weights.

    Attributes:
        path: The folder of the artifact.
        trust: Whether the artifact may run code.
        digest: The sha256 of `payload.json`, which has the hashes of all code and weights; empty for facts
            that are not those on the disk.

    Example:
        >>> program = penstock.open("mlp.penstock")
        >>> program.weight_bytes, program.floor_bytes < program.weight_bytes
        (66560, True)
    """

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
        """Bytes of the values that a forward keeps among the weights (`compile_training(spill=True)`)."""
        return sum(s.nbytes for s in self._stored.storages if s.kind == "produced")

    @property
    def largest_budget(self) -> int:
        """Bytes of the budget with which nothing streams: `weight_bytes` and `value_bytes`."""
        return self.weight_bytes + self.value_bytes

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest budget in bytes that `load` accepts on a CPU, in the arena that needs least.

        Another arena may need more: see `floor`.
        """
        return self.floor()

    def floor(self, device: str = "cpu", arena: str | None = None) -> int:
        """Return the smallest budget in bytes.

        Args:
            device: The device that runs the program, as for `load`.
            arena: One of `arenas()`. Default: the arena that needs least.

        Raises:
            PlanError: The weights cannot be in that arena.
            StreamError: There is no such device.

        Example:
            >>> program.floor() == program.floor_bytes
            True
        """
        return least_budget(self.payload, device, arena)

    def read_graph(self) -> networkx.DiGraph:
        """Return a graph of the steps and the storages that they read; see `Payload.read_graph`."""
        return self.payload.read_graph()

    def arenas(self) -> tuple[str, ...]:
        """Return the kinds of arena that this system and these weight files allow, the preferred first.

        Example:
            >>> "contiguous" in program.arenas()
            True
        """
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
        effort: str = "usual",
        seconds: float = 60.0,
    ) -> Plan:
        """Decide which weights stay in memory and which stream, and when.

        With measured hardware and modelled times, a plan that was made before on this machine is returned
        again. A plan for this machine for which `load` would find no room now is logged as a warning
        (`lacking_room`).

        Args:
            budget: Bytes for weights: a number, `"32MiB"`, or `"50%"` of `largest_budget`. At least `floor`.
            hardware: `"auto"` measures this machine. Or a preset (`"h200"`), a `.json` file, or a `Hardware`.
            keep: FQN patterns of weights that never leave the device (`["lm_head.*"]`).
            wrap: `"overlap"`: copies go on across calls. `"barrier"`: they join at the end of a call.
                Default: `"barrier"` where calls that replay as graphs are faster, else `"overlap"`.
            device: The device that runs the plan, as for `load`.
            arena: One of `arenas()`. Default: the fastest that the budget allows.
            traces: A trace for each method, whose times replace the modelled ones (`StreamedModule.measure`).
            host_memory: Bytes of weights that the host behind a device holds; it reads others from its disk.
            activations: The variant of a program that is trained (`variants`). `"auto"` is `"keep"` here.
            routes: What calls asked for (`StreamedModule.record_routes`), or the file of it. Default: calls
                ask for everything equally often.
            effort: `"optimal"` improves a plan of a contiguous arena, as GPUs have, for `seconds` seconds,
                or until it is proven best. It is not remembered: keep `plan.to_json()`.
            seconds: How long `"optimal"` may take, behind the usual search.

        Returns:
            A plan that was verified. `load(plan=plan)` runs it.

        Raises:
            BudgetError: The budget is no size, or below the floor: `floor_bytes`, `step` and `weights` say
                why.
            PlanError: Hardware, arena, wrap, variant, effort or traces do not exist or fit; or a pattern
                matches nothing.
            StreamError: There is no such device.
            SourceError: The file of routes cannot be read.
            PayloadError: The routes are those of another program.

        Example:
            >>> plan = program.plan("50%", hardware="h200")
            >>> plan.streamed_bytes
            65536
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
            seconds=checked_seconds(effort, seconds),
        )
        program = candidates(self, activations)[0]
        plan = find_plan(self.path, program.payload, request)
        if plan.hardware.name == THIS_CPU and (lacking := program.lacking_room(plan, device)):
            _log.warning("%s", lacking)
        return plan

    def lacking_room(self, plan: Plan, device: str = "cpu") -> str:
        """Say what this process has no room for now if it loads a plan, and which budget would fit.

        `load` refuses such a plan unless its arena maps files, whose pages the system can take back.

        Args:
            plan: A plan of this program.
            device: The device that would run it, as for `load`.

        Returns:
            A sentence; empty if all fits. Activations count as nothing in code that nobody trusts.

        Example:
            >>> program.lacking_room(plan)
            ''
        """
        try:
            beside = self.beside_bytes
        except PayloadError:
            beside = 0
        used = HostUse.of(plan, self.payload, device, beside)
        return used.lacking(partial(self.floor, device))

    def write_ladder(self) -> Program:
        """Write plans for several budgets into the artifact, in place of those it has, and open it again.

        `penstock-run` has no planner: it runs the largest of these plans that its budget allows. They reach
        from the floor to a plan that streams nothing, and are made for this machine.

        Returns:
            The program with the plans (`payload.plans`).

        Raises:
            SourceError: The artifact cannot be written.

        Example:
            >>> len(penstock.open("mlp.penstock").write_ladder().payload.plans) > 1
            True
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
        **named: Any,
    ) -> StreamedModule:
        """Load the program so that it runs with at most `budget` bytes of weights.

        Give one of `budget`, `plan` and `device_memory`. Results have the bits of the exported model under
        `torch.no_grad()`; with grad mode on, torch itself runs another kernel for an LSTM.

        Args:
            budget: Bytes of the device for weights: a number, `"32MiB"`, or `"25%"` of `largest_budget`. At
                least `floor`.
            plan: A plan that `Program.plan` made. It is verified again.
            device: `"cpu"`, `"cuda:1"` or another accelerator of torch's, or a simulated one (`"sim:h200"`).
            device_memory: Bytes of the device for everything. What is left for weights is logged
                (`split_memory`).
            reserve: Bytes of `device_memory` that the caller needs, or a function of `context_length`
                (`"2GB"`).
            context_length: The argument of `reserve`, where that is a function.
            host_memory: Bytes of weights that the host of a device holds. Default: 80 % of the available
                memory. Others are read from the files in every pass.
            keep: FQN patterns of weights that never leave the device (`["lm_head.*"]`).
            spill: The folder for values that leave memory in training. Default: the system's for temporary
                files.
            digest: Read every byte first, and refuse an artifact that is not the one of this
                `Program.digest`.
            options: How weights come into memory. Default: `LoadOptions()`.
            named: Attributes of `LoadOptions`, in place of those of `options`.

        Returns:
            A module that is called like the exported one. Close it, or use it in a `with` statement.

        Raises:
            BudgetError: Not one of the three is given, the budget is below the floor (`floor_bytes` and
                `step` say why), or this process has no room for the plan.
            PlanError: The plan is of another program or is not safe; or as for `Program.plan`.
            StreamError: The device does not exist or has no such engine, or the plan cannot run there.
            SourceError: A weight file is missing or has changed.
            PayloadError: The artifact has code, and was opened without `trust`.

        Example:
            >>> with program.load("50%") as module:
            ...     module(x).shape
            torch.Size([2, 64])
        """
        (run := LoadRequest.of(options, device=device, spill=spill, **named)).check(self.payload)
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
        """The most bytes of intermediate values that a method keeps at once, at the exported sizes."""
        return max(activations.peak() for activations in self._activations_by_method.values())

    @property
    def beside_bytes(self) -> int:
        """The most bytes that calls take beside weights: `activation_bytes` and `trained_bytes`."""
        return self.activation_bytes + self.trained_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the values that a forward keeps for its backward, at the exported sizes."""
        return max(activations.held_bytes() for activations in self._activations_by_method.values())

    @cached_property
    def _activations_by_method(self) -> dict[str, Activations]:
        with open_programs(self.path, self.payload) as archive:
            codes = {m.name: read_code(archive, m.name, trust=self.trust) for m in self.payload.methods}
            return {name: code.activations() for name, code in codes.items()}

    @property
    def trained_bytes(self) -> int:
        """Four times the bytes of the trained parameters: with gradients and two moments of AdamW."""
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
        """Divide all memory that a device may use.

        Activations, with the values that a forward keeps, come first; then trained parameters with their
        gradients and two moments of AdamW; on an accelerator, the workspace of libraries and what other
        processes use; then `reserve`. Weights get what is left.

        Args:
            device_memory: Bytes, or a size (`"12GB"`).
            reserve: Bytes or a size that the caller needs, or a function of `context_length` that returns it,
                such as the bytes of a KV cache outside of the program.
            context_length: The argument of `reserve`, where that is a function.
            device: The device, as for `load`.

        Raises:
            BudgetError: A value is no size, or `reserve` is a function and `context_length` is missing.
            StreamError: There is no such device.

        Example:
            >>> split = program.split_memory("1MB", reserve=lambda tokens: 1024 * tokens, context_length=100)
            >>> split.activations, split.reserved, split.weights
            (1024, 102400, 896576)
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
        """Hash every byte of the weights, and prove every plan.

        Args:
            progress: Called with a text, the bytes so far and the bytes of all.
            strict: Account for every byte of the folder too: no other file is there, nothing lies between the
                weights, and the stored code is what the payload says.
            digest: The sha256 that the artifact must have (`Program.digest`); `sha256:` before it is allowed.

        Returns:
            The bytes that were hashed.

        Raises:
            SourceError: A weight, which the message names, has changed or has no hash; the digest is another
                one; or a byte belongs to nothing.
            PlanError: A plan is not safe.

        Example:
            >>> program.verify()
            66560
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
