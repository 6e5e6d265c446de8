"""The order in which a lowered program reads its weights, taken from the wrapper that Inductor emitted.

The calls of acquire and release divide the wrapper into stretches. A stretch reads every weight that occurs
in it, under its own name or that of an alias, other than in a definition. A read that the compiler moved,
repeated or fused into another kernel is thus seen where it happens, wherever the probes of the original read
are. A line counts as a read unless it is certain that it reads nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from penstock.schedule.facts.errors import PassError

_CPP_BODY = ("void AOTInductorModel::run_impl(", "} // AOTInductorModel::run_impl")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_CONSTANT = re.compile(r"auto& (\w+) = constants_->at\((\d+)\);")
_FQN = re.compile(r'constants_info_\[(\d+)\]\.original_fqn = "(.*)";')
_PROXY = re.compile(r"aoti_torch_proxy_executor_call_function\(proxy_executor, (\d+),")
_VIEWS = r"(?:std::move|(?:wrap_with_raii_handle_if_needed\()?reinterpret_tensor_wrapper)\("
_ALIAS = re.compile(rf"^(?:auto |RAIIAtenTensorHandle )?(\w+) = {_VIEWS}")
_WRAPPED = re.compile(r"^RAIIAtenTensorHandle (\w+)\((\w+_handle)\);$")
_ASSIGNED = re.compile(r"aoti_torch_assign_tensors_out\((\w+), &(\w+)\)")
_ONLY_METADATA = re.compile(r"^(?:\w+\.reset\(\);|if \(_check_aoti_runtime_check_inputs_env\(\)\)|//)")
_RETURNED = re.compile(r"&(\w+)|\b((?:\w+_)?buf\d+\w*)\b")
_GENERATED = re.compile(r"^(?:cpp_|triton_|kernels\.)\w+\(")
_SHIM = re.compile(r"aoti_torch_(?:(?:cpu|cuda|xpu|mps)_)?(\w+?)(?:_out)?\(")

_PYTHON_PROBE = re.compile(r"torch\.ops\.penstock\.(acquire|release)\.default\(\[.*\], (\d+), (\d+)\)$")
_PYTHON_GUARD = re.compile(r"^with torch\.\w+\.(?:_DeviceGuard|device_index)\(\d+\):$")
_PYTHON_METADATA = re.compile(r"^(?:del \w+$|#|assert_size_stride\(|args\.clear\(\)|[\w, ]+ = args$)")
_PYTHON_ALIAS = re.compile(r"^(\w+) = (?:reinterpret_tensor\(.*\)|\w+)(?:; del \w+)?(?:  # .*)?$")
_RESULT = re.compile(r"^[\[(]?(?:[\w:<>&*]+ )*(\w+)(?:\[\d+\])?[\])]? = ")
_RESULTS = re.compile(r"^[\[(](\w+(?:, \w+)*),?[\])] = ")
_PYTHON_OPERATOR = re.compile(r"(?:torch\.ops\.aten|extern_kernels)\.(\w+)")

AT_EDGE = -1
"""Stands in the place of a probe call for the beginning or the end of the whole call."""


@dataclass(frozen=True)
class ObservedStep:
    """The storages that are read between two neighbouring probe calls, `opens` and `closes`.

    Call 2 p is the acquire of probe p, and 2 p + 1 its release. `label` names the first kernel that reads.
    `by_units` are the numbers of the reads by units among them, of storages that nothing else there reads.
    """

    reads: tuple[int, ...]
    opens: int
    closes: int
    label: str
    by_units: tuple[int, ...] = ()


@dataclass(frozen=True)
class Observation:
    """The steps and all probe calls, each in the order in which they run, and the FQNs bound at load."""

    steps: tuple[ObservedStep, ...]
    calls: tuple[int, ...]
    bound: tuple[str, ...]


def observe_cpp(source: str, extern_nodes: str, storages: Mapping[str, int], number: int) -> Observation:
    """Observes the wrapper of AOTInductor; `extern_nodes` is the JSON beside it, with the operators it calls.

    `storages` maps the FQNs of the weights that stream to their storages. `number` is the program's graph
    number, which its probes must carry. Raises PassError for a wrapper that cannot be followed.
    """
    probes, operators, by_units = _extern_calls(extern_nodes, number)
    fqns = {int(index): json.loads(f'"{name}"') for index, name in _FQN.findall(source)}
    walk = _Walk()
    for raw in _between(source, *_CPP_BODY):
        line = raw.strip()
        if match := _CONSTANT.search(line):
            fqn = fqns.get(int(match[2]), "")
            if fqn in storages:
                walk.names[match[1]] = {storages[fqn]}
        elif (match := _PROXY.search(line)) and int(match[1]) in probes:
            walk.call(probes[int(match[1])], nested=raw[:5].startswith("     "))
        else:
            position = int(match[1]) if match else -1
            walk.line(line, operators.get(position), by_units.get(position))
    steps = walk.finish()
    return Observation(tuple(steps), tuple(walk.calls), tuple(fqns.values()))


def observe_python(source: str, storages: Mapping[str, int], number: int) -> Observation:
    """Return what the code that Inductor emitted for `torch.compile` reads, in its order.

    `storages` maps the names of the code's inputs to storages.

    `number` is the program's graph number, which its probes must carry. Raises PassError for code that cannot
    be followed.
    """
    walk = _Walk({name: {storage} for name, storage in storages.items()})
    margin = 8  # blanks before what runs in every call: the body, also within guards of the device
    for raw in _between(source, "def call(self, args):", "\nrunner = Runner("):
        line = raw.strip()
        indent = len(raw) - len(raw.lstrip())
        if line:
            margin = min(margin, indent)
        if indent == margin and _PYTHON_GUARD.match(line):
            margin += 4
        elif probe := _PYTHON_PROBE.match(line):
            if int(probe[2]) != number:
                raise PassError(f"a probe of graph {probe[2]} is in the program of graph {number}")
            walk.call(2 * int(probe[3]) + (probe[1] == "release"), nested=indent > margin)
        elif not _PYTHON_METADATA.match(line):
            walk.line(line)
    return Observation(tuple(walk.finish()), tuple(walk.calls), tuple(storages))


def _between(source: str, begin: str, end: str) -> Sequence[str]:
    """The lines of the function that runs the model: those after the line `begin` and before `end`."""
    start = source.rfind(begin)
    stop = source.find(end, start)
    if start < 0 or stop < 0:
        raise PassError(
            f"the wrapper that Inductor emitted has no {begin!r}: penstock does not know the code that this "
            "version of torch writes"
        )
    return source[start:stop].splitlines()[1:]


def _extern_calls(extern_nodes: str, number: int) -> tuple[dict[int, int], dict[int, str], dict[int, int]]:
    """Probe calls, other operators, and numbers of reads by units, by their positions in the list."""
    calls, operators, by_units = {}, {}, {}
    for position, node in enumerate(json.loads(extern_nodes)["nodes"] if extern_nodes else ()):
        target = node["node"]["target"]
        if target.startswith("penstock::"):
            values = {argument["name"]: argument["arg"].get("as_int") for argument in node["node"]["inputs"]}
            if values["graph"] != number:
                raise PassError(f"a probe of graph {values['graph']} is in the program of graph {number}")
        if target.startswith(("penstock::acquire", "penstock::release")):
            calls[position] = 2 * values["step"] + target.startswith("penstock::release")
        else:
            operators[position] = target
        if target.startswith("penstock::by_units"):
            by_units[position] = values["read"]
    return calls, operators, by_units


@dataclass
class _Walk:
    """The state while lines are followed: the storages behind names, and the reads since the last probe."""

    names: dict[str, set[int]] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    steps: list[ObservedStep] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    by_units: dict[int, set[int]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    label: str = ""

    def call(self, call: int, *, nested: bool) -> None:
        """Follow a probe call; PassError for one that is `nested` in control flow, or that comes twice."""
        if nested:
            raise PassError("a probe was emitted inside control flow, where it may run never or often")
        if call in self.calls:
            raise PassError(f"the wrapper calls probe {call // 2} twice: expected each once")
        self._close(call)
        self.calls.append(call)

    def line(self, line: str, operator: str | None = None, read: int | None = None) -> None:
        """Follow a line that is no probe call; `read` numbers a read by units of the proxy's `operator`."""
        if not line or _ONLY_METADATA.match(line):
            return
        touched = self._touched(line)
        if not touched:
            return
        if match := _ALIAS.match(line) or _WRAPPED.match(line) or _PYTHON_ALIAS.match(line):
            self.names.setdefault(match[1], set()).update(touched)
        elif match := _ASSIGNED.search(line):
            self.names.setdefault(match[2], set()).update(touched)
        else:
            self.label = self.label or _called(line)
            self.reads |= touched
            if read is None:
                self.whole |= touched
            else:
                self.by_units[read] = touched
            if _may_alias(line, operator):
                for name in _results(line):
                    self.names.setdefault(name, set()).update(touched)

    def finish(self) -> list[ObservedStep]:
        self._close(AT_EDGE)
        return self.steps

    def _close(self, call: int) -> None:
        if self.reads:
            opens = self.calls[-1] if self.calls else AT_EDGE
            self.steps.append(ObservedStep(tuple(sorted(self.reads)), opens, call, self.label, self._alone()))
        self.reads, self.label, self.by_units, self.whole = set(), "", {}, set()

    def _alone(self) -> tuple[int, ...]:
        """The read by units since the last probe, if there is one, and no other read of its storage."""
        alone = len(self.by_units) == 1
        return tuple(read for read, of in self.by_units.items() if alone and not of & self.whole)

    def _touched(self, line: str) -> set[int]:
        touched: set[int] = set()
        for name in _IDENTIFIER.findall(line):
            touched |= self.names.get(name, set())
        return touched


def _called(line: str) -> str:
    if operator := _SHIM.search(line) or _PYTHON_OPERATOR.search(line):
        return operator[1]
    return (_IDENTIFIER.search(line) or [""])[0]


def _results(line: str) -> set[str]:
    """Every name on a line that may be a tensor that the line makes."""
    names = {name for pair in _RETURNED.findall(line) for name in pair if name}
    names |= set(_RESULT.findall(line))
    for several in _RESULTS.findall(line):
        names |= set(several.split(", "))
    return names


def _may_alias(line: str, operator: str | None) -> bool:
    """Tell whether an operator's result may share its arguments' memory; generated kernels' never do."""
    if _GENERATED.match(line):
        return False
    if operator is not None:
        namespace, _, name = operator.partition("::")
    else:
        match = _SHIM.search(line) or _PYTHON_OPERATOR.search(line)
        namespace, name = "aten", match[1] if match else ""
    name = name.partition(".")[0]
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    if packet is None:
        return True
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return any(
        value.alias_info is not None and not value.alias_info.is_write
        for schema in schemas
        for value in schema.returns
    )
