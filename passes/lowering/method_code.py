"""The code of a method: its graph, its weights, its call signature, and the memory for its values.

It is stored as JSON, which is read twenty times as fast as an exported program, and which is data: whatever
it says, nothing runs but the operators that `calls/operators.py` lists.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.passes.activations import Activations
from penstock.passes.calls.inputs import checked, refuse, user_placeholders
from penstock.passes.calls.signature import (
    CallSignature,
    decode_signature,
    encode_signature,
    output_names,
    signature_of,
)
from penstock.passes.calls.stored_graph import (
    Bodies,
    check_operators,
    decode_graph,
    decode_value,
    encode_graph,
    encode_value,
)
from penstock.passes.graph.nodes import copy_graph_module, dtype_name, placeholders_of, size_hint
from penstock.schedule.facts.errors import PassError
from penstock.schedule.payload.text import short

VERSION = 5
"""The version that is written, and the only one that is read."""

Like = tuple[str, tuple[int, ...], tuple[int, ...]]
"""The dtype, shape and strides of a tensor."""


@dataclass(frozen=True)
class MethodGraph:
    """A graph that no module owns yet, and the bodies of its control flow by the graph's names for them."""

    graph: fx.Graph
    bodies: Bodies


@dataclass(frozen=True)
class MethodCode:
    """A method to which weights can be bound.

    `graph()` makes a new graph, which the caller may change. `weights` are its first placeholders, each with
    the FQN of its weight. `activations()` is the memory that intermediate values take. `like` says what each
    weight is like, None where that is not known. `strides` are those of the leaves of a call at export, by
    number, where a leaf was not contiguous. The weights in `with_grad`, given by FQN, require grad when the
    program runs, which must be under `torch.no_grad`, as the exported program's do: torch chooses the kernels
    of matrix products by that, and they differ in the last bits.
    """

    graph: Callable[[], MethodGraph]
    signature: CallSignature
    weights: tuple[tuple[str, str], ...]
    activations: Callable[[], Activations]
    like: tuple[Like, ...] | None = None
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    with_grad: frozenset[str] = frozenset()


def method_code(exported: ExportedProgram, values_kept: Collection[int] = ()) -> MethodCode:
    """The code of a program; another method made the leaves `values_kept` of a call for it."""
    specs = exported.graph_signature.input_specs
    weights = [(spec.arg.name, str(spec.target)) for spec in specs if spec.kind is not InputKind.USER_INPUT]
    values = {**exported.state_dict, **exported.constants}
    return MethodCode(
        partial(_copied, exported.graph_module),
        signature_of(exported),
        tuple(weights),
        partial(Activations.of, exported, held=values_kept),
        strides=_strides(exported),
        with_grad=frozenset(fqn for _, fqn in weights if getattr(values.get(fqn), "requires_grad", False)),
    )


def _strides(exported: ExportedProgram) -> dict[int, tuple[int, ...]]:
    """The example strides of the leaves of a call that are not contiguous, by number."""
    strides = {}
    for number, node in enumerate(user_placeholders(exported)):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape, stride = (tuple(map(size_hint, sizes)) for sizes in (value.shape, value.stride()))
            if stride != torch.empty(shape, device="meta").stride():
                strides[number] = stride
    return strides


def _copied(graph_module: fx.GraphModule) -> MethodGraph:
    children = [(n, child) for n, child in graph_module.named_children() if isinstance(child, fx.GraphModule)]
    bodies = {name: copy_graph_module(child) for name, child in children}
    return MethodGraph(copy.deepcopy(graph_module.graph), bodies)


def _decoded(stored: Mapping[str, Any], trust: bool) -> MethodGraph:
    return MethodGraph(*decode_graph(stored, trust=trust))


def _like(exported: ExportedProgram, count: int) -> list[Like]:
    """What each of the first placeholders is like. Raises PassError for one that has no static size."""
    likes = []
    for node in placeholders_of(exported.graph)[:count]:
        value = node.meta.get("val")
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (None,)
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in sizes):
            raise PassError(f"{node.name} is no tensor of static size: it has no JSON")
        likes.append((dtype_name(value.dtype), tuple(value.shape), tuple(value.stride())))
    return likes


def encode_method(exported: ExportedProgram, activations: Activations) -> bytes | None:
    """The code of a program as JSON; None if a value, an operator or a class in it has no form in JSON."""
    code = method_code(exported)
    kept_values = [activations.held] if activations.held != (0, ()) else []
    try:
        stored = {
            "version": VERSION,
            "graph": encode_graph(exported.graph_module),
            "weights": [
                [*pair, *like, pair[1] in code.with_grad]
                for pair, like in zip(code.weights, _like(exported, len(code.weights)), strict=True)
            ],
            "signature": encode_signature(code.signature),
            "outputs": list(output_names(code.signature)),
            "activations": encode_value([activations.sizes, activations.moments, *kept_values]),
        }
        if code.strides:
            stored["strides"] = [[k, list(stride)] for k, stride in code.strides.items()]
    except PassError:
        return None
    return json.dumps(stored, separators=(",", ":"), allow_nan=False).encode()


def decode_method(data: bytes, *, trust: bool = False) -> MethodCode:
    """The code that `encode_method` stored. With `trust` it may call any operator of this process.

    Raises PassError for JSON that is none or of another version of penstock, for an operator that is not
    registered or not for everybody, and for a class in its trees that nothing has registered in this process.
    """
    try:
        stored = json.loads(data)
    except (ValueError, RecursionError):
        refuse(data[:80], "JSON")
    version = stored.get("version") if isinstance(stored, dict) else None
    if type(version) is not int or version != VERSION:
        raise PassError(f"expected JSON of version {VERSION}, got {short(version)}: compile again")
    if not stored.keys() >= {"graph", "weights", "signature", "activations"}:
        raise PassError("a part of the method is missing: compile again")
    check_operators(stored["graph"], trust=trust)
    weights = _checked_weights(stored["weights"])
    signature = decode_signature(stored["signature"], trust=trust)
    _check_inputs(stored["graph"]["nodes"], [weight[0] for weight in weights], signature)
    return MethodCode(
        partial(_decoded, stored["graph"], trust),
        signature,
        tuple((name, fqn) for name, fqn, *_ in weights),
        partial(decode_activations, stored["activations"]),
        tuple((dtype, tuple(shape), tuple(stride)) for _, _, dtype, shape, stride, _ in weights),
        _checked_strides(stored.get("strides", [])),
        frozenset(fqn for _, fqn, *_, requires_grad in weights if requires_grad),
    )


def _checked_strides(stored: Any) -> dict[int, tuple[int, ...]]:
    for stride in stored if isinstance(stored, list) else [stored]:
        fits = (
            isinstance(stride, list)
            and len(stride) == 2
            and type(stride[0]) is int
            and isinstance(stride[1], list)
        )
        if not fits or any(type(step) is not int for step in stride[1]):
            refuse(stride, "stride of an input")
    return {number: tuple(stride) for number, stride in stored}


def _checked_weights(stored: Any) -> list[Any]:
    fields = (str, str, str, list, list, bool)
    for weight in stored if isinstance(stored, list) else [stored]:
        fits = isinstance(weight, list) and len(weight) == len(fields)
        if not fits or not all(isinstance(*pair) for pair in zip(weight, fields, strict=True)):
            refuse(weight, "weight")
        if any(type(size) is not int for size in (*weight[3], *weight[4])):
            refuse(weight, "weight of static size")
        if weight[5] and not _is_inexact(weight[2]):
            refuse(weight, "weight with gradients")
    return list(stored)


def _is_inexact(name: str) -> bool:
    """Tells whether tensors of a dtype, given by its name, can require grad."""
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)


def _check_inputs(nodes: Sequence[Any], weights: Sequence[str], signature: CallSignature) -> None:
    """Raises PassError unless the graph's inputs are the weights and then the leaves of a call."""
    inputs = [name for op, name, *_ in nodes if op == "placeholder"]
    written = {*signature.to_leaf, *signature.to_weight}
    leaves = range(len(signature.leaves))
    (values,) = nodes[-1][3] or (None,)
    results = values.get("tuple") if isinstance(values, dict) else values
    count = len(results) if isinstance(results, list) else 0
    if inputs[: len(weights)] != list(weights) or len(inputs) != len(weights) + len(leaves):
        raise PassError(
            f"the graph has {len(inputs)} inputs, and the method {len(weights)} weights and "
            f"{len(leaves)} inputs: compile again"
        )
    fits = written <= set(range(count)) and set(signature.to_leaf.values()) <= set(leaves)
    if count != len(written) + signature.results or not fits:
        raise PassError(
            f"the graph has {count} outputs, and the method {signature.results} results and {len(written)} "
            "values that are written back: compile again"
        )


def decode_activations(stored: Any) -> Activations:
    """The activations of a stored method. Raises PassError for JSON that is none."""
    if not isinstance(stored, list) or len(stored) not in (2, 3):
        refuse(stored, "account of activations")
    return checked(Activations(*decode_value(stored)))
