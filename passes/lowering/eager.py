"""The eager lowering: the raw exported graph itself, run as generated Python code.

Nothing is decomposed or fused, so the numerics are those of the eager model, bit for bit. What
is saved is the exported program without its weights; probes go in when it is loaded, where the plan
is known.
"""

from __future__ import annotations

import copy
import io
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.passes.calling import CallingConvention
from penstock.passes.graphs import dtype_name
from penstock.passes.lines import sentence
from penstock.passes.probes import Site, insert_sites
from penstock.passes.retarget import exported_device, retarget
from penstock.passes.stored_program import load_stored
from penstock.schedule.errors import PassError, PayloadError, SourceError, StreamError
from penstock.schedule.model import Method, Trace, Weight
from penstock.schedule.payload import Payload

PROGRAM = "program.zip"


def strip_weights(exported: ExportedProgram) -> ExportedProgram:
    """Returns a copy of the program whose weights are on the meta device and hold no bytes.

    Meta and not fake: `torch.export.save` turns fake weights into zeros without a word. Ties are
    lost: the payload keeps them.
    """
    stripped = copy.copy(exported)
    stripped._state_dict = {name: _emptied(value) for name, value in exported.state_dict.items()}
    stripped._constants = {name: _emptied(value) for name, value in exported.constants.items()}
    stripped._example_inputs = None
    return stripped


def save(programs: Mapping[str, ExportedProgram], folder: Path) -> str:
    """Writes the stripped programs to one file of `folder`, a zip of one `METHOD.pt2` each.

    Returns the file's name. Raises PassError for a program that torch cannot save.
    """
    with zipfile.ZipFile(folder / PROGRAM, "w", zipfile.ZIP_STORED) as archive:
        for name, exported in programs.items():
            buffer = io.BytesIO()
            try:
                torch.export.save(strip_weights(exported), buffer)
            except Exception as error:
                raise PassError(
                    f"method {name!r} cannot be saved ({type(error).__name__}: {error}): "
                    "torch.export.save must accept the program"
                ) from error
            archive.writestr(f"{name}.pt2", buffer.getvalue())
    return PROGRAM


@dataclass(frozen=True)
class LoweredProgram:
    """What an artifact holds as code: for each method the exported program without its weights."""

    payload: Payload
    programs: Mapping[str, ExportedProgram]


def load(folder: Path, payload: Payload) -> LoweredProgram:
    """Reads what `save` wrote into an artifact's folder. The file is code: trust it first.

    Raises SourceError when it cannot be read, PayloadError when it is not the payload's program.
    """
    path = folder / (payload.program.path if payload.program else PROGRAM)
    programs = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for method in payload.methods:
                programs[method.name] = load_stored(archive.read(f"{method.name}.pt2"))
    except OSError as error:
        raise SourceError(f"the lowered program {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise PayloadError(
            f"the lowered program {path} cannot be loaded ({type(error).__name__}: {sentence(error)}): "
            "import the library that registers its operators and types first, or compile it again"
        ) from error
    return LoweredProgram(payload, programs)


@dataclass(frozen=True)
class BoundProgram:
    """A method with its weights, called like the exported module.

    It holds the weights' tensors for as long as it lives. Calls check every input (StreamError).
    """

    graph_module: fx.GraphModule
    convention: CallingConvention
    tensors: Mapping[str, torch.Tensor]
    lifted: tuple[torch.Tensor, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.convention.flatten(args, kwargs))

    def run(self, leaves: list[Any]) -> Any:
        """Runs on leaves that `convention.flatten` has checked, and returns the caller's tree."""
        # The generated function itself: GraphModule's own call prints to stderr when it raises.
        values = self.graph_module.forward(*self.lifted, *leaves)
        return self.convention.finish(values, leaves, self.tensors)


def bind(
    lowered: LoweredProgram,
    tensors: Mapping[str, torch.Tensor],
    method: Method,
    probed: Iterable[int],
    *,
    device: torch.device | str = "cpu",
) -> BoundProgram:
    """Binds weights to one method, and puts probes around the steps `probed` of its trace.

    `tensors` maps every FQN to a plain tensor of the payload's dtype, shape and stride, on `device`
    (weights that were exported for another device than the rest stay on that one). Raises PassError
    when program and payload do not belong together, StreamError for tensors that are not the weights.
    """
    program, payload = lowered.programs[method.name], lowered.payload
    target = torch.device(device)
    source = exported_device(program.graph_module)
    sites = _sites(program, payload, payload.trace_for(method.graph), probed)
    graph_module = insert_sites(retarget(program.graph_module, target), method.graph, sites)
    weights = {weight.fqn: weight for weight in payload.tensors}
    lifted = tuple(
        checked_weight(weights, str(spec.target), tensors)
        for spec in program.graph_signature.input_specs
        if spec.kind is not InputKind.USER_INPUT
    )
    return BoundProgram(graph_module, CallingConvention(program, source, target), tensors, lifted)


def _sites(program: ExportedProgram, payload: Payload, trace: Trace, probed: Iterable[int]) -> list[Site]:
    """Names for each probed step the placeholders of the storages it reads."""
    storages = {weight.fqn: {part.storage for part in weight.parts} for weight in payload.tensors}
    placeholders: dict[int, list[str]] = {}
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT and spec.arg.name in used:
            for storage in storages.get(str(spec.target), ()):
                placeholders.setdefault(storage, []).append(spec.arg.name)
    names = {node.name for node in program.graph.nodes}
    sites = []
    for k in probed:
        step = trace.steps[k]
        if step.name not in names or any(read not in placeholders for read in step.reads):
            raise PassError(
                f"step {k} ({step.name}) of method {trace.method!r} is not in the lowered program: "
                "payload and program are not of one compilation, compile again"
            )
        weights = tuple(name for read in step.reads for name in placeholders[read])
        sites.append(Site(step.name, k, weights))
    return sites


def checked_weight(
    weights: Mapping[str, Weight], fqn: str, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The tensor bound to a weight. Raises StreamError where there is none, or it is not the weight's."""
    if fqn not in weights or fqn not in tensors:
        raise StreamError(f"weight {fqn!r} is not bound: give a tensor for every weight of the payload")
    part, tensor = weights[fqn].parts[0], tensors[fqn]
    expected = (part.dtype, part.shape, part.stride)
    got = (dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))
    if got != expected or tensor.requires_grad:
        raise StreamError(
            f"weight {fqn!r} is bound to {got}{' that requires grad' * tensor.requires_grad}, expected "
            f"{expected} without grad: bind views of its own storage"
        )
    return tensor


def _emptied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    empty = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=False) if isinstance(value, torch.nn.Parameter) else empty
