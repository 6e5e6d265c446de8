"""How an exported program is called, as facts: what goes in, what comes out, and what is written back.

They are all that a call needs besides the graph, and have a form in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree as pytree

from penstock.passes.calls.checks import ConstantLeaf, Dimension, Leaf, NumberLeaf, TensorLeaf
from penstock.passes.calls.inputs import guards_of, leaves_of, user_placeholders
from penstock.passes.calls.stored_graph import decode_value, encode_value
from penstock.passes.graph.retarget import exported_device
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError

_WRITTEN_BACK = {OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION}
_UNDERSTOOD = {*_WRITTEN_BACK, OutputKind.USER_OUTPUT}
_NUMBERS = {kind.__name__: kind for kind in (int, float, bool)}


@dataclass(frozen=True)
class CallSignature:
    """The trees of a call, its leaves, and what becomes of the graph's flat outputs.

    Output i is written back to input leaf `to_leaf[i]` or weight `to_weight[i]`, or is the next of
    `results` results; result k is the value `constants[k]`, if it is one that export knew. `guards` are
    texts, and Python on `leaves`.
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
    """Returns the program; raises PassError where a call of it could not be checked or written back.

    That is for outputs that are neither results nor mutations, and for guards that no call can check.
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
    """Returns how a program is called. Raises PassError for one that `check_signature` refuses."""
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


def encode_signature(signature: CallSignature) -> dict[str, Any]:
    """The signature in plain JSON values.

    Raises PassError for a value that has none, NotImplementedError for a class in its trees that was
    registered without a name.
    """
    return {
        "device": str(signature.device),
        "in_spec": None if signature.in_spec is None else pytree.treespec_dumps(signature.in_spec),
        "out_spec": pytree.treespec_dumps(signature.out_spec),
        "leaves": [_encode_leaf(leaf) for leaf in signature.leaves],
        "guards": [list(guard) for guard in signature.guards],
        "to_leaf": list(signature.to_leaf.items()),
        "to_weight": list(signature.to_weight.items()),
        "results": signature.results,
        "constants": [[k, encode_value(value)] for k, value in signature.constants.items()],
    }


def decode_signature(stored: Mapping[str, Any]) -> CallSignature:
    """The signature again. Raises NotImplementedError for a class that nothing has registered here."""
    return CallSignature(
        device=torch.device(stored["device"]),
        in_spec=None if stored["in_spec"] is None else pytree.treespec_loads(stored["in_spec"]),
        out_spec=pytree.treespec_loads(stored["out_spec"]),
        leaves=tuple(_decode_leaf(leaf) for leaf in stored["leaves"]),
        guards=tuple((text, source) for text, source in stored["guards"]),
        to_leaf=dict(stored["to_leaf"]),
        to_weight=dict(stored["to_weight"]),
        results=stored["results"],
        constants={k: decode_value(value) for k, value in stored["constants"]},
    )


def _encode_leaf(leaf: Leaf) -> dict[str, Any]:
    if isinstance(leaf, TensorLeaf):
        sizes = [size if isinstance(size, int) else asdict(size) for size in leaf.sizes]
        return {"tensor": leaf.name, "dtype": encode_value(leaf.dtype), "device": leaf.device, "sizes": sizes}
    if isinstance(leaf, NumberLeaf):
        dimension = None if leaf.dimension is None else asdict(leaf.dimension)
        return {"number": leaf.name, "type": leaf.type.__name__, "dimension": dimension}
    return {"constant": leaf.name, "value": encode_value(leaf.value)}


def _decode_leaf(stored: Mapping[str, Any]) -> Leaf:
    if "tensor" in stored:
        sizes = tuple(size if isinstance(size, int) else _dimension(size) for size in stored["sizes"])
        return TensorLeaf(stored["tensor"], decode_value(stored["dtype"]), stored["device"], sizes)
    if "number" in stored:
        dimension = None if stored["dimension"] is None else _dimension(stored["dimension"])
        return NumberLeaf(stored["number"], _NUMBERS[stored["type"]], dimension)
    return ConstantLeaf(stored["constant"], decode_value(stored["value"]))


def _dimension(stored: Mapping[str, Any]) -> Dimension:
    linear = None if stored["linear"] is None else tuple(stored["linear"])
    return Dimension(**{**stored, "linear": linear, "symbols": tuple(stored["symbols"])})
