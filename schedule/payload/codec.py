"""Reads, checks and writes a payload."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.schedule.facts.errors import PayloadError, PlanError
from penstock.schedule.facts.model import (
    ALIGNMENT,
    ITEM_SIZES,
    STRICT,
    Decisions,
    Hardware,
    Method,
    Part,
    Storage,
    Trace,
    Weight,
    WeightFile,
    part_nbytes,
)
from penstock.schedule.facts.parts import plain_weights, tensor_of
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.facts.validity import (
    machine_faults,
    negative_faults,
    plan_faults,
    produced_faults,
    range_faults,
    repeat_faults,
    size_faults,
    trace_faults,
    turn_faults,
)
from penstock.schedule.payload.text import decode, encode, parse, short
from penstock.schedule.plan import Plan
from penstock.schedule.report.graphs import read_graph
from penstock.schedule.verify.proof import verify_plan

if TYPE_CHECKING:
    import networkx


def check_payload(payload: Payload, source: str) -> None:
    """Raise PayloadError with the first fault of `payload`; `source` names the payload in the message."""
    for check in (
        _program,
        _files,
        _storages,
        _weights,
        _coverage,
        _methods,
        _traces,
        _probes,
        _hardware,
        _plans,
    ):
        for fault in check(payload):
            raise PayloadError(f"{source}: {fault}")


def check_artifact(payload: Payload, source: str) -> None:
    """Raise PayloadError unless the files of an artifact have every byte of its storages.

    Produced storages have none. Without this check, a program could read memory that nothing has filled.
    """
    for i, storage in enumerate(payload.storages):
        reached = 0
        for extent in storage.extents:
            reached += extent.nbytes if extent.storage_offset == reached else 0
        if storage.kind != "produced" and reached < storage.nbytes:
            raise PayloadError(
                f"{source}: $.storages[{i}].extents: expected all {storage.nbytes} bytes, as it is in an "
                f"artifact, got no byte {reached}; compile again"
            )


def check_plan(plan: Decisions, source: str) -> None:
    """Raise PayloadError with the first fault of a plan that is in a file of its own, named `source`."""
    for fault in plan_faults(plan, "$", len(plan.arena.layout)):
        raise PayloadError(f"{source}: {fault}")


def _sha256(value: str | None, path: str) -> Iterator[str]:
    if value is not None and not re.fullmatch("[0-9a-f]{64}", value):
        yield f"{path}: expected 64 lower-case hexadecimal digits, got {value[:80]!r}"


def _path(value: str, path: str, *, absolute: bool) -> Iterator[str]:
    """A relative path must stay inside the artifact's folder on every operating system."""
    rooted = PurePosixPath(value).is_absolute() or bool(PureWindowsPath(value).anchor)
    if not value or "\0" in value:
        yield f"{path}: expected the path of a file, got {value!r}"
    elif rooted and not absolute:
        yield f"{path}: expected a path relative to the artifact's folder, got {value!r}"
    elif not rooted and ("\\" in value or {"..", "."} & set(value.split("/")) or "" in value.split("/")):
        yield f"{path}: expected a path inside the artifact's folder, got {value!r}"


def _program(payload: Payload) -> Iterator[str]:
    program = payload.program
    if program is not None:
        yield from _path(program.path, "$.program.path", absolute=False)
        yield from _sha256(program.sha256, "$.program.sha256")
        if payload.lowering == "none":
            yield f"$.program: expected null, as $.lowering is 'none', got {program.path!r}"
        key = f"penstock.compiled.{program.sha256}"
        if payload.lowering == "executorch" and program.path != key:
            yield f"$.program.path: expected {key!r}, as $.lowering is 'executorch', got {program.path!r}"


def _probes(payload: Payload) -> Iterator[str]:
    """Every step lies between two probe calls, or ends of the pass; no call opens or closes two steps."""
    yield from repeat_faults((p.graph for p in payload.probes), "$.probes", "a graph")
    steps = {trace.graph: len(trace.steps) for trace in payload.traces}
    for i, order in enumerate(payload.probes):
        path = f"$.probes[{i}]"
        if order.graph not in steps:
            yield f"{path}.graph: expected the graph of a trace, one of {sorted(steps)}, got {order.graph}"
            continue
        for name, calls in (("opens", order.opens), ("closes", order.closes)):
            if len(calls) != steps[order.graph]:
                yield (
                    f"{path}.{name}: expected a call for each of {steps[order.graph]} steps, got {len(calls)}"
                )
            elif any(call < -1 for call in calls) or len(set(calls)) < len(calls):
                yield f"{path}.{name}: expected different calls, each -1 or more, got {list(calls)}"
    yield from _units(payload)


def _units(payload: Payload) -> Iterator[str]:
    """Compiled code has a read by units, with a number, for each step of which the trace says so."""
    if payload.lowering != "inductor":
        for i, order in enumerate(payload.probes):
            if order.units:
                yield f"$.probes[{i}].units: expected none, as $.lowering is {payload.lowering!r}"
        return
    orders = {order.graph: (str(i), order.units) for i, order in enumerate(payload.probes)}
    for i, trace in enumerate(payload.traces):
        sparse = [k for k, step in enumerate(trace.steps) if step.sparse]
        place, units = orders.get(trace.graph, ("of its graph", ()))
        if sorted(k for k in units if k != -1) != sparse:
            yield (
                f"$.probes[{place}].units: expected once each of the steps {sparse} of $.traces[{i}] that "
                f"read by units, and -1 otherwise, got {list(units)}"
            )
        for k in sparse:
            if len(trace.steps[k].sparse) > 1:
                yield f"$.traces[{i}].steps[{k}].sparse: expected one read by units a step of compiled code"


def _files(payload: Payload) -> Iterator[str]:
    places = (f"{f.path}:{f.key}" if f.key else f.path for f in payload.files)
    yield from repeat_faults(places, "$.files", "a path")
    for i, file in enumerate(payload.files):
        path = f"$.files[{i}]"
        yield from _path(file.path, f"{path}.path", absolute=file.kind == "file")
        yield from size_faults(file.nbytes, f"{path}.nbytes")
        yield from negative_faults(path, inode=file.inode)
        if file.kind == "named":
            yield from _named(file, path)
            continue
        if file.key:
            yield f"{path}.key: expected an empty text, as {file.path!r} is a file, got {file.key!r}"
        yield from _sha256(file.header_sha256, f"{path}.header_sha256")
        yield from _sha256(file.sampled_sha256, f"{path}.sampled_sha256")


def _named(file: WeightFile, path: str) -> Iterator[str]:
    """Named data has a key, and no stamp."""
    if not file.key:
        yield f"{path}.key: expected the key of named data, got an empty text"
    if "/" in file.path:
        yield f"{path}.path: expected the name of a file without a folder, got {file.path!r}"
    for name in ("mtime_ns", "inode", "header_sha256", "sampled_sha256"):
        if getattr(file, name):
            yield f"{path}.{name}: expected none, as {file.key!r} is named data, got {getattr(file, name)!r}"


def _storages(payload: Payload) -> Iterator[str]:
    for i, storage in enumerate(payload.storages):
        path = f"$.storages[{i}]"
        yield from size_faults(storage.nbytes, f"{path}.nbytes")
        yield from _sha256(storage.sha256, f"{path}.sha256")
        yield from range_faults(storage.phase, 0, ALIGNMENT - 1, f"{path}.phase")
        if storage.kind == "produced" and (storage.extents or storage.sha256 or storage.phase):
            yield f"{path}: expected no extents, no sha256 and phase 0, as it is produced"
        yield from _extents(storage, payload.files, path)


def _extents(storage: Storage, files: tuple[WeightFile, ...], path: str) -> Iterator[str]:
    reached = 0
    for i, extent in enumerate(storage.extents):
        here = f"{path}.extents[{i}]"
        if not 0 <= extent.file < len(files):
            yield f"{here}.file: expected the index of one of {len(files)} files, got {extent.file}"
            return
        most = files[extent.file].nbytes - extent.nbytes
        yield from size_faults(extent.nbytes, f"{here}.nbytes", 1)
        yield from range_faults(extent.file_offset, 0, most, f"{here}.file_offset")
        yield from range_faults(
            extent.storage_offset, reached, storage.nbytes - extent.nbytes, f"{here}.storage_offset"
        )
        reached = extent.storage_offset + extent.nbytes


def _weights(payload: Payload) -> Iterator[str]:
    yield from repeat_faults((w.fqn for w in payload.weights), "$.weights", "an FQN")
    for i, weight in enumerate(payload.weights):
        path = f"$.weights[{i}]"
        if not weight.parts:
            yield f"{path}.parts: expected one part or more of {weight.fqn!r}, got none"
        yield from repeat_faults((p.name for p in weight.parts), f"{path}.parts", "a name")
        for j, part in enumerate(weight.parts):
            yield from _part(part, payload.storages, f"{path}.parts[{j}]")


def _part(part: Part, storages: tuple[Storage, ...], path: str) -> Iterator[str]:
    if part.dtype not in ITEM_SIZES:
        yield f"{path}.dtype: expected the name of a torch dtype, got {part.dtype!r}"
    if len(part.shape) != len(part.stride):
        yield f"{path}.stride: expected {len(part.shape)} strides, one a size, got {len(part.stride)}"
    for name, values in (("shape", part.shape), ("stride", part.stride)):
        for i, value in enumerate(values):
            yield from size_faults(value, f"{path}.{name}[{i}]")
    if not 0 <= part.storage < len(storages):
        yield f"{path}.storage: expected the index of one of {len(storages)} storages, got {part.storage}"
    size = ITEM_SIZES[part.dtype]
    if part.offset % size:
        yield f"{path}.offset: expected a multiple of the {size} bytes of {part.dtype}, got {part.offset}"
    most = storages[part.storage].nbytes - part_nbytes(part)
    if not 0 <= part.offset <= most:
        yield (
            f"{path}.offset: expected {part_nbytes(part)} bytes inside the {most + part_nbytes(part)} of "
            f"storage {part.storage}, got offset {part.offset}"
        )


def _coverage(payload: Payload) -> Iterator[str]:
    for i, weight in enumerate(payload.weights):
        for j, part in enumerate(weight.parts):
            extents = payload.storages[part.storage].extents
            reached, stop = part.offset, part.offset + part_nbytes(part)
            for extent in extents:
                if extent.storage_offset <= reached:
                    reached = max(reached, extent.storage_offset + extent.nbytes)
            if extents and reached < stop:
                yield (
                    f"$.storages[{part.storage}].extents: expected bytes {part.offset}:{stop}, which "
                    f"$.weights[{i}].parts[{j}] of {weight.fqn!r} reads, got no byte {reached}"
                )


def _methods(payload: Payload) -> Iterator[str]:
    yield from repeat_faults((m.name for m in payload.methods), "$.methods", "a name")
    yield from repeat_faults((m.graph for m in payload.methods), "$.methods", "a graph number")
    for i, method in enumerate(payload.methods):
        yield from _method(method, f"$.methods[{i}]")


def _method(method: Method, path: str) -> Iterator[str]:
    yield from negative_faults(path, graph=method.graph)
    yield from repeat_faults((s.name for s in method.symbols), f"{path}.symbols", "a name")
    for i, symbol in enumerate(method.symbols):
        here = f"{path}.symbols[{i}]"
        yield from negative_faults(here, lower=symbol.lower)
        most = _MOST if symbol.upper is None else symbol.upper
        yield from range_faults(symbol.example, symbol.lower, most, f"{here}.example")
    names = {s.name for s in method.symbols}
    for i, leaf in enumerate(method.inputs):
        for j, size in enumerate(leaf.shape):
            here = f"{path}.inputs[{i}].shape[{j}]"
            if isinstance(size, int):
                yield from size_faults(size, here)
            elif size not in names:
                yield f"{here}: expected a size or one of the symbols {sorted(names)}, got {size!r}"


_MOST = (1 << 64) - 1


def _traces(payload: Payload) -> Iterator[str]:
    yield from repeat_faults((t.graph for t in payload.traces), "$.traces", "a graph number")
    traced = {(t.method, t.graph) for t in payload.traces}
    named = {(m.name, m.graph) for m in payload.methods}
    for method, graph in sorted(named ^ traced):
        has, lacks = ("method", "trace") if (method, graph) in named else ("trace", "method")
        yield f"$.{lacks}s: expected one of {method!r}, graph {graph}, which is in $.{has}s, got none"
    yield from turn_faults(payload.traces, "$.traces")
    for i, trace in enumerate(payload.traces):
        yield from trace_faults(trace, f"$.traces[{i}]", len(payload.storages))
        for j, step in enumerate(trace.steps):
            for s in step.reads:
                if payload.storages[s].kind not in ("streamable", "produced"):
                    yield (
                        f"$.traces[{i}].steps[{j}].reads: expected streamable storages, "
                        f"got storage {s}, which is {payload.storages[s].kind}"
                    )
            for read in step.sparse:
                reach, storage = read.view.offset + part_nbytes(read.view), payload.storages[read.storage]
                if read.storage not in step.reads or storage.kind != "streamable" or reach > storage.nbytes:
                    yield (
                        f"$.traces[{i}].steps[{j}].sparse: expected units of streamable storages that the "
                        f"step reads, within their bytes, got storage {read.storage} up to byte {reach}"
                    )
    yield from produced_faults(payload.storages, payload.traces, "$.traces")


def _hardware(payload: Payload) -> Iterator[str]:
    if payload.hardware is not None:
        yield from machine_faults(payload.hardware, "$.hardware")


def _plans(payload: Payload) -> Iterator[str]:
    for i, plan in enumerate(payload.plans):
        yield from plan_faults(plan, f"$.plans[{i}]", len(payload.storages))
        if plan.sizes not in ((), tuple(storage.nbytes for storage in payload.storages)):
            yield f"$.plans[{i}].sizes: expected those of the payload's storages"


VERSION = 12
"""The version that is written, and the only one that is read."""

Lowering = Literal["none", "eager", "inductor", "executorch"]


@dataclass(frozen=True)
class ProgramFile:
    """The file of the lowered program.

    Attributes:
        path: Its path inside the artifact's folder.
        sha256: The hash of the file.
        machine: The processor or device that the program was compiled for; empty if any will do.
    """

    __pydantic_config__: ClassVar = STRICT
    path: str
    sha256: str
    machine: str = ""


@dataclass(frozen=True)
class ProbeOrder:
    """The probe calls that enclose each step of a method, in the code that a compiler emitted.

    Call 2 p is the acquire of probe p, and 2 p + 1 its release.

    Attributes:
        graph: The number of the method.
        opens: The call before each step; -1 is the beginning of the pass.
        closes: The call after each step; -1 is the end of the pass.
        units: The step of each read that the code can do by units; -1 if its weight has to be there as a
            whole.
    """

    __pydantic_config__: ClassVar = STRICT
    graph: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]
    units: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Payload:
    """All facts of one compiled program: its weights, its traces and its plans.

    Attributes:
        format, version: Those of docs/payload.md.
        lowering: `"none"` for a program that was annotated in memory.
        program: The file of the lowered program.
        torch: The version of torch.
        files, storages, weights: Where the bytes of weights lie, and the tensors in them.
        methods: The methods and their inputs.
        traces: A trace for each method.
        probes: The probe calls of compiled methods. Without an entry, step k lies between acquire and release
            of probe k.
        hardware: The machine that the times of the traces are of.
        plans: Plans that the program can run.

    Example:
        >>> payload = penstock.annotate(exported)
        >>> penstock.Payload.from_bytes(payload.to_bytes()) == payload
        True
    """

    __pydantic_config__: ClassVar = STRICT
    format: Literal["penstock"] = "penstock"
    version: int = VERSION
    lowering: Lowering
    program: ProgramFile | None = None
    torch: str
    files: tuple[WeightFile, ...] = ()
    storages: tuple[Storage, ...]
    weights: tuple[Weight, ...]
    methods: tuple[Method, ...]
    traces: tuple[Trace, ...]
    probes: tuple[ProbeOrder, ...] = ()
    hardware: Hardware | None = None
    plans: tuple[Plan, ...] = ()

    def __repr__(self) -> str:
        nbytes = format_size(sum(storage.nbytes for storage in self.storages))
        methods = ", ".join(method.name for method in self.methods)
        return f"Payload({self.lowering}, {nbytes} in {len(self.weights)} weights, methods: {methods})"

    def to_bytes(self) -> bytes:
        """Return the payload as UTF-8 JSON. Equal payloads give equal bytes.

        Raises:
            PayloadError: `from_bytes` would refuse the payload.

        Example:
            >>> penstock.Payload.from_bytes(program.payload.to_bytes()) == program.payload
            True
        """
        check_payload(self, "the payload to be written")
        return encode(self)

    @staticmethod
    def from_bytes(data: bytes, *, source: str = "payload.json") -> Payload:
        """Read and check a payload.

        Args:
            data: The JSON that `to_bytes` returned.
            source: What messages call it.

        Raises:
            PayloadError: The bytes are not what docs/payload.md specifies, or of another version.
        """
        text, tree = parse(data, source)
        _check_version(tree, source)
        payload = decode(Payload, text, tree, source)
        check_payload(payload, source)
        return payload

    @property
    def tensors(self) -> tuple[Weight, ...]:
        """The weights, in which each part of a quantised weight is a weight of its own, called `FQN.PART`."""
        return plain_weights(self.weights)

    def storage_names(self) -> tuple[str, ...]:
        """Return, for each storage, the name of the first weight or part that lies in it, for messages.

        Example:
            >>> program.payload.storage_names()[:2]
            ('0.weight', '0.bias')
        """
        names: dict[int, str] = {}
        for weight in self.weights:
            for part in weight.parts:
                names.setdefault(part.storage, tensor_of(weight, part))
        return tuple(names.get(s, f"storage {s}") for s in range(len(self.storages)))

    def read_graph(self) -> networkx.DiGraph:
        """Return a graph of all steps, all storages, and the reads between them.

        The graph has the attributes `lowering` and `methods`: by name, the `shape` point of the trace, its
        `tail_ns` and `gap_ns`, and whether its `times` are modelled or measured.

        The node `("step", graph, k)` is step k of method number `graph`. Its attributes: `kind` ("step"),
        `name` (of the node or kernel that reads), `method`, `index` (k), `bytes` (of the storages that it
        reads), `lead_ns`, `lead_flops` and `lead_bytes` (the compute since the step before, and the memory
        that it reads and writes), `read_ns`, `read_flops` and `read_bytes` (the compute of the step itself,
        and its memory).

        The node `("storage", s)` is storage s of the payload: `kind` ("storage"), `name` (the first FQN that
        lies in it), `bytes`, `storage_kind` ("streamable", "mutable", "returned", "inlined", "small" or
        "produced"), and the lists `fqns`, `dtypes` and `shapes` with one value for each tensor that lies in
        it. A storage without edges always stays in memory, or nothing uses it.

        Edges have the attribute `why`: "reads" from a storage to a step, "writes" from a step to a storage
        that it produces, "order" from a step to the next one of its method. Where single units of a storage
        may do for a read, its edge has `units` (their number), `unit_bytes` (of one), `asked` (the most that
        a call of the exported sizes names), `operator`, and `route` (equal for reads of one method that name
        the same units). The `pool` of a plan says whether they are read so.

        Example:
            >>> graph = program.read_graph()
            >>> [graph.nodes[node]["name"] for node in graph.predecessors(("step", 0, 0))]
            ['0.weight', '0.bias']
        """
        return read_graph(self)

    def trace_for(self, graph: int) -> Trace:
        """Return the trace of a method.

        Args:
            graph: The number of the method.

        Raises:
            PayloadError: There is none.

        Example:
            >>> len(program.payload.trace_for(0).steps)
            4
        """
        for trace in self.traces:
            if trace.graph == graph:
                return trace
        raise PayloadError(
            f"the payload has no trace of graph {graph}, only of {[t.graph for t in self.traces]}"
        )


def verify_payload(payload: Payload) -> None:
    """Prove every plan of `payload` safe. Raises PlanError that names the plan."""
    for number, plan in enumerate(payload.plans):
        try:
            verify_plan(payload.storages, payload.traces, plan)
        except PlanError as error:
            raise PlanError(f"plan {number} of the payload is not safe: {error}") from None


def plan_from_json(data: str | bytes, *, source: str = "plan.json") -> Plan:
    """Read one plan. Raises PayloadError if it is malformed; only `verify_plan` says whether it is safe."""
    text, tree = parse(data, source)
    plan = decode(Plan, text, tree, source)
    check_plan(plan, source)
    return plan


def _check_version(tree: Any, source: str) -> None:
    if not isinstance(tree, dict) or tree.get("format") != "penstock":
        got = tree.get("format") if isinstance(tree, dict) else tree
        raise PayloadError(f"{source}: $.format: expected 'penstock', got {short(got)}; this is no payload")
    version = tree.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise PayloadError(
            f"{source}: $.version: this penstock reads version {VERSION}, got {short(version)}; "
            "compile again, or use the penstock that wrote it"
        )
