"""Constants that export lifts out of graphs: each method's own, under names that no other method has."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


def with_own_constants(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Returns the programs by method, with the method's name before constants that several methods have.

    Export numbers them anew in each program, so that equal names say nothing. Programs without such constants
    are returned as they are.
    """
    counted = Counter(name for exported in programs.values() for name in _constants(exported))
    repeated = {name for name, count in counted.items() if count > 1}
    return {method: _renamed(exported, repeated, method) for method, exported in programs.items()}


def _constants(exported: ExportedProgram) -> set[str]:
    specs = exported.graph_signature.input_specs
    return {str(spec.target) for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR}


def _renamed(exported: ExportedProgram, repeated: set[str], method: str) -> ExportedProgram:
    names = {name: f"{method}.{name}" for name in _constants(exported) & repeated}
    if not names:
        return exported
    renamed = copy.copy(exported)
    signature = exported.graph_signature
    renamed._graph_signature = replace(
        signature,
        input_specs=[
            replace(spec, target=names.get(str(spec.target), spec.target))
            if spec.kind is InputKind.CONSTANT_TENSOR
            else spec
            for spec in signature.input_specs
        ],
    )
    renamed._constants = {names.get(name, name): value for name, value in exported.constants.items()}
    return renamed
