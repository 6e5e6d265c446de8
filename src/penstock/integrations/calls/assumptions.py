"""What a program assumes of the values of a call's tensors: which padding masks hide nothing.

Whether a padding mask is all ones decides between kernels, and models also make masks of other masks or of
pixels. So every question that the library asks while it is exported is answered by an assumption. The tensor
that tells the truth becomes an output of the program, and the part of the graph that computes it is run
before each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.calls.inputs import user_placeholders


class Assumptions:
    """Answers the questions of one export in their order: from `known`, then always with `otherwise`."""

    def __init__(self, known: Sequence[bool], otherwise: bool) -> None:
        self._known, self._otherwise = known, otherwise
        self.answers: list[bool] = []
        self.tensors: list[torch.Tensor] = []

    def all(self, tensor: torch.Tensor) -> bool:
        """Whether all elements of a tensor are true, as it is assumed."""
        position = len(self.answers)
        self.answers.append(self._known[position] if position < len(self._known) else self._otherwise)
        self.tensors.append(tensor.all())
        return self.answers[-1]


class AskedMask:
    """Stands for a padding mask while libraries ask about it; `decisions` answer."""

    def __init__(self, mask: torch.Tensor, decisions: Assumptions) -> None:
        self._mask, self._decisions = mask, decisions
        self.shape, self.device = mask.shape, mask.device

    def all(self) -> bool:
        return self._decisions.all(self._mask)

    def sum(self) -> int:
        """1 where all is assumed true, else 0; libraries compare it with `numel()`."""
        return int(self.all())

    def numel(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> AskedMask:
        return AskedMask(self._mask[index], self._decisions)

    def __invert__(self) -> AskedMask:
        return AskedMask(~self._mask, self._decisions)


def truth_of(exported: ExportedProgram, count: int) -> fx.GraphModule | None:
    """What computes a program's last `count` outputs from its inputs; None where weights are needed."""
    nodes = list(exported.graph_module.graph.nodes)
    wanted = nodes[-1].args[0][len(nodes[-1].args[0]) - count :]
    needed = set(wanted)
    for node in reversed(nodes):
        needed |= set(node.all_input_nodes) if node in needed else set()
    inputs = user_placeholders(exported)
    graph = fx.Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    for node in nodes:
        if node in needed and node not in copies:
            if node.op == "placeholder":
                return None
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in wanted))
    return fx.GraphModule(exported.graph_module, graph)
