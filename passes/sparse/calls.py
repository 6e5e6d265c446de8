"""A node that reads by units, as it runs: eager or compiled, in rounds where not all its units fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.graph.nodes import copy_program, placeholders_of, subgraphs_of
from penstock.passes.probes import STREAMER, CompiledCalls
from penstock.passes.sparse.contracts import BY_EXPERT, CONTRACTS, FIRST, Arguments, Contract, contract_of
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.facts.model import Pool, SparseRead, Storage, Trace
from penstock.schedule.sparse import pool

Operator = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Rounds:
    """The units of each round, ascending throughout, and how to have them in memory."""

    parts: Sequence[Sequence[int]]
    hold: Callable[[Sequence[int]], AbstractContextManager[None]]
    slices: int = 1


def run_in_rounds(
    contract: Contract, operator: Operator, arguments: Arguments, rounds: Rounds
) -> torch.Tensor:
    """Runs an operator once for each round, while the units of the round are held."""
    if contract.index is None:
        return _by_tiles(operator, arguments, rounds)
    run = _by_ends if contract.ends else _by_numbers
    return run(contract, operator, arguments, rounds)


def _by_tiles(operator: Operator, arguments: Arguments, rounds: Rounds) -> torch.Tensor:
    rows, weight, *biases = arguments
    result = None
    for part in rounds.parts:
        own_rows = slice(part[0] * rounds.slices, (part[-1] + 1) * rounds.slices)
        with rounds.hold(part):
            computed = operator(rows, weight[own_rows], *(None if b is None else b[own_rows] for b in biases))
        if result is None:
            result = computed.new_empty((*computed.shape[:-1], weight.shape[0]))
        result[..., own_rows] = computed
        del computed  # before the next round takes memory
    assert result is not None, "there are two rounds or more"
    return result


def _by_ends(contract: Contract, operator: Operator, arguments: Arguments, rounds: Rounds) -> torch.Tensor:
    weight, ends = contract.operands(arguments)
    rows, result = arguments[contract.rows], None
    at, parts = ends.tolist(), rounds.parts
    if [*at, rows.shape[0]] != sorted([0, *at, rows.shape[0]])[1:]:
        raise StreamError(
            f"the ends of the experts' rows do not ascend from 0 to {rows.shape[0]}: {at[:8]}; such a call "
            "cannot run in rounds: give a budget that holds all experts that a call asks for"
        )
    for k, part in enumerate(parts):
        first = part[0] if k else 0
        stop = part[-1] + 1 if k + 1 < len(parts) else weight.shape[0]
        start = at[first - 1] if first else 0
        end = at[stop - 1] if k + 1 < len(parts) else rows.shape[0]
        narrowed = contract.narrowed(arguments, slice(first, stop), slice(start, end))
        with rounds.hold(part):
            computed = operator(*narrowed)
        if result is None:  # rows may be longer in memory than they are wide
            shape = (rows.shape[0], computed.shape[1])
            result = computed.new_empty_strided(shape, computed.stride())
        result[start:end] = computed
        del computed  # before the next round takes memory
    assert result is not None, "there are two rounds or more"
    return result


def _by_numbers(contract: Contract, operator: Operator, arguments: Arguments, rounds: Rounds) -> torch.Tensor:
    weight, index = contract.operands(arguments)
    flat = index.reshape(-1)
    numbers = torch.where(flat < 0, flat + weight.shape[0], flat) if contract.wraps else flat
    beyond = flat[(numbers < 0) | (numbers >= weight.shape[0])]
    if beyond.numel():
        operator(*contract.replaced(arguments, weight, beyond))  # which refuses them
    result: torch.Tensor = weight.new_empty((flat.numel(), *weight.shape[1:]))
    for part in rounds.parts:
        first, stop = part[0] * rounds.slices, (part[-1] + 1) * rounds.slices
        places = torch.nonzero((numbers >= first) & (numbers < stop)).reshape(-1)
        with rounds.hold(part):
            result[places] = operator(*contract.replaced(arguments, weight, flat[places]))
    return result.reshape(*index.shape, *weight.shape[1:])


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
    """Replace nodes that read from a pool by `SparseCall`s. Raises PassError for another graph's trace."""
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


_ROWS = "Tensor rows, Tensor weight"

_OVERLOADS = {
    "aten.embedding.default": (
        "embedding",
        "Tensor weight, Tensor indices, SymInt padding_idx, bool scale_grad_by_freq, bool sparse",
    ),
    "aten.index_select.default": ("index_select", "Tensor weight, int dim, Tensor index"),
    "aten.index.Tensor": ("index", "Tensor weight, Tensor?[] indices"),
    "aten._grouped_mm.default": ("grouped_mm", f"{_ROWS}, Tensor? offs, Tensor? bias, ScalarType? out_dtype"),
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
    copied = copy_program(exported)
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
