"""Checks of a lowered graph before it runs: it reads weights between their probes, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.passes.graph.nodes import copy_graph_module, placeholders_of, size_hint, use_aten_operators
from penstock.passes.graph.propagation import storages_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.probes import ACQUIRE, RELEASE
from penstock.passes.weights.lifted import tensor_in
from penstock.passes.weights.usage import is_view
from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import Input, Method, Trace, Weight
from penstock.schedule.payload.codec import Payload

_UNKNOWN = object()
"""The value of a node that cannot be run on fake tensors, because it calls compiled code or needs data."""


def check_probes(
    graph_module: fx.GraphModule, payload: Payload, trace: Trace, weights: Mapping[str, Weight]
) -> None:
    """Raises PayloadError unless the probes of the graph are those of the trace, around the same weights.

    `held` has the weights by the names of the graph's inputs.
    """
    probed = {
        int(node.args[2]): {weights[operand.name].parts[0].storage for operand in node.args[0]}
        for node in graph_module.graph.nodes
        if node.target is ACQUIRE
    }
    names = payload.storage_names()
    for k, step in enumerate(trace.steps):
        if not probed.get(k, set()).issuperset(step.reads):
            raise PayloadError(
                f"step {k} of method {trace.method!r} reads {', '.join(names[s] for s in step.reads)}, and "
                f"the graph holds {', '.join(names[s] for s in probed.get(k, ())) or 'nothing'} there: lower "
                "the graph, and load the payload that was written after that"
            )


def check_reads(
    graph_module: fx.GraphModule, payload: Payload, trace: Trace, weights: Mapping[str, Weight]
) -> None:
    """Raises PayloadError for a node that reads a streamed weight, or a view of it, outside of its probes.

    Compiled code counts as reading all weights and views that it is given. What it returns is not followed.
    """
    method = next(known for known in payload.methods if known.name == trace.method)
    followed, aliases = _followed(graph_module, payload, method, weights)
    streamed = {
        s for s, storage in enumerate(payload.storages) if storage.kind == "streamable" and storage.nbytes
    }
    there: dict[int, set[int]] = {}
    for node in followed.graph.nodes:
        if node.target in (ACQUIRE, RELEASE):
            step = int(node.args[2])
            read = step < len(trace.steps) and node.target is ACQUIRE
            there[step] = set(trace.steps[step].reads) if read else set()
        elif node.op == "output" or not is_view(node):
            values = [operand.meta["val"] for operand in node.all_input_nodes]
            reads = {aliases[name] for name in storages_of(values) if name in aliases} & streamed
            late = reads.difference(*there.values())
            if late:
                raise PayloadError(
                    f"node {node.name!r} of method {trace.method!r} reads the weight "
                    f"{payload.storage_names()[min(late)]!r} outside of its acquire and release, where the "
                    "weight may have left: a pass has added or moved it, so lower the graph again, and load "
                    "the payload that was written after that"
                )


@kept_torch_state()
def _followed(
    graph_module: fx.GraphModule, payload: Payload, method: Method, weights: Mapping[str, Weight]
) -> tuple[fx.GraphModule, dict[int, int]]:
    """Returns a copy of the graph that was run on fake values, and the storages of weights by fake ones."""
    copied = copy_graph_module(graph_module)
    use_aten_operators(copied)
    described = iter(method.inputs)
    bases: dict[int, torch.Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs: list[Any] = []
        for node in placeholders_of(copied.graph):
            if weight := weights.get(node.name):
                s = weight.parts[0].storage
                if s not in bases:
                    nbytes = payload.storages[s].nbytes
                    bases[s] = torch.empty(nbytes, dtype=torch.uint8, device=weight.device)
                inputs.append(tensor_in(bases[s], weight.parts[0]))
            else:
                inputs.append(_example(node.meta.get("val"), next(described, None), method))
        _Following(copied).run(*inputs)
    return copied, {storages_of(base)[0]: s for s, base in bases.items()}


class _Following(fx.Interpreter):
    """Notes the value of each node in its `meta["val"]`; those that cannot be known are `_UNKNOWN`."""

    def run_node(self, n: fx.Node) -> Any:
        known = not any(self.env[operand] is _UNKNOWN for operand in n.all_input_nodes)
        if n.op == "call_module":
            known = known and isinstance(self.module.get_submodule(str(n.target)), fx.GraphModule)
        n.meta["val"] = _UNKNOWN
        if n.op == "output":
            return None
        if known and n.target not in (ACQUIRE, RELEASE):
            try:
                n.meta["val"] = super().run_node(n)
            except Exception:  # what an operator raises on values that it has to see is up to the operator
                return _UNKNOWN
        return n.meta["val"]


def _example(recorded: object, described: Input | None, method: Method) -> object:
    """A fake value of the sizes that an input was exported with, as its node or the payload has them."""
    if isinstance(recorded, torch.Tensor):
        shape = [size_hint(size) for size in recorded.shape]
        return torch.empty(shape, dtype=recorded.dtype, device=recorded.device)
    if isinstance(recorded, torch.SymInt):
        return size_hint(recorded)
    if isinstance(recorded, int | float | str):
        return recorded
    dtype = getattr(torch, described.dtype, None) if described else None
    if recorded is not None or described is None or not isinstance(dtype, torch.dtype):
        return _UNKNOWN
    examples = {symbol.name: symbol.example for symbol in method.symbols}
    shape = [size if isinstance(size, int) else examples[size] for size in described.shape]
    return torch.empty(shape, dtype=dtype, device=described.device)
