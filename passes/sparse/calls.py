"""A node that reads by units, as it runs: it has the units that its index names brought, and is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import fx

from penstock.passes.sparse.by_expert import BY_EXPERT
from penstock.passes.sparse.contracts import CONTRACTS, contract_of
from penstock.passes.sparse.rounds import Rounds, run_in_rounds
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import Pool, SparseRead, Trace


class Units(Protocol):
    """The memory that units come and go in."""

    pool: Pool

    def tensor(self, read: SparseRead) -> torch.Tensor:
        """Returns the tensor of a read, of which only the units have content that `hold` holds."""

    def ask(self, graph: int, step: int, units: Sequence[int]) -> list[list[int]]:
        """Note all units that a step's read asks for, ascending, and cut them into parts that fit."""

    def hold(
        self, graph: int, step: int, units: Sequence[int], *, alone: bool
    ) -> AbstractContextManager[None]:
        """Have the units of one part in memory; `alone` tells that there is no other part."""

    def certify(self, read: SparseRead, parts: Sequence[Sequence[int]], arguments: Sequence[Any]) -> None:
        """Return if a product in these parts has the bits of the whole. Raises StreamError if it has not."""


class SparseCall(torch.nn.Module):
    """Calls the operator of one step, on a tensor of which only the units that the call names are in memory.

    Where they do not fit together, the operator runs in parts.
    """

    def __init__(
        self, operator: Callable[..., Any], read: SparseRead, units: Units, graph: int, step: int
    ) -> None:
        super().__init__()
        self._operator, self._read, self._units = operator, read, units
        self._graph, self._step = graph, step
        self._contract = contract_of(read)
        tensor = units.tensor(read)
        self._tensor = tensor.flatten(0, 1) if read.slices > 1 else tensor

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Take the arguments of the operator, with a weight whose memory is never touched."""
        weight, index = self._contract.operands(arguments)
        tensor = self._tensor
        if (weight.dtype, weight.shape, weight.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
            raise StreamError(
                f"step {self._step} of graph {self._graph} reads a tensor of {tuple(weight.shape)}, and "
                f"its payload says {self._read.view.shape}: payload and program are not of one compilation"
            )
        stand_in = self._tensor.detach().requires_grad_() if weight.requires_grad else self._tensor
        replaced = self._contract.replaced(arguments, stand_in, index)
        graph, step, read = self._graph, self._step, self._read
        parts = self._units.ask(graph, step, self._contract.units(index, read.count, read.slices))
        try:
            if len(parts) < 2:
                with self._units.hold(graph, step, parts[0] if parts else (), alone=True):
                    return self._operator(*replaced, **options)

            def hold(part: Sequence[int]) -> AbstractContextManager[None]:
                return self._units.hold(graph, step, part, alone=False)

            if index is None:
                self._units.certify(read, parts, replaced)
            return run_in_rounds(self._contract, self._operator, replaced, Rounds(parts, hold, read.slices))
        finally:
            if not self._tensor.is_inference():
                torch.autograd.graph.increment_version(self._tensor)


def call_by_units(graph: fx.Graph, bodies: dict[str, Any], trace: Trace, units: Units) -> None:
    """Puts a `SparseCall` in the place of each node of a trace that reads from a pool, in place.

    Raises PassError if the trace is not that of the graph.
    """
    nodes = {node.name: node for node in graph.nodes}
    for k, step in enumerate(trace.steps):
        for read in step.sparse:
            node = nodes.get(step.name)
            if not units.pool.has(read):
                continue
            called = str(BY_EXPERT) if read.computed else read.operator
            if node is None or str(node.target) != called or called not in CONTRACTS:
                raise PassError(
                    f"step {k} ({step.name}) of method {trace.method!r} does not call {called}: "
                    "payload and program are not of one compilation, compile again"
                )
            bodies[name := f"sparse_{k}"] = SparseCall(node.target, read, units, trace.graph, k)
            node.op, node.target = "call_module", name
