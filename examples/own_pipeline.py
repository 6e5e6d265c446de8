"""Runs penstock's passes in a compiler pipeline of your own, without writing to the disk.

    python examples/own_pipeline.py

A partitioner annotates the program that it was handed, lets its own passes run, marks the reads of weights in
the graph, and carries the facts as bytes in its own container. A streamer of its own is then called at every
read. Passes declare what they require and ensure, and the pipeline orders them accordingly.
"""

from __future__ import annotations

import copy
import operator

import torch
from torch import fx, nn

import penstock


@penstock.declare(ensures=("no additions of zero",))
def fold_additions_of_zero(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A pass of the pipeline's own, which takes a program and returns a changed copy of it."""
    graph_module = copy.deepcopy(graph_module)
    for node in list(graph_module.graph.nodes):
        if node.target in (operator.add, torch.ops.aten.add.Tensor) and node.args[1] == 0:
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


class Listener:
    """A streamer for weights that are all in memory, which only records its calls."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def acquire(self, graph: int, step: int) -> None:
        self.steps.append(step)

    def release(self, graph: int, step: int) -> None:
        pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + 0)


def main() -> None:
    model, x = Model().eval(), torch.randn(2, 64)
    exported = torch.export.export(model, (x,))
    payload = penstock.annotate(exported)
    for number, step in enumerate(payload.traces[0].steps):
        print(f"step {number}: {step.name} reads {[payload.storage_names()[s] for s in step.reads]}")

    @penstock.declare(requires=("no additions of zero",), ensures=("probes",))
    def mark_reads(graph_module: fx.GraphModule) -> fx.GraphModule:
        return penstock.insert_probes(graph_module, payload)

    pipeline = penstock.Pipeline((mark_reads, fold_additions_of_zero))
    print(f"passes run in the order {[one.__name__ for one in pipeline.passes]}")
    lowered = pipeline(exported.graph_module)
    carried = payload.to_bytes()
    assert penstock.Payload.from_bytes(carried) == payload
    print(f"{len(carried):,} bytes of facts travel with the program")

    listener = Listener()
    with torch.no_grad(), penstock.streaming(listener):
        (output,) = lowered(*exported.state_dict.values(), x)
    assert torch.equal(output, model(x))
    assert listener.steps == list(range(len(payload.traces[0].steps)))
    print(f"the program asked for its weights in the order {listener.steps}")


if __name__ == "__main__":
    main()
