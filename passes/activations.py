"""How much memory a program's intermediate values take, from its graph."""

from __future__ import annotations

from torch import fx
from torch.export import ExportedProgram

from penstock.passes.graphs import size_hint, tensors_of
from penstock.passes.propagation import fake_inputs, propagate, storages_of


def activation_bytes(exported: ExportedProgram) -> int:
    """The most bytes of intermediate values that are alive at once, at the exported sizes.

    Values live from the node that makes them to the last one that reads them through any alias, as in the
    code that a graph module generates. Inputs and weights are not counted, results are. What a kernel takes
    for itself while it runs is not in the graph: leave room for it.
    """
    graph_module = exported.graph_module
    return _peak(propagate(graph_module, fake_inputs(graph_module)))


def _peak(graph_module: fx.GraphModule) -> int:
    nodes = list(graph_module.graph.nodes)
    given = {s for node in nodes if node.op == "placeholder" for s in storages_of(node.meta.get("val"))}
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            last_use |= dict.fromkeys(storages_of(used.meta.get("val")), position)
    peak = held = 0
    alive: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for tensor in tensors_of(node.meta.get("val")):
            storage = int(tensor.untyped_storage()._cdata)
            if storage not in given and storage not in alive:
                alive[storage] = int(size_hint(tensor.untyped_storage().nbytes()))
                held += alive[storage]
        peak = max(peak, held + _body_peak(graph_module, node))
        for storage in [s for s in alive if last_use[s] <= position]:
            held -= alive.pop(storage)
    return peak


def _body_peak(graph_module: fx.GraphModule, node: fx.Node) -> int:
    """The peak of the largest body that a node of control flow runs."""
    bodies = [getattr(graph_module, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    return max((_peak(body) for body in bodies if isinstance(body, fx.GraphModule)), default=0)
