"""The call of an exported program, as facts: what goes in, what comes out, and what is written back.

Besides the graph, a call needs nothing but these facts, which have a form in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree as pytree

from penstock.passes.calls.checks import Leaf
from penstock.passes.calls.expressions import parse
from penstock.passes.calls.inputs import guards_of, leaves_of, user_placeholders
from penstock.passes.calls.records import checked, refuse
from penstock.passes.calls.stored_graph import Values, decode_value, encode_value
from penstock.passes.graph.retarget import exported_device
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError

_WRITTEN_BACK = {OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION}
_UNDERSTOOD = {*_WRITTEN_BACK, OutputKind.USER_OUTPUT}


@dataclass(frozen=True)
class CallSignature:
    """The structure of a call's inputs and result, its leaves, and the meaning of the graph's flat outputs.

    Output i is written back to input leaf `to_leaf[i]` or to weight `to_weight[i]`; otherwise it is the next
    of `results` results. Result k is `constants[k]` if its value was fixed at export. A guard is a pair: its
    text, and an expression (`expressions.py`).
    """

    device: torch.device
    in_spec: pytree.TreeSpec | None
    out_spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    guards: tuple[tuple[str, str], ...]
    to_leaf: Mapping[int, int]
    to_weight: Mapping[int, str]
    results: int
    constants: Mapping[int, Any]


@declare(requires=("one grad mode",), ensures=("known signature",))
def check_signature(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program; raises PassError if its calls could not be checked or written back.

    It is raised for outputs that are neither results nor mutations, and for guards that no call can check.
    """
    guards_of(exported)
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in _UNDERSTOOD:
            raise PassError(
                f"output {spec.arg.name!r} is a {spec.kind.name.lower()}, expected results and mutations: "
                "export the model for inference"
            )
    return exported


def signature_of(exported: ExportedProgram) -> CallSignature:
    """Returns the signature of a program. Raises PassError for a program that `check_signature` refuses."""
    names = [node.name for node in user_placeholders(exported)]
    specs = exported.graph_signature.output_specs
    results = [spec.arg for spec in specs if spec.kind not in _WRITTEN_BACK]
    inputs = {i: str(s.target) for i, s in enumerate(specs) if s.kind is OutputKind.USER_INPUT_MUTATION}
    written = {i: str(s.target) for i, s in enumerate(specs) if s.kind in _WRITTEN_BACK and i not in inputs}
    return CallSignature(
        device=exported_device(exported.graph_module),
        in_spec=exported.call_spec.in_spec,
        out_spec=exported.call_spec.out_spec,
        leaves=leaves_of(exported),
        guards=guards_of(exported),
        to_leaf={position: names.index(target) for position, target in inputs.items()},
        to_weight=written,
        results=len(results),
        constants={k: arg.value for k, arg in enumerate(results) if isinstance(arg, ConstantArgument)},
    )


def output_names(signature: CallSignature) -> tuple[str, ...]:
    """The name of each result that is no constant, from its path in the structure of the results."""
    tree = pytree.tree_unflatten(list(range(signature.results)), signature.out_spec)
    paths = [path for path, _ in pytree.tree_leaves_with_path(tree)]
    return tuple(path_name(path) for k, path in enumerate(paths) if k not in signature.constants)


def path_name(path: pytree.KeyPath) -> str:
    """The name of a leaf in a file of outputs: its path without outer signs, `output` if it has none."""
    return pytree.keystr(path).strip(".[]'") or "output"


def encode_signature(signature: CallSignature) -> dict[str, Any]:
    """The signature in plain JSON values.

    Raises PassError for a value that has no form in JSON, and for a class in its trees that was registered
    without a name.
    """
    return {field.name: encode_value(getattr(signature, field.name)) for field in fields(signature)}


def decode_signature(stored: Any, *, trust: bool = False) -> CallSignature:
    """The signature that `encode_signature` stored.

    Raises PassError for JSON that is none, and for a class that nothing has registered in this process. With
    `trust` it may have classes that torch imports.
    """
    names = {field.name for field in fields(CallSignature)}
    if not isinstance(stored, dict) or stored.keys() != names:
        refuse(stored, "signature of a call")
    values = Values(None, trust)
    decoded = checked(CallSignature(**{name: decode_value(value, values) for name, value in stored.items()}))
    trees = 0 if decoded.in_spec is None else decoded.in_spec.num_leaves
    fits = decoded.in_spec is None or (trees == len(decoded.leaves) and _is_call(decoded.in_spec))
    if (
        not fits
        or decoded.results != decoded.out_spec.num_leaves
        or decoded.constants.keys() - set(range(decoded.results))
    ):
        raise PassError(
            f"a call of {len(decoded.leaves)} inputs and {decoded.results} results does not fit the "
            f"structures of {trees} and {decoded.out_spec.num_leaves}: compile again"
        )
    for _, source in decoded.guards:
        parse(source)
    return decoded


def _is_call(spec: pytree.TreeSpec) -> bool:
    """Tells whether a structure is of positional arguments and keyword arguments."""
    parts = spec.children()
    return spec.type is tuple and [part.type for part in parts] == [tuple, dict]
