"""payload.json: the whole contract between compile time and run time, as docs/payload.md specifies it.

`Payload` holds the classes of `facts/`, and becomes bytes and back. What types cannot say (indices,
extents, spans of parts) is checked by `checks.py`, on writing as on reading. `verify_payload` proves
plans safe whenever a payload is opened to be run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from penstock.schedule.facts.errors import PayloadError, PlanError
from penstock.schedule.facts.model import STRICT, Hardware, Method, Storage, Trace, Weight, WeightFile
from penstock.schedule.facts.parts import plain_weights, tensor_of
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.checks import check_payload, check_plan
from penstock.schedule.payload.text import decode, encode, parse, short
from penstock.schedule.plan import Plan
from penstock.schedule.verify.proof import verify_plan

VERSIONS = (4,)
Lowering = Literal["none", "eager", "inductor"]


@dataclass(frozen=True)
class ProgramFile:
    """The lowered program: its path inside the artifact's folder, and the sha256 of the file.

    `machine` names the processor or device that it was compiled for, empty where any will do.
    """

    __pydantic_config__: ClassVar = STRICT
    path: str
    sha256: str
    machine: str = ""


@dataclass(frozen=True)
class ProbeOrder:
    """Which probe calls enclose the steps of the trace of method number `graph`, as a compiler left them.

    Step k runs between the calls `opens[k]` and `closes[k]`: 2 p is the acquire of probe p, 2 p + 1 its
    release, -1 the beginning or the end of the pass.
    """

    __pydantic_config__: ClassVar = STRICT
    graph: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Payload:
    """Catalog, traces and plans of one compiled program.

    `lowering` is `none` for a program annotated in memory. `hardware` measured the traces. Where `probes`
    has no entry for a method, step k lies between acquire and release of probe k.
    """

    __pydantic_config__: ClassVar = STRICT
    format: Literal["penstock"] = "penstock"
    version: int = VERSIONS[-1]
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
        """The payload as UTF-8 JSON, the same bytes for the same payload.

        Raises PayloadError for one that `from_bytes` would refuse.
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
        """The weights with each part of a quantised one as a weight of its own, called `FQN.PART`."""
        return plain_weights(self.weights)

    def storage_names(self) -> tuple[str, ...]:
        """For each storage the first FQN that lies in it, for messages."""
        names: dict[int, str] = {}
        for weight in self.weights:
            for part in weight.parts:
                names.setdefault(part.storage, tensor_of(weight, part))
        return tuple(names.get(s, f"storage {s}") for s in range(len(self.storages)))

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
    """Read one plan. Raises PayloadError; whether it is safe is for `verify_plan` to say."""
    text, tree = parse(data, source)
    plan = decode(Plan, text, tree, source)
    check_plan(plan, source)
    return plan


def _check_version(tree: Any, source: str) -> None:
    if not isinstance(tree, dict) or tree.get("format") != "penstock":
        got = tree.get("format") if isinstance(tree, dict) else tree
        raise PayloadError(f"{source}: $.format: expected 'penstock', got {short(got)}; this is no payload")
    version = tree.get("version")
    if isinstance(version, bool) or version not in VERSIONS:
        reads = ", ".join(map(str, VERSIONS))
        raise PayloadError(
            f"{source}: $.version: this penstock reads version {reads}, got {short(version)}; "
            "compile again, or use the penstock that wrote it"
        )
