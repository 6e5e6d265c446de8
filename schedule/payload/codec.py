"""payload.json: the whole contract between compile time and run time, as docs/payload.md specifies it.

`Payload` holds the classes of `model.py`; this file turns it into bytes and back. What types cannot
say (indices, extents, spans of parts) is checked by `payload_checks.py`, on writing as on reading;
whether plans are safe by `verify_payload`, whenever a payload is opened to be run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

from penstock.schedule.facts.errors import PayloadError, PlanError
from penstock.schedule.facts.hardware import STRICT
from penstock.schedule.facts.model import Hardware, Method, Plan, Storage, Trace, Weight, WeightFile
from penstock.schedule.facts.parts import plain_weights, tensor_of
from penstock.schedule.payload.checks import check_payload, check_plan
from penstock.schedule.verify.proof import verify_plan

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

VERSIONS = (4,)
Lowering = Literal["none", "eager", "inductor"]

_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
_WIDTH = 100
_T = TypeVar("_T")


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


@dataclass(frozen=True, kw_only=True)
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

    def to_bytes(self) -> bytes:
        """The payload as UTF-8 JSON, the same bytes for the same payload.

        Raises PayloadError for one that `from_bytes` would refuse.
        """
        check_payload(self, "the payload to be written")
        return _encode(self)

    @staticmethod
    def from_bytes(data: bytes, *, source: str = "payload.json") -> Payload:
        """Read and check a payload; `source` names it in messages. Raises PayloadError."""
        text, tree = _parse(data, source)
        _check_version(tree, source)
        payload = _validate(Payload, text, tree, source)
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


def plan_to_json(plan: Plan) -> str:
    """One plan as JSON, as in `plans` of a payload."""
    return _encode(plan).decode()


def plan_from_json(data: str | bytes, *, source: str = "plan.json") -> Plan:
    """Read one plan. Raises PayloadError; whether it is safe is for `verify_plan` to say."""
    text, tree = _parse(data, source)
    plan = _validate(Plan, text, tree, source)
    check_plan(plan, source)
    return plan


# Writing.


def _encode(value: Any) -> bytes:
    try:
        return (_render(_plain(value), "") + "\n").encode()
    except UnicodeEncodeError as error:
        raise PayloadError(f"the payload holds text that is not Unicode: {error}") from None


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries in field order; whole rates as floats, as they are read back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: float(v) if f.type == "float" else _plain(v) for f, v in items}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _render(value: Any, indent: str) -> str:
    """JSON that a person can read: on one line what fits there, and every list of numbers."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    numbers = isinstance(value, list) and all(isinstance(v, int) for v in value)
    if not isinstance(value, dict | list) or numbers or len(flat) + len(indent) <= _WIDTH:
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(k)}: {_render(v, inner)}" for k, v in value.items()]
    else:
        lines = [_render(v, inner) for v in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}{closing}"


# Reading.


class _Pairs(dict[str, Any]):
    """A JSON object that remembers a key which occurred twice."""

    twice: str | None = None


def _pairs(items: list[tuple[str, Any]]) -> _Pairs:
    pairs = _Pairs(items)
    if len(pairs) < len(items):
        keys = [key for key, _ in items]
        pairs.twice = next(key for key in keys if keys.count(key) > 1)
    return pairs


def _parse(data: str | bytes, source: str) -> tuple[str, Any]:
    """The text and its JSON tree, free of what pydantic's parser lets pass: repeated keys, NaN."""
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        tree = json.loads(text, object_pairs_hook=_pairs)
        _check_tree(tree, "$", source)
    except UnicodeDecodeError as error:
        raise PayloadError(f"{source}: expected UTF-8, got {error}; write the file again") from None
    except RecursionError:
        raise PayloadError(f"{source}: lists and objects are nested too deeply for any payload") from None
    except ValueError as error:
        raise PayloadError(
            f"{source}: expected one whole JSON object, got {error}; is the file cut off?"
        ) from None
    return text, tree


def _check_tree(value: Any, path: str, source: str) -> None:
    if isinstance(value, _Pairs):
        if value.twice is not None:
            raise PayloadError(f"{source}: {path} has the key {value.twice!r} twice, expected each key once")
        for key, inner in value.items():
            _check_tree(inner, f"{path}.{key}", source)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_tree(inner, f"{path}[{i}]", source)
    elif isinstance(value, int) and not _LEAST_INT <= value <= _MOST_INT:
        raise PayloadError(
            f"{source}: {path}: expected an integer from -2^63 to 2^64 - 1, got {_short(value)}"
        )
    elif isinstance(value, float) and not math.isfinite(value):
        raise PayloadError(f"{source}: {path}: expected a finite number, got {value}")


def _check_version(tree: Any, source: str) -> None:
    if not isinstance(tree, dict) or tree.get("format") != "penstock":
        got = tree.get("format") if isinstance(tree, dict) else tree
        raise PayloadError(f"{source}: $.format: expected 'penstock', got {_short(got)}; this is no payload")
    version = tree.get("version")
    if isinstance(version, bool) or version not in VERSIONS:
        reads = ", ".join(map(str, VERSIONS))
        raise PayloadError(
            f"{source}: $.version: this penstock reads version {reads}, got {_short(version)}; "
            "compile again, or use the penstock that wrote it"
        )


@functools.cache  # building one takes longer than reading a small payload
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _validate(kind: type[_T], text: str, tree: Any, source: str) -> _T:
    from pydantic import ValidationError

    try:
        # from JSON, not from the tree: in strict mode only JSON lists may become tuples
        value: _T = _adapter(cast(Any, kind)).validate_json(text)
    except ValidationError as error:
        raise PayloadError(f"{source}: {_first_problem(error, tree)}") from None
    return value


def _first_problem(error: ValidationError, tree: Any) -> str:
    problem = error.errors(include_url=False)[0]
    path, value = "$", tree
    for place in problem["loc"]:
        # pydantic also names the member of a union that it tried, which is no part of the path
        if isinstance(place, int) and isinstance(value, list):
            path, value = f"{path}[{place}]", value[place]
        elif isinstance(place, str) and isinstance(value, dict):
            path, value = f"{path}.{place}", value.get(place)
    if problem["type"] == "missing":
        return f"{path} is missing, expected a field of that name"
    if problem["type"] == "unexpected_keyword_argument":
        return f"{path} is not a field of the format, got {_short(value)}; see docs/payload.md"
    return f"{path}: {problem['msg'].replace('Input should be', 'expected')}, got {_short(value)}"


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(type(value))
    return text if len(text) <= 80 else text[:77] + "..."
