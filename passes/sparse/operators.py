"""Reads by units in compiled code: operators that stand there for those that have a contract.

    penstock::by_units.NAME(<the arguments of the operator>, int graph, int read) -> Tensor

A compiler cannot look into them, so that each remains one call, which can have units brought and run in
rounds. `read` numbers a method's reads by units. What a call does is decided by the target of the pass's
probe calls (`CompiledCalls.read_by_units`); without a pool it is the operator itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from penstock.passes.graph.nodes import copy_graph_module
from penstock.passes.probes import STREAMER, CompiledCalls
from penstock.passes.sparse.calls import SparseCall, Units
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import SparseRead, Storage, Trace
from penstock.schedule.sparse import division

_ROWS = "Tensor rows, Tensor weight"

_OVERLOADS = {
    "aten.embedding.default": (
        "embedding",
        "Tensor weight, Tensor indices, SymInt padding_idx, bool scale_grad_by_freq, bool sparse",
    ),
    "aten.index_select.default": ("index_select", "Tensor weight, int dim, Tensor index"),
    "aten.index.Tensor": ("index", "Tensor weight, Tensor?[] indices"),
    "aten._grouped_mm.default": (
        "grouped_mm",
        f"{_ROWS}, Tensor? offs, Tensor? bias, ScalarType? out_dtype",
    ),
    "transformers.grouped_mm_fallback.default": ("grouped_mm_fallback", f"{_ROWS}, Tensor offs"),
    "aten.linear.default": ("linear", f"{_ROWS}, Tensor? bias"),
}
"""For each operator with a contract, the name of its overload, and its arguments without default values."""


def numbered_reads(trace: Trace, storages: Sequence[Storage]) -> list[tuple[str, SparseRead]]:
    """The reads of a modelled trace that compiled code can do by units, in order, with their nodes' names."""
    return [
        (step.name, one)
        for step in trace.steps
        for one in step.sparse
        if storages[one.storage].kind == "streamable" and storages[one.storage].nbytes >= division.LEAST
    ]


def with_operators(
    exported: ExportedProgram, graph: int, reads: Sequence[tuple[str, SparseRead]]
) -> ExportedProgram:
    """Returns a copy of a program in which the nodes of numbered reads call the operators of this module.

    Raises PassError if the reads are not those of the program.
    """
    copied = copy.copy(exported)
    copied._graph_module = copy_graph_module(exported.graph_module)
    nodes = {node.name: node for node in copied.graph.nodes}
    for number, (name, read) in enumerate(reads):
        node = nodes.get(name)
        if node is None or str(node.target) != read.operator:
            raise PassError(f"node {name!r} of the program does not call {read.operator}: annotate it again")
        missing = node.target._schema.arguments[len(node.args) :]
        node.args = (*node.args, *(one.default_value for one in missing), graph, number)
        node.target = getattr(torch.ops.penstock.by_units, _OVERLOADS[read.operator][0])
    copied.graph_module.recompile()
    return copied


def sparse_calls(trace: Trace, steps: Sequence[int], units: Units) -> dict[int, SparseCall]:
    """The reads of compiled code that a pool serves, by number; `steps` are those of all numbered reads."""
    calls: dict[int, SparseCall] = {}
    for number, k in enumerate(steps):
        for read in trace.steps[k].sparse if k >= 0 else ():
            if units.pool.has(read):
                operator = _defined(read.operator)
                calls[number] = SparseCall(operator, read, units, trace.graph, k)
    return calls


def find_operator(name: str) -> torch._ops.OpOverload | None:
    """The operator of a name such as `aten.index.Tensor`; None if nothing in this process has defined it."""
    namespace, _, rest = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), rest.partition(".")[0], None)
    found = getattr(packet, rest.rpartition(".")[2], None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def _defined(name: str) -> torch._ops.OpOverload:
    found = find_operator(name)
    if found is None:
        raise StreamError(f"the program calls {name}, which this process lacks: import what defines it")
    return found


def _kernel(name: str) -> Callable[..., Any]:
    def read_by_units(*arguments: Any) -> Any:
        *given, graph, read = arguments
        calls = STREAMER.get()
        if not isinstance(calls, CompiledCalls):
            raise StreamError("compiled code that reads by units ran outside a streamed module")
        return calls.read_by_units(graph, read, _defined(name), given)

    return read_by_units


def _shapes(name: str) -> Callable[..., Any]:
    def fake(*arguments: Any) -> Any:
        return _defined(name)(*arguments[:-2])

    return fake


def _register() -> Any:
    """Declares the operators once a process, however often this module is imported."""
    if hasattr(torch.ops.penstock, "by_units"):
        return None
    library: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, (overload, arguments) in _OVERLOADS.items():
        library.define(f"by_units.{overload}({arguments}, int graph, int read) -> Tensor")
        library.impl(f"by_units.{overload}", _kernel(name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"penstock::by_units.{overload}", _shapes(name), lib=library)
    return library


# The operators exist only as long as their library, so it is kept alive; a second import must not drop it.
_LIBRARY = _register() or globals().get("_LIBRARY")
