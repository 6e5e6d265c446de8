"""The code of a method: its graph, its weights, its call signature, and the memory for its values.

It is stored as JSON, which is read twenty times as fast as an exported program, and which cannot run code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.passes.activations import Activations
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
from penstock.passes.graph.nodes import copy_graph_module
from penstock.schedule.facts.errors import PassError

VERSION = 3


@dataclass(frozen=True)
class MethodGraph:
    """A graph that no module owns yet, and the bodies of its control flow by the graph's names for them."""

    graph: fx.Graph
    bodies: Bodies


@dataclass(frozen=True)
class MethodCode:
    """A method to which weights can be bound.

    `graph()` makes a new graph, which the caller may change. `weights` are its first placeholders, each with
    the FQN of its weight. `activations()` is the memory that intermediate values take.
    """

    graph: Callable[[], MethodGraph]
    signature: CallSignature
    weights: tuple[tuple[str, str], ...]
    activations: Callable[[], Activations]


def method_code(exported: ExportedProgram, held: Collection[int] = ()) -> MethodCode:
    """The code of a program, whose weights may be on the meta device.

    Another method made the leaves `held` of a call for it.
    """
    specs = exported.graph_signature.input_specs
    weights = [(spec.arg.name, str(spec.target)) for spec in specs if spec.kind is not InputKind.USER_INPUT]
    return MethodCode(
        partial(_copied, exported.graph_module),
        signature_of(exported),
        tuple(weights),
        partial(Activations.of, exported, held=held),
    )


def _copied(graph_module: fx.GraphModule) -> MethodGraph:
    children = [(n, child) for n, child in graph_module.named_children() if isinstance(child, fx.GraphModule)]
    bodies = {name: copy_graph_module(child) for name, child in children}
    return MethodGraph(copy.deepcopy(graph_module.graph), bodies)


def _decoded(stored: Mapping[str, Any]) -> MethodGraph:
    return MethodGraph(*decode_graph(stored))


def encode_method(exported: ExportedProgram, activations: Activations) -> bytes | None:
    """The code of a program as JSON; None if a value, an operator or a class in it has no form in JSON."""
    code = method_code(exported)
    held = [activations.held] if activations.held != (0, ()) else []
    try:
        stored = {
            "version": VERSION,
            "graph": encode_graph(exported.graph_module),
            "weights": [list(pair) for pair in code.weights],
            "signature": encode_signature(code.signature),
            "outputs": list(output_names(code.signature)),
            "activations": encode_value([activations.sizes, activations.moments, *held]),
        }
    except (PassError, NotImplementedError):
        return None
    return json.dumps(stored, separators=(",", ":"), allow_nan=False).encode()


def decode_method(data: bytes) -> MethodCode:
    """The code that `encode_method` stored.

    Raises NotImplementedError for a class in its trees that nothing has registered in this process. Raises
    PassError for an operator that is not registered, and for JSON of another version of penstock.
    """
    stored = json.loads(data)
    if stored["version"] != VERSION:
        raise PassError(f"expected JSON of version {VERSION}, got {stored['version']}: compile again")
    check_operators(stored["graph"])
    return MethodCode(
        partial(_decoded, stored["graph"]),
        decode_signature(stored["signature"]),
        tuple((name, fqn) for name, fqn in stored["weights"]),
        partial(_activations, stored["activations"]),
    )


def _activations(stored: Any) -> Activations:
    return Activations(*decode_value(stored))
