"""Mends what AOTInductor gets wrong of buffers that a program writes, which are no inputs of its graph.

- A copy of what a buffer held before (`clone`) is removed, and where it is a result, the buffer is returned
  with what has been written since. `OldValues` copies such results anew, when nothing removes copies any
  more.
- A buffer of few elements is computed with when the program is compiled, as if nobody wrote it: the program
  counts to 1 in each call. `options_for` turns off what does that.
- With that off, tensors that a forward writes down stay tensors too, and have names of torch's own.
  `NamedLiterals` gives them the names that they have in the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export import ExportedProgram
from torch.fx.graph_module import _assign_attr

from penstock.passes.graph.propagation import storages_of
from penstock.passes.lowering.post_grad import with_weights_as_inputs
from penstock.passes.weights.lifted import Weights
from penstock.passes.weights.usage import follow_weights
from penstock.schedule.payload.codec import Payload

aten = torch.ops.aten

INLINED = 8
"""The most elements of a tensor that the compiler may copy into the code."""


def options_for(payload: Payload) -> Mapping[str, Any]:
    """Options of Inductor for programs of which a method writes a buffer that a compiler would inline."""
    written = any(
        payload.storages[part.storage].kind == "mutable" and prod(part.shape) <= INLINED
        for weight in payload.tensors
        for part in weight.parts
    )
    return {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False} if written else {}


class NamedLiterals(CustomGraphPass):
    """Gives each constant of a program that torch has named anew its name again, which its memory tells."""

    def __init__(self, exported: ExportedProgram) -> None:
        literals = exported.graph_signature.inputs_to_lifted_tensor_constants.values()
        values = {name: exported.constants[name] for name in literals}
        self._names = {value.data_ptr(): name for name, value in values.items() if value.numel()}

    def __call__(self, graph: fx.Graph) -> None:
        module: Any = graph.owning_module
        for node in graph.nodes:
            value = getattr(module, node.target, None) if node.op == "get_attr" else None
            if isinstance(value, torch.Tensor) and (name := self._names.get(value.data_ptr())) is not None:
                _assign_attr(value, module, name)
                node.target = name

    def uuid(self) -> bytes:
        """Returns what tells this pass from others, for Inductor's cache."""
        return f"penstock: names of literals {sorted(self._names.values())}".encode()


class OldValues(CustomGraphPass):
    """Copies each result that shares the memory of a buffer which the graph writes."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __call__(self, graph: fx.Graph) -> None:
        nodes = (node for node in graph.nodes if node.op == "get_attr")
        buffers = {node: str(node.target) for node in nodes if node.target in self._weights.held}
        writes = [node for node in graph.nodes if node.target is aten.copy_.default]
        if not writes:
            return
        propagated, flow = follow_weights(*with_weights_as_inputs(graph, buffers, self._weights))
        values = {node.name: node.meta.get("val") for node in propagated.graph.nodes}
        written = {
            memory
            for node, name in buffers.items()
            if self._weights.storage_of(name) in flow.written
            for memory in storages_of(values[node.name])
        }
        output = graph.output_node()
        copies: dict[fx.Node, fx.Node] = {}
        for node in output.all_input_nodes:
            if not written.isdisjoint(storages_of(values[node.name])):
                with graph.inserting_before(writes[0]):
                    copies[node] = graph.call_function(aten.clone.default, (node,))
                copies[node].meta = {**node.meta, "val": node.meta["val"].clone()}
        output.args = fx.map_arg(output.args, lambda node: copies.get(node, node))

    def uuid(self) -> bytes:
        """Returns what tells this pass from others, for Inductor's cache."""
        return b"penstock: copies of old values"
