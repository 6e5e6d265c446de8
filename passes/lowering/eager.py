"""The eager lowering: the raw exported graph itself, run as generated Python code.

Nothing is decomposed or fused, so results are those of the eager model, bit for bit. The graph is
saved without weights; probes are inserted when it is loaded, since the plan is known then.
"""

from __future__ import annotations

import re
import traceback
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from penstock.passes.annotate import Annotated
from penstock.passes.calls.inputs import failed_check
from penstock.passes.calls.signature import CallingConvention
from penstock.passes.graph.nodes import dtype_name, move_graph, nested_modules
from penstock.passes.lowering.archive import (
    PROGRAM,
    check_fits,
    check_ranks,
    open_programs,
    read_code,
    write_programs,
)
from penstock.passes.lowering.method_code import MethodCode, MethodGraph, method_code
from penstock.passes.pipeline import Pipeline, declare
from penstock.passes.probes import STORE, Site, add_sites
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import Method, Trace, Weight
from penstock.schedule.payload.codec import Payload


def save(annotated: Annotated, folder: Path) -> str:
    """Write the programs without weights to a file, and return its name. Raises PassError if torch cannot."""
    with zipfile.ZipFile(folder / PROGRAM, "w", zipfile.ZIP_STORED) as archive:
        write_programs(archive, annotated)
    return PROGRAM


@dataclass(frozen=True)
class LoweredProgram:
    """The code in an artifact, by method."""

    payload: Payload
    methods: Mapping[str, MethodCode]

    @classmethod
    def of(cls, payload: Payload, programs: Mapping[str, ExportedProgram]) -> LoweredProgram:
        """The program that `load` would read if `programs` had been saved."""
        return cls(payload, {name: method_code(exported) for name, exported in programs.items()})


def load(folder: Path, payload: Payload, *, trust: bool = False) -> LoweredProgram:
    """Reads the file that `save` wrote into an artifact's folder.

    Without `trust` it is data, of which only operators run that may run for anybody. With it, it may be code.
    Raises SourceError if it cannot be read, and PayloadError if it is not the payload's program, or needs
    trust.
    """
    check_ranks(folder, payload)
    with open_programs(folder, payload) as archive:
        codes = {m.name: read_code(archive, m.name, trust=trust) for m in payload.methods}
    for method in payload.methods:
        check_fits(payload, method, codes[method.name], trust=trust)
    return LoweredProgram(payload, codes)


@dataclass(frozen=True)
class EagerMethod:
    """A method with its weights, called like the exported module.

    It holds the weights' tensors for as long as it lives. A call checks every input, and raises StreamError
    for one that does not fit.
    """

    graph_module: fx.GraphModule
    convention: CallingConvention
    tensors: Mapping[str, torch.Tensor]
    lifted: tuple[torch.Tensor, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.convention.flatten(args, kwargs))

    def run(self, leaves: list[Any]) -> Any:
        """Runs on leaves that `convention.flatten` has checked; returns results in the caller's structure."""
        # This calls the generated function, because GraphModule's own call prints to stderr when it raises.
        try:
            values = self.graph_module.forward(*self.lifted, *leaves)
        except RuntimeError as error:
            if _is_of_a_check(error):
                raise failed_check(str(error)) from error
            raise
        return self.convention.finish(values, leaves, self.tensors)


def _is_of_a_check(error: RuntimeError) -> bool:
    """Tell whether the operator that raised an error only checks something."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    operator = frames[-1].f_locals.get("self") if frames else None
    return isinstance(operator, OpOverload) and _CHECKS.match(operator._schema.name) is not None


_CHECKS = re.compile(r"aten::(_assert_\w+|_functional_assert_\w+|sym_constrain_range\w*)$")


def instantiate(
    lowered: LoweredProgram,
    tensors: Mapping[str, torch.Tensor],
    method: Method,
    probed: Iterable[int],
    *,
    device: torch.device | str = "cpu",
    rewrite: Callable[[MethodGraph], MethodGraph] | None = None,
) -> EagerMethod:
    """Binds weights to one method, and puts probes around the steps `probed` of its trace.

    `rewrite` is a last pass over the graph, which may run other calls at its steps.

    `tensors` maps every FQN to a plain tensor of the payload's dtype, shape and stride, on `device` (weights
    that were exported for another device than the program's stay on that device). Raises PassError if program
    and payload do not belong together, and StreamError for tensors that are not the weights.
    """
    code, target = lowered.methods[method.name], torch.device(device)
    lower: Pipeline[MethodGraph] = Pipeline(
        (
            partial(on_device, source=code.signature.device, target=target),
            partial(with_probes, lowered=lowered, method=method, probed=probed),
            *([rewrite] if rewrite else []),
        )
    )
    graph = lower(code.graph())
    weights = {weight.fqn: weight for weight in lowered.payload.tensors}
    bound = {fqn: checked_weight(weights, fqn, tensors) for _, fqn in code.weights}
    bound |= {fqn: bound[fqn].detach().requires_grad_() for fqn in code.with_grad}
    lifted = tuple(bound[fqn] for _, fqn in code.weights)
    convention = CallingConvention(code.signature, target)
    return EagerMethod(fx.GraphModule(graph.bodies, graph.graph), convention, tensors, lifted)


@declare(ensures=("device",))
def on_device(graph: MethodGraph, source: torch.device, target: torch.device) -> MethodGraph:
    """Returns the graph, which the caller gives away, with the device `target` in the place of `source`."""
    inner = [module for body in graph.bodies.values() for module in nested_modules(body)]
    move_graph(graph.graph, inner, source, target)
    return graph


@declare(requires=("device",), ensures=("probes",))
def with_probes(
    graph: MethodGraph, lowered: LoweredProgram, method: Method, probed: Iterable[int]
) -> MethodGraph:
    """Put probes around the steps `probed`. Raises PassError if the payload is of another program."""
    trace, probed = lowered.payload.trace_for(method.graph), frozenset(probed)
    _number_stores(graph.graph, trace, probed)
    placeholders = _placeholders(graph.graph, lowered.methods[method.name], lowered.payload)
    names = {node.name for node in graph.graph.nodes}
    sites = []
    for k in sorted(probed):
        step = trace.steps[k]
        if step.writes:
            continue
        if step.name not in names or any(read not in placeholders for read in step.reads):
            raise PassError(
                f"step {k} ({step.name}) of method {trace.method!r} is not in the lowered program: "
                "payload and program are not of one compilation, compile again"
            )
        weights = tuple(name for read in step.reads for name in placeholders[read])
        sites.append(Site(step.name, k, weights))
    add_sites(graph.graph, method.graph, sites)
    return graph


def _number_stores(graph: fx.Graph, trace: Trace, probed: Collection[int]) -> None:
    """Tells each node that stores a kept value which step it is; those that are not `probed` only copy."""
    numbers = {step.name: k for k, step in enumerate(trace.steps) if step.writes}
    for node in graph.nodes:
        if node.target is STORE:
            step = numbers.get(node.name, -1)
            node.args = (*node.args[:2], trace.graph, step if step in probed else -1)


def _placeholders(graph: fx.Graph, code: MethodCode, payload: Payload) -> dict[int, list[str]]:
    """Returns the placeholders of every storage that the graph uses."""
    storages = {weight.fqn: {part.storage for part in weight.parts} for weight in payload.tensors}
    used = {node.name for node in graph.nodes if node.op == "placeholder" and node.users}
    placeholders: dict[int, list[str]] = {}
    for name, fqn in code.weights:
        for storage in storages.get(fqn, ()) if name in used else ():
            placeholders.setdefault(storage, []).append(name)
    return placeholders


def checked_weight(
    weights: Mapping[str, Weight], fqn: str, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The tensor bound to a weight. Raises StreamError if there is none, or if it does not fit the weight."""
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
