"""The code of whole methods: penstock's own lowering compiles each with AOTInductor, its probes inside."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from penstock.backends.executorch.facts import (
    SMALL,
    Facts,
    RegionProgram,
    aliases_of,
    refuse_without_weights,
)
from penstock.backends.executorch.options import MethodFacts, Settings
from penstock.backends.executorch.region import COMPILED
from penstock.passes.annotate import annotate_with_values
from penstock.passes.lowering.archive import PACKAGE
from penstock.passes.lowering.inductor import Compiled, lower, write_package
from penstock.schedule.facts.hardware import with_times
from penstock.schedule.facts.model import Input, Method, join_parts, read_together
from penstock.schedule.payload.codec import ProgramFile

_log = logging.getLogger(__name__)


def compile_methods(
    regions: Sequence[RegionProgram], methods: Mapping[str, MethodFacts], settings: Settings
) -> tuple[Facts, bytes]:
    """Compiles methods of one region each; returns their facts, and the package with all of their code.

    The steps of a trace are those of the compiled code, in the order in which it reads weights. Raises
    PassError for a method without weights, and for one that AOTInductor cannot compile.
    """
    refuse_without_weights(regions)
    programs = {one.method: one.program for one in regions}
    annotated = annotate_with_values(programs, hardware=settings.hardware)
    compiled = lower(annotated.payload, annotated.programs, resident_below=max(SMALL, settings.least))
    code = _package(compiled)
    digest = sha256(code).hexdigest()
    tensors = {weight.fqn: weight for weight in compiled.payload.tensors}
    parts = {part.name: (part.fqn, part.part) for one in methods.values() for part in one.parts}
    weights = join_parts([*tensors.values(), *aliases_of(tensors, methods)], parts)
    payload = replace(
        compiled.payload,
        lowering="executorch",
        program=ProgramFile(COMPILED + digest, digest, compiled.machine),
        weights=weights,
        methods=tuple(
            replace(one, inputs=methods[one.name].inputs, symbols=methods[one.name].symbols)
            for one in compiled.payload.methods
        ),
        traces=tuple(
            read_together(with_times(trace, settings.hardware), weights) for trace in compiled.payload.traces
        ),
        hardware=settings.hardware,
    )
    steps = {trace.method: (0, len(trace.steps)) for trace in payload.traces}
    of_regions = {region.name: steps[region.method] for region in regions}
    own = {method.name: method for method in annotated.payload.methods}
    takes = {one.name: checked_inputs(own[one.method], methods[one.method]) for one in regions}
    return Facts(payload, annotated.values, of_regions, tensors, takes), code


def checked_inputs(region: Method, method: MethodFacts) -> Method:
    """Returns the inputs of a region as the delegate checks them before the code runs.

    It knows sizes and symbols, no expressions of symbols (`2*batch`) and no guards: where there are any, only
    the sizes of the export are taken, and the log says so.
    """
    known = {one.name: one for one in method.inputs}
    inputs = tuple(known.get(one.name, one) for one in region.inputs)
    names = {size for one in inputs for size in one.shape}
    symbols = tuple(one for one in method.symbols if one.name in names)
    expressions = [one.name for one in symbols if not re.fullmatch(r"[\w.]+(\[\d+\])?", one.name)]
    if not (method.guards or expressions):
        return replace(region, inputs=inputs, symbols=symbols)
    _log.warning(
        "method %r runs with the sizes of its export only: the delegate cannot check %s of other sizes",
        region.name,
        [*method.guards, *expressions][0],
    )
    examples = {one.name: one.example for one in symbols}
    return replace(region, inputs=tuple(_with_sizes(one, examples) for one in inputs), symbols=())


def _with_sizes(given: Input, examples: Mapping[str, int]) -> Input:
    return replace(given, shape=tuple(examples.get(str(size), size) for size in given.shape))


def _package(compiled: Compiled) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PACKAGE
        write_package(compiled, path)
        return path.read_bytes()
