"""Examines a model: which parts of it export and stream, which do not, and the line that prevents it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram

from penstock.models.preflight import open_source
from penstock.passes.annotate import annotate
from penstock.passes.building.deferred import LARGE
from penstock.passes.building.fake_export import Built
from penstock.passes.building.refusals import sentence
from penstock.passes.graph.nodes import tensors_of
from penstock.runtime.checkpoint.binding import listed
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.schedule.facts.errors import PassError, SourceError
from penstock.schedule.facts.sizes import format_size
from penstock.schedule.payload.codec import Payload

Outcome = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Check:
    """The name of a check, its outcome, and the finding in words."""

    name: str
    outcome: Outcome
    message: str


def examine(source: str) -> list[Check]:
    """Check the model of a `config.json` or of `module:function`, up to a finding that prevents the next."""
    checks: list[Check] = []
    try:
        build, inputs = open_source(source)
        built = Built.by(build)
        checks += _of_construction(built)
    except PassError as error:
        return [*checks, Check("construction", "problem", str(error))]
    try:
        exported = built.export(inputs())
        checks.append(Check("export", "ok", f"exports to {len(exported.graph.nodes)} nodes"))
    except PassError as error:
        small = [_allocated(nbytes, line) for nbytes, line in built.allocated if nbytes < LARGE]
        return [*checks, *small, Check("export", "problem", str(error)), *_of_files(source)]
    checks += _of_devices(exported)
    checks += _of_operators(exported)
    try:
        payload = annotate(exported)
    except Exception as error:  # a pass may fail in any way
        reason = str(error) if isinstance(error, PassError) else f"{type(error).__name__}: {sentence(error)}"
        return [*checks, Check("streaming", "problem", reason), *_of_files(source)]
    return [*checks, *_of_weights(payload), *_of_files(source)]


def _of_construction(built: Built) -> Iterator[Check]:
    yield from (_allocated(nbytes, line) for nbytes, line in built.allocated if nbytes >= LARGE)
    yield Check("construction", "ok", "is built without memory")
    if built.buffers:
        names = listed(list(built.buffers))
        yield Check(
            "buffers", "note", f"no checkpoint has {names}: computed again by the module that owns them"
        )


def _allocated(nbytes: int, line: str) -> Check:
    return Check(
        "construction",
        "problem",
        f"the constructor really allocates {format_size(nbytes)} on the CPU{line}: make it with torch",
    )


def _of_devices(exported: ExportedProgram) -> Iterator[Check]:
    values = [tensor for node in exported.graph.nodes for tensor in tensors_of(node.meta.get("val"))]
    devices = sorted({str(tensor.device) for tensor in values})
    uses = f"uses {', '.join(devices)}"
    if len(set(devices) - {"cpu"}) > 1:
        build = "a program is loaded on one device besides the CPU; build it for one"
        yield Check("devices", "problem", f"{uses}: {build}")
    else:
        yield Check("devices", "ok", uses)


def _of_operators(exported: ExportedProgram) -> Iterator[Check]:
    """Yield a note on operators of other libraries without a GPU kernel; torch's own count as having one."""
    targets = {
        str(node.target)
        for node in exported.graph.nodes
        if isinstance(node.target, OpOverload) and not _runs_on_cuda(node.target)
    }
    lacking = f"{listed(sorted(targets))} have no CUDA kernel: they run on a CPU only"
    yield Check("operators", *(("note", lacking) if targets else ("ok", "all can run on a GPU")))


def _runs_on_cuda(operator: OpOverload) -> bool:
    if operator.namespace in ("aten", "prims"):
        return not any(part in str(operator) for part in ("_for_cpu", "mkldnn", "onednn"))
    keys = "CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has(operator.name(), key) for key in keys)  # type: ignore[no-untyped-call]


def _of_weights(payload: Payload) -> Iterator[Check]:
    total = sum(s.nbytes for s in payload.storages)
    if not total:
        yield Check("streaming", "note", "the model has no weights: there is nothing to stream")
        return
    streamable = sum(s.nbytes for s in payload.storages if s.kind == "streamable")
    yield Check(
        "streaming",
        "ok" if streamable else "problem",
        f"{format_size(streamable)} of {format_size(total)} of weights can stream, "
        f"read in {sum(len(trace.steps) for trace in payload.traces)} steps",
    )
    staying = [w.fqn for w in payload.weights if payload.storages[w.parts[0].storage].kind != "streamable"]
    if staying:
        yield Check("streaming", "note", f"{listed(staying)} always stay: they are written, or given back")
    names: dict[int, list[str]] = {}
    for weight in payload.weights:
        names.setdefault(weight.parts[0].storage, []).append(weight.fqn)
    for tied in [tied_names for tied_names in names.values() if len(tied_names) > 1][:3]:
        yield Check("ties", "note", f"{listed(tied)} share one memory, which is copied once")


def _of_files(source: str) -> Iterator[Check]:
    """Yield a check of the weight files of a folder: their headers and sizes."""
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    if path.exists() and any(folder.glob("*.safetensors")):
        usual = folder / "model.safetensors.index.json", folder / "model.safetensors"
        try:
            open_checkpoint(next(filter(Path.is_file, usual), folder))
            yield Check("files", "ok", "their headers and sizes are right; no value of a weight was read")
        except SourceError as error:
            yield Check("files", "problem", str(error))


def facts(checks: list[Check]) -> list[dict[str, Any]]:
    """The checks as JSON."""
    return [{"check": check.name, "outcome": check.outcome, "message": check.message} for check in checks]
