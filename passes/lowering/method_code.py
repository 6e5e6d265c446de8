"""What runs of a method: its graph, the weights that it takes, and how it is called.

It is stored as JSON beside the exported program, from which it can be made again but twenty times slower.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from penstock.passes.calls.signature import CallSignature, decode_signature, encode_signature, signature_of
from penstock.passes.calls.stored_graph import Bodies, check_operators, decode_graph, encode_graph
from penstock.passes.graph.nodes import copy_graph_module
from penstock.schedule.facts.errors import PassError

VERSION = 2


@dataclass(frozen=True)
class MethodGraph:
    """A graph that no module owns yet, and the bodies of its control flow by the names it has for them."""

    graph: fx.Graph
    bodies: Bodies


@dataclass(frozen=True)
class MethodCode:
    """A method that can be given weights.

    `graph()` makes a new graph, which the caller may change. `weights` are the placeholders that come first
    in it, each with its FQN.
    """

    graph: Callable[[], MethodGraph]
    signature: CallSignature
    weights: tuple[tuple[str, str], ...]


def method_code(exported: ExportedProgram) -> MethodCode:
    """What runs of a program, whose weights may be on the meta device."""
    specs = exported.graph_signature.input_specs
    weights = [(spec.arg.name, str(spec.target)) for spec in specs if spec.kind is not InputKind.USER_INPUT]
    return MethodCode(partial(_copied, exported.graph_module), signature_of(exported), tuple(weights))


def _copied(graph_module: fx.GraphModule) -> MethodGraph:
    children = [(n, child) for n, child in graph_module.named_children() if isinstance(child, fx.GraphModule)]
    bodies = {name: copy_graph_module(child) for name, child in children}
    return MethodGraph(copy.deepcopy(graph_module.graph), bodies)


def _decoded(stored: Mapping[str, Any]) -> MethodGraph:
    return MethodGraph(*decode_graph(stored))


def encode_method(exported: ExportedProgram) -> bytes | None:
    """What runs of a program, as JSON; None where it has values, operators or classes that have no JSON."""
    code = method_code(exported)
    try:
        stored = {
            "version": VERSION,
            "graph": encode_graph(exported.graph_module),
            "weights": [list(pair) for pair in code.weights],
            "signature": encode_signature(code.signature),
        }
    except (PassError, NotImplementedError):
        return None
    return json.dumps(stored, separators=(",", ":"), allow_nan=False).encode()


def decode_method(data: bytes) -> MethodCode | None:
    """The method again; None where another version of penstock wrote it.

    Raises NotImplementedError for a class in its trees that nothing has registered here, PassError for
    an operator that does not exist here.
    """
    stored = json.loads(data)
    if stored["version"] != VERSION:
        return None
    check_operators(stored["graph"])
    weights = tuple((name, fqn) for name, fqn in stored["weights"])
    return MethodCode(partial(_decoded, stored["graph"]), decode_signature(stored["signature"]), weights)
