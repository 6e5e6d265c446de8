"""payload.json: the whole contract between compile time and run time, as docs/payload.md specifies it.

`Payload` holds the classes of `facts/`, and is written to bytes and read from them. Rules that types cannot
express (on indices, extents and parts) are checked by `checks.py`, on writing and on reading.
`verify_payload` proves all plans safe whenever a payload is opened to be run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.schedule.facts.errors import PayloadError, PlanError
from penstock.schedule.facts.model import STRICT, Hardware, Method, Storage, Trace, Weight, WeightFile
from penstock.schedule.facts.parts import plain_weights, tensor_of
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.checks import check_payload, check_plan
from penstock.schedule.payload.text import decode, encode, parse, short
from penstock.schedule.plan import Plan
from penstock.schedule.report.reads import read_graph
from penstock.schedule.verify.proof import verify_plan

if TYPE_CHECKING:
    import networkx

VERSION = 12
"""The version that is written, and the only one that is read."""

Lowering = Literal["none", "eager", "inductor", "executorch"]


@dataclass(frozen=True)
class ProgramFile:
    """The lowered program: its path inside the artifact's folder, and the sha256 of the file.

    `machine` names the processor or device that the program was compiled for, and is empty if any will do.
    """

    __pydantic_config__: ClassVar = STRICT
    path: str
    sha256: str
    machine: str = ""


@dataclass(frozen=True)
class ProbeOrder:
    """The probe calls that enclose each step of method number `graph`, in the code that a compiler emitted.

    Step k runs between the calls `opens[k]` and `closes[k]`. Call 2 p is the acquire of probe p, and 2 p + 1
    its release; -1 is the beginning of the pass in `opens`, and its end in `closes`. Of the reads that the
    code could do by units, `units[r]` is the step of number r; -1 if its weight has to be there as a whole.
    """

    __pydantic_config__: ClassVar = STRICT
    graph: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]
    units: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Payload:
    """Catalog, traces and plans of one compiled program.

    `lowering` is `none` for a program annotated in memory. The times of the traces are of `hardware`. If
    `probes` has no entry for a method, step k lies between acquire and release of probe k.
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
        """The payload as UTF-8 JSON. Equal payloads give equal bytes.

        Raises PayloadError for a payload that `from_bytes` would refuse.
        """
        check_payload(self, "the payload to be written")
        return encode(self)

    @staticmethod
    def from_bytes(data: bytes, *, source: str = "payload.json") -> Payload:
        """Read and check a payload; `source` names it in messages. Raises PayloadError."""
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
        """For each storage, the name of the first weight or part that lies in it, for messages."""
        names: dict[int, str] = {}
        for weight in self.weights:
            for part in weight.parts:
                names.setdefault(part.storage, tensor_of(weight, part))
        return tuple(names.get(s, f"storage {s}") for s in range(len(self.storages)))

    def read_graph(self) -> networkx.DiGraph:
        """A graph of the steps of all methods, the storages of all weights, and the reads between them.

        The node `("step", graph, k)` is step k of method number `graph`, with these attributes: `kind`
        ("step"), `name` (of the node or kernel that reads), `method`, `index` (k), `bytes` (of the storages
        that it reads), `lead_ns`, `lead_flops` and `lead_bytes` (the compute since the step before, and the
        memory that it reads and writes), `read_ns`, `read_flops` and `read_bytes` (the compute of the step
        itself, and its memory).

        The node `("storage", s)` is storage s of the payload: `kind` ("storage"), `name` (the first FQN that
        lies in it), `bytes`, `storage_kind` ("streamable", "mutable", "returned", "inlined", "small" or
        "produced"), and one entry for each tensor that lies in it in the lists `fqns`, `dtypes` and `shapes`.
        A storage without edges always stays in memory, or nothing uses it.

        Edges have the attribute `why`: "reads" from a storage to a step, "writes" from a step to a storage
        that it produces, "order" from a step to the next one of its method. Where single units of a storage
        may do for a read, its edge has `units` (their number), `unit_bytes` (of one), `asked` (the most that
        a call of the exported sizes names), `operator`, and `route` (equal for reads of one method that name
        the same units); a plan says by its `pool` whether they are read so. The graph's own attributes are
        `lowering`, and `methods`: by name the `shape` point of the trace, its `tail_ns` and `gap_ns`, and
        whether its `times` are modelled or measured.
        """
        return read_graph(self)

    def trace_for(self, graph: int) -> Trace:
        """The trace of method number `graph`. Raises PayloadError when there is none."""
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
