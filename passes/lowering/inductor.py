"""The Inductor lowering: one shared object for each method, compiled ahead of time, with its weights outside.

Probes go into the graph that Inductor lowers (`post_grad.py`), and the order in which the result reads its
weights is taken from the code that Inductor emitted (`emitted.py`). Compiling touches no weight: in their
place stands memory that is never written, so the program's own may be fake, meta, or not there.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.passes.graph.retarget import exported_device
from penstock.passes.lowering.archive import PROGRAM, write_programs
from penstock.passes.lowering.emitted import Observation, observe_cpp
from penstock.passes.lowering.hollow import example_arguments, has_values, without_values
from penstock.passes.lowering.options import FIXED, check_options, own_passes, raise_own
from penstock.passes.lowering.post_grad import PlacedProbes, ProbePass
from penstock.passes.trace import PRESET_CPU, sum_of
from penstock.passes.weights.lifted import Weights
from penstock.schedule.facts.costs import with_times
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Method, Step, Storage, Trace, Weight, Work
from penstock.schedule.facts.parts import read_together
from penstock.schedule.payload.codec import Payload, ProbeOrder

PACKAGE = "compiled.pt2"

_INLINED = 8
"""Elements, at most, of a tensor that the compiler may copy into the code."""


@dataclass(frozen=True)
class Compiled:
    """What became of the methods: files for the package by method, the payload's facts, and the machine."""

    files: Mapping[str, Sequence[Any]]
    payload: Payload
    machine: str


def lower(
    payload: Payload,
    programs: Mapping[str, ExportedProgram],
    *,
    options: Mapping[str, Any] | None = None,
    resident_below: int = 0,
) -> Compiled:
    """Compiles every method; in the result's payload are the observed traces and what was inlined.

    `options` are Inductor's, as `torch.compile` takes them. Storages of less than `resident_below`
    bytes get no probes and stay in memory. Raises PassError for options that defeat streaming, and for a
    program that Inductor cannot compile or whose code cannot be followed.
    """
    options = dict(options or {})
    check_options(options)
    payload = replace(payload, storages=mark_small(payload.storages, resident_below))
    files, traces, orders, bound = {}, [], [], set()
    machine = ""
    for method in payload.methods:
        one = _Compilation(payload, programs[method.name], method)
        files[method.name], observation, placed = one.compile(options)
        trace, order = observed(payload.trace_for(method.graph), observation, placed)
        traces.append(read_together(trace, payload.weights))
        orders.append(order)
        bound |= set(observation.bound)
        machine = one.machine
    payload = replace(payload, traces=tuple(traces), probes=tuple(orders))
    return Compiled(files, _with_inlined(payload, bound, programs), machine)


def mark_small(storages: Sequence[Storage], resident_below: int) -> tuple[Storage, ...]:
    """Returns the storages, those that would stream and have less than `resident_below` bytes told apart."""
    return tuple(
        replace(s, kind="small") if s.kind == "streamable" and s.nbytes < resident_below else s
        for s in storages
    )


def save(compiled: Compiled, programs: Mapping[str, ExportedProgram], folder: Path) -> str:
    """Writes the package of all methods, and their exported programs without weights, as one zip.

    Returns the file's name in `folder`. The exported programs say how the methods are called.
    """
    from torch._inductor.package.package import package_aoti

    with (
        zipfile.ZipFile(folder / PROGRAM, "w", zipfile.ZIP_STORED) as archive,
        tempfile.TemporaryDirectory() as temporary,
    ):
        package = Path(temporary) / PACKAGE
        package_aoti(str(package), {name: list(files) for name, files in compiled.files.items()})
        archive.write(package, PACKAGE)
        write_programs(archive, programs)
    return PROGRAM


class _Compilation:
    """One method on its way through Inductor."""

    def __init__(self, payload: Payload, exported: ExportedProgram, method: Method) -> None:
        self._payload, self._method = payload, method
        device = exported_device(exported.graph_module)
        if device.type != "cpu":
            raise PassError(f"method {method.name!r} is for {device}: this version compiles for the CPU")
        self._exported, self._weights = without_values(exported)
        self.machine = ""

    def compile(self, options: Mapping[str, Any]) -> tuple[Sequence[Any], Observation, PlacedProbes]:
        """The files that Inductor wrote, what they read, and where the probes went."""
        streamed = {
            weight.fqn: weight.parts[0].storage
            for weight in self._payload.tensors
            if self._payload.storages[weight.parts[0].storage].kind == "streamable"
        }
        weights = _in_catalog(self._weights, self._payload)
        probes = ProbePass(self._method.graph, weights, _fqn_among(streamed), own_passes(options))
        patches = {**options, **FIXED, "post_grad_custom_post_pass": probes}
        files = self._run_inductor(patches)
        placed = probes.placed or PlacedProbes((), Work())
        source = _read(files, ".wrapper.cpp")
        observation = observe_cpp(source, _read(files, ".wrapper.json"), streamed, self._method.graph)
        self.machine = _machine(json.loads(_read(files, ".wrapper_metadata.json") or "{}"))
        return files, observation, placed

    def _run_inductor(self, patches: Mapping[str, Any]) -> Sequence[Any]:
        from torch._inductor import aot_compile

        args, kwargs = example_arguments(self._exported)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # torch's own, about itself
                module = self._exported.module(check_guards=False)
                files = aot_compile(module, args, kwargs, options=dict(patches))
        except Exception as error:
            raise_own(error)
            raise PassError(
                f"Inductor cannot compile method {self._method.name!r} ({type(error).__name__}: {error}): "
                "torch._inductor.aoti_compile_and_package must accept the program"
            ) from error
        assert isinstance(files, list)
        return files


def observed(modelled: Trace, observation: Observation, placed: PlacedProbes) -> tuple[Trace, ProbeOrder]:
    """The trace of a compiled method: each stretch that reads is a step, with the work of its probes.

    What Inductor reads again costs the bytes of nothing new: its work is not told apart here. Raises
    PassError where not all probes that were placed are called.
    """
    expected = {2 * probe + end for probe in range(len(placed.steps)) for end in (0, 1)}
    if set(observation.calls) != expected:
        raise PassError(
            f"the compiled method {modelled.method!r} calls {len(observation.calls)} probes, expected "
            f"{len(expected)}: the compiler, or its cache, dropped some; clear the cache and try again"
        )
    step_after = {}  # for each call, the step that begins with it or next behind it
    position = {call: index for index, call in enumerate(observation.calls)}
    opened = [position.get(step.opens, -1) for step in observation.steps]
    for call, index in position.items():
        step_after[call] = next((k for k, at in enumerate(opened) if at >= index), len(opened))
    leads = [Work()] * (len(opened) + 1)
    reads = [Work()] * (len(opened) + 1)
    names = [""] * len(opened)
    for probe, one in enumerate(placed.steps):
        k = step_after[2 * probe]
        leads[k], reads[k] = sum_of(leads[k], one.lead_work), sum_of(reads[k], one.read_work)
        if k < len(names) and not names[k]:
            names[k] = one.name
    tail = sum_of(leads[-1], reads[-1], placed.tail)
    steps = tuple(
        Step(name or f"{step.label}_{k}", step.reads, 0, 0, lead, read)
        for k, (step, name, lead, read) in enumerate(
            zip(observation.steps, names, leads, reads, strict=False)
        )
    )
    trace = with_times(replace(modelled, steps=steps, tail_work=tail), PRESET_CPU)
    opens, closes = (tuple(getattr(step, end) for step in observation.steps) for end in ("opens", "closes"))
    return trace, ProbeOrder(modelled.graph, opens, closes)


def _with_inlined(payload: Payload, bound: set[str], programs: Mapping[str, ExportedProgram]) -> Payload:
    """The payload in which storages that only the compiler has read are told apart.

    Raises PassError for a tensor that was copied into the code and had no values, and for one that the
    compiler made up, which nothing could be bound to.
    """
    used = {
        str(spec.target)
        for program in programs.values()
        for spec in program.graph_signature.input_specs
        if spec.kind is not InputKind.USER_INPUT and _is_used(program, spec.arg.name)
    }
    known = {weight.fqn for weight in payload.tensors}
    for name in sorted(bound - known):
        raise PassError(
            f"the compiler made a constant {name!r} of its own from the program's weights: "
            "clone small views of large weights in the model"
        )
    entered = {w.parts[0].storage for w in payload.tensors if w.fqn in bound}
    storages = list(payload.storages)
    for weight in payload.tensors:
        s = weight.parts[0].storage
        if weight.fqn in bound or weight.fqn not in used or not storages[s].nbytes:
            continue
        if prod(weight.parts[0].shape) > _INLINED:
            continue  # dead: no step reads it
        _check_values(weight, programs)
        if s not in entered and storages[s].kind != "mutable":
            storages[s] = replace(storages[s], kind="inlined")
    return replace(payload, storages=tuple(storages))


def _check_values(weight: Weight, programs: Mapping[str, ExportedProgram]) -> None:
    for program in programs.values():
        value = {**program.state_dict, **program.constants}.get(weight.fqn)
        if isinstance(value, torch.Tensor) and not has_values(value):
            raise PassError(
                f"the compiler copied weight {weight.fqn!r} into the code, but it has no values: give this "
                "tensor real ones before compiling"
            )


def _is_used(program: ExportedProgram, name: str) -> bool:
    return any(node.op == "placeholder" and node.name == name and node.users for node in program.graph.nodes)


def _in_catalog(weights: Weights, payload: Payload) -> Weights:
    """The method's weights with the storages of the payload."""
    known = {weight.fqn: weight for weight in payload.tensors}
    return Weights(
        tuple(known[weight.fqn] for weight in weights.weights),
        payload.storages,
        {weight.fqn: index for index, weight in enumerate(weights.weights)},
        weights.tensors,
    )


def _fqn_among(streamed: Mapping[str, int]) -> Callable[[fx.Node], str | None]:
    def fqn(node: fx.Node) -> str | None:
        return str(node.target) if node.op == "get_attr" and node.target in streamed else None

    return fqn


def _read(files: Sequence[Any], ending: str) -> str:
    for file in files:
        if isinstance(file, str) and file.endswith(ending):
            return Path(file).read_text()
    return ""


def _machine(metadata: Mapping[str, str]) -> str:
    keys = ("AOTI_DEVICE_KEY", "AOTI_PLATFORM", "AOTI_MACHINE", "AOTI_CPU_ISA", "AOTI_COMPUTE_CAPABILITY")
    return re.sub(r"\s+", " ", " ".join(metadata.get(key, "") for key in keys)).strip()
