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
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.graph.nodes import copy_graph_module, placeholders_of, subgraphs_of
from penstock.passes.probes import STREAMER, CompiledCalls
from penstock.passes.sparse.by_expert import BY_EXPERT, FIRST
from penstock.passes.sparse.calls import SparseCall, Units
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import SparseRead, Storage, Trace
from penstock.schedule.sparse import pool

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
    str(BY_EXPERT): (
        "by_expert",
        f"{_ROWS}, Tensor ends, Tensor[] others, int sliced, str body, int width, int stride",
    ),
}
"""For each operator with a contract, the name of its overload, and its arguments without default values.

The body of `by_expert` is one of the method's, by its name there; its result has rows of `width` elements,
`stride` elements apart.
"""


def numbered_reads(trace: Trace, storages: Sequence[Storage]) -> list[tuple[str, SparseRead]]:
    """The reads of a modelled trace that compiled code can do by units, in order, with their nodes' names."""
    return [
        (step.name, read)
        for step in trace.steps
        for read in step.sparse
        if storages[read.storage].kind == "streamable" and storages[read.storage].nbytes >= pool.LEAST
    ]


def with_operators(
    exported: ExportedProgram, graph: int, reads: Sequence[tuple[str, SparseRead]]
) -> ExportedProgram:
    """Returns a copy of a program in which the nodes of numbered reads call the operators of this module.

    Other experts that are computed one at a time are computed all at once, as the model does. Raises
    PassError if the reads are not those of the program.
    """
    copied = copy.copy(exported)
    copied._graph_module = copy_graph_module(exported.graph_module)
    nodes = {node.name: node for node in copied.graph.nodes}
    for number, (name, read) in enumerate(reads):
        node = nodes.get(name)
        called = str(BY_EXPERT) if read.computed else read.operator
        if node is None or str(node.target) != called:
            raise PassError(f"node {name!r} of the program does not call {called}: annotate it again")
        node.args = (*(_by_expert(node) if read.computed else _with_defaults(node)), graph, number)
        node.target = getattr(torch.ops.penstock.by_units, _OVERLOADS[called][0])
    for node in nodes.values():
        if node.target is BY_EXPERT:
            _compute_whole(node)
    copied.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    copied.graph_module.recompile()
    return copied


def _with_defaults(node: fx.Node) -> tuple[Any, ...]:
    missing = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
    return (*node.args, *(argument.default_value for argument in missing))


def _by_expert(node: fx.Node) -> tuple[Any, ...]:
    """What `by_units.by_expert` is given in the place of a node, but for the numbers."""
    body, sliced, rows, weight, ends, *operands = node.args
    value = node.meta["val"]
    return rows, weight, ends, operands, sliced, str(body.target), value.shape[1], value.stride(0)  # type: ignore[union-attr]


def _compute_whole(node: fx.Node) -> None:
    """Puts the body of a node that computes experts one at a time in the node's place."""
    (body,) = subgraphs_of(node)
    inputs = dict(zip(placeholders_of(body.graph), node.args[FIRST:], strict=True))
    with node.graph.inserting_before(node):
        result = node.graph.graph_copy(body.graph, inputs)  # type: ignore[arg-type]
    node.replace_all_uses_with(result)  # type: ignore[arg-type]
    node.graph.erase_node(node)


def sparse_calls(trace: Trace, steps: Sequence[int], units: Units) -> dict[int, SparseCall]:
    """The reads of compiled code that a pool serves, by number; `steps` are those of all numbered reads."""
    calls: dict[int, SparseCall] = {}
    for number, k in enumerate(steps):
        for read in trace.steps[k].sparse if k >= 0 else ():
            if units.pool.has(read):
                operator = BY_EXPERT if read.computed else _defined(read.operator)
                calls[number] = SparseCall(operator, read, units, trace.graph, k)
    return calls


def find_operator(name: str) -> torch._ops.OpOverload | None:
    """The operator of a name such as `aten.index.Tensor`; None if nothing in this process has defined it."""
    namespace, _, qualified = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), qualified.partition(".")[0], None)
    overload = getattr(packet, qualified.rpartition(".")[2], None)
    return overload if isinstance(overload, torch._ops.OpOverload) else None


def _defined(name: str) -> torch._ops.OpOverload:
    operator = find_operator(name)
    if operator is None:
        raise StreamError(f"the program calls {name}, which this process lacks: import what defines it")
    return operator


def _run_by_expert(*arguments: Any) -> Any:
    rows, weight, ends, operands, sliced, body, _, _, graph, read = arguments
    calls = _calls()
    return calls.read_by_units(
        graph, read, BY_EXPERT, (calls.body(body), sliced, rows, weight, ends, *operands)
    )


def _rows_of_experts(*arguments: Any) -> Any:
    rows, width, stride = arguments[0], *arguments[6:8]
    return rows.new_empty_strided((rows.shape[0], width), (stride, 1))


def _calls() -> CompiledCalls:
    calls = STREAMER.get()
    if not isinstance(calls, CompiledCalls):
        raise StreamError("compiled code that reads by units ran outside a streamed module")
    return calls


def _kernel(name: str) -> Callable[..., Any]:
    def read_by_units(*arguments: Any) -> Any:
        *inputs, graph, read = arguments
        return _calls().read_by_units(graph, read, _defined(name), inputs)

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
        is_by_expert = name == str(BY_EXPERT)
        kernel, shapes = (
            (_run_by_expert, _rows_of_experts) if is_by_expert else (_kernel(name), _shapes(name))
        )
        library.impl(f"by_units.{overload}", kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"penstock::by_units.{overload}", shapes, lib=library)
    return library


# The operators exist only as long as their library, so it is kept alive; a second import must not drop it.
_LIBRARY = _register() or globals().get("_LIBRARY")
