"""The operators that read of a weight only the slices that an operand names, and how each is told of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from penstock.passes.graph.nodes import dtype_name, placeholders_of, size_hint
from penstock.passes.graph.propagation import propagate, storages_of
from penstock.passes.weights.lifted import Weights
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import ITEM_SIZES, Computed, Part, SparseRead, Storage, Trace

FIRST = 2
"""The number of the operator's argument that is the first input of its body."""


class ByExpert(HigherOrderOperator):
    """Runs a body once for each expert that has rows, and puts the results together.

    The body takes `rows`, `weight`, `ends` and `others`, computes a stack from `weight`, and multiplies each
    run of rows, which ends at `ends[k]`, with slice k of that stack. The first `sliced` of the others have a
    slice for each of the weight's. For an expert the body is given its rows, and single slices.

    Devices other than a CPU, whose products have not been tried on single experts, run the body once, on all.
    """

    is_once_each = True
    """The body runs for each row that a call asks for, but for one product of all rows."""

    def __init__(self) -> None:
        super().__init__("penstock_by_expert")  # type: ignore[no-untyped-call]

    def __call__(
        self,
        body: fx.GraphModule,
        sliced: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        *operands: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(rows, FakeTensor) or rows.device.type != "cpu":
            whole: torch.Tensor = body.forward(rows, weight, ends, *operands)
            return whole
        at = [0, *ends.tolist()]
        if at != sorted(at) or at[-1] > rows.shape[0]:
            raise StreamError(
                f"the ends of the experts' rows do not ascend from 0 to {rows.shape[0]}: {at[1:9]}; experts "
                "that are computed one after another need the runs of their rows in order"
            )

        def run(k: int, own_rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            expert, shared = slice(k, k + 1), operands[sliced:]
            end = torch.full_like(ends[expert], own_rows.shape[0])
            computed: torch.Tensor = body.forward(
                own_rows, of, end, *(x[expert] for x in operands[:sliced]), *shared
            )
            return computed

        result: torch.Tensor | None = None
        for k, (start, end) in enumerate(pairwise(at)):
            if start < end:
                product = run(k, rows[start:end], weight[k : k + 1])
                if result is None:
                    result = _like(product, rows.shape[0])
                result[start:end] = product
                del product  # before the next expert takes memory
        if result is None:  # no expert has rows, and of none a byte may be read
            nothing = weight.new_zeros(()).expand_as(weight[:1])
            result = _like(run(0, rows[:0], nothing), rows.shape[0])
        result[at[-1] :] = 0
        return result


def _like(product: torch.Tensor, count: int) -> torch.Tensor:
    """Memory for `count` rows, which may be longer there than they are wide, as those that were made."""
    return product.new_empty_strided((count, product.shape[1]), product.stride())


def _register() -> None:
    """Declares the operator once a process, however often this module is imported."""
    if not hasattr(torch.ops.higher_order, "penstock_by_expert"):
        ByExpert()


_register()

BY_EXPERT = torch.ops.higher_order.penstock_by_expert


LINEAR = "aten.linear.default"

LEAST = 64 << 20
"""Bytes. Smaller weights are read whole."""

MOST_RESULT = 16 << 20
"""Bytes. Larger results are not computed by tiles: certifying them would take memory that nobody planned."""

_LARGEST, _TIED, _FEWEST = 1 << 20, 128 << 10, 16
"""Bytes of a tile at most, of one in which rows are read too, and its fewest rows."""


def linears(graph: fx.Graph) -> Iterator[fx.Node]:
    """The products of a propagated graph that are computed by a weight's rows."""
    for node in graph.nodes:
        called = node.op == "call_function" and str(node.target) == LINEAR
        if called and len(node.args) > 1 and not node.kwargs:
            weight = node.args[1]
            value = weight.meta.get("val") if isinstance(weight, fx.Node) else None
            if isinstance(value, torch.Tensor) and value.dim() == 2 and len(storages_of(value)) == 1:
                yield node


def tiled(view: Part) -> Part | None:
    """The tiles of a matrix as slices of a view of three dimensions; None where it has none."""
    if len(view.shape) != 2 or view.stride != (view.shape[1], 1):
        return None
    return _grouped(view, _LARGEST)


def _grouped(view: Part, most: int) -> Part | None:
    """A matrix as runs of rows of at most `most` bytes; None where its rows do not divide into such."""
    (rows, columns), item_bytes = view.shape, ITEM_SIZES[view.dtype]
    size = rows & -rows  # the largest power of two that divides them
    while size > _FEWEST and size * columns * item_bytes > most:
        size //= 2
    if size < _FEWEST or rows // size < 2:
        return None
    return replace(view, shape=(rows // size, size, columns), stride=(size * columns, columns, 1))


def flat(view: Part) -> Part:
    """The matrix of which a view has runs of rows."""
    count, size, columns = view.shape
    return replace(view, shape=(count * size, columns), stride=(columns, 1))


def with_common_units(traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """The traces, in which a storage that is read both by tiles and by rows has the same units for both."""
    reads = [read for trace in traces for step in trace.steps for read in step.sparse]
    by_tiles = {read.storage: read.view for read in reads if read.operator == LINEAR}
    by_rows = {read.storage for read in reads if read.operator != LINEAR}
    shared: dict[int, Part] = {}
    for s in by_tiles.keys() & by_rows:
        if (view := _grouped(flat(by_tiles[s]), _TIED)) is not None:
            shared[s] = view

    def regrouped(read: SparseRead) -> SparseRead:
        view = shared.get(read.storage)
        if view is None or (flat(read.view) if read.slices > 1 else read.view) != flat(view):
            return read
        count = view.shape[0]
        asked = count if read.tiles else min(read.asked, count)
        return replace(read, view=view, asked=asked, slices=view.shape[1])

    return tuple(
        replace(
            trace,
            steps=tuple(
                replace(step, sparse=tuple(map(regrouped, step.sparse))) if step.sparse else step
                for step in trace.steps
            ),
        )
        for trace in traces
    )


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Contract:
    """How an operator is told which slices of its argument number `weight` on dimension 0 it needs.

    Argument number `index` names them. If `ends`, it is the end of each slice's run among the rows of
    argument 0, which are sorted by slice: slices without a row are not read. Otherwise it holds the slices'
    numbers, of which negative ones count from the end if `wraps`; the result has the sizes of the index, and
    behind them those of a slice. With `listed`, the index is the only entry of a list. Without an index,
    every call needs all slices, of each of which comes a slice of the result on its last dimension: a linear,
    by its rows.

    The rows are argument number `rows`. If there is a number `sliced`, that argument says how many of those
    behind the index have a slice for each of the weight's.

    A unit is a slice, or a run of several slices.
    """

    weight: int
    index: int | None
    ends: bool = False
    wraps: bool = False
    listed: bool = False
    rows: int = 0
    sliced: int | None = None

    def operands(self, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """The weight and the index among the arguments of a call."""
        if self.index is None:
            return arguments[self.weight], None
        index = arguments[self.index]
        return arguments[self.weight], index[0] if self.listed else index

    def replaced(self, arguments: Sequence[Any], weight: Any, index: Any) -> Arguments:
        """The arguments of a call with another weight and index."""
        changed = list(arguments)
        changed[self.weight] = weight
        if self.index is not None:
            changed[self.index] = [index] if self.listed else index
        return tuple(changed)

    def narrowed(self, arguments: Sequence[Any], slices: slice, rows: slice) -> Arguments:
        """The arguments of a call by `ends` with some slices of the weight and their rows."""
        weight, ends = self.operands(arguments)
        changed = list(self.replaced(arguments, weight[slices], ends[slices] - rows.start))
        changed[self.rows] = arguments[self.rows][rows]
        if self.sliced is not None and self.index is not None:
            for k in range(self.index + 1, self.index + 1 + arguments[self.sliced]):
                changed[k] = arguments[k][slices]
        return tuple(changed)

    def units(self, index: torch.Tensor | None, count: int, slices: int = 1) -> list[int]:
        """The numbers of the units that an index names, ascending; what it names beyond `count` is left out.

        The operator itself refuses an index that is out of range, before it reads.
        """
        if index is None:
            return list(range(count))
        flat = index.detach().reshape(-1).to("cpu", torch.int64)
        if self.ends:
            used = torch.diff(flat, prepend=flat.new_zeros(1)) > 0
            named = torch.nonzero(used).reshape(-1)
        else:
            numbers = torch.where(flat < 0, flat + count * slices, flat) if self.wraps else flat
            named = torch.unique(numbers.div(slices, rounding_mode="floor"))
        return [number for number in named.tolist() if 0 <= number < count]

    def asked(self, node: fx.Node, count: int) -> int:
        """The most slices that a call of a propagated node's example sizes names."""
        _, index = self.operands(node.args)
        rows: fx.Node = node.args[self.rows]  # type: ignore[assignment]
        counted = rows.meta["val"].shape[:1] if self.ends else index.meta["val"].shape
        return min(count, math.prod(size_hint(size) for size in counted))


CONTRACTS: dict[str, Contract] = {
    "aten.embedding.default": Contract(weight=0, index=1),
    "aten.index_select.default": Contract(weight=0, index=2),
    "aten.index.Tensor": Contract(weight=0, index=1, wraps=True, listed=True),
    "aten._grouped_mm.default": Contract(weight=1, index=2, ends=True),
    "transformers.grouped_mm_fallback.default": Contract(weight=1, index=2, ends=True),
    str(BY_EXPERT): Contract(weight=3, index=4, ends=True, rows=2, sliced=1),
    LINEAR: Contract(weight=1, index=None),
}
"""The contracts by the operators' names."""


def contract_of(read: SparseRead) -> Contract:
    """The contract of what a program calls for a read: the operator, or what computes its operand as well."""
    return CONTRACTS[str(BY_EXPERT) if read.computed else read.operator]


def computed_like(value: torch.Tensor) -> Computed:
    """The geometry of a tensor of static sizes."""
    return Computed(dtype_name(value.dtype), tuple(value.shape), tuple(value.stride()))


def sparse_reads(
    graph_module: fx.GraphModule, weights: Weights, storages: Sequence[Storage]
) -> dict[str, SparseRead]:
    """Returns the reads by units of a propagated graph, by the names of the nodes.

    A node is among them if its operator has a contract, the weight, or the view that it is given, has slices
    on dimension 0 that do not overlap, and no other argument is of that storage. A storage of which nodes
    read different slices has none.
    """
    inputs = [node for node in placeholders_of(graph_module.graph) if node.name in weights.held]
    node_of = {storages_of(node.meta["val"])[0]: node for node in inputs}
    reads: dict[str, SparseRead] = {}
    routes: dict[tuple[fx.Node, bool], int] = {}
    for node, contract in _candidates(graph_module.graph):
        weight, index = contract.operands(node.args)
        memory = storages_of(weight.meta["val"])[0]
        owner = node_of.get(memory)
        if owner is None or storages[weights.storage_of(owner.name)].kind != "streamable":
            continue
        if _reads_twice(node, memory):
            continue
        view = _view(weight.meta["val"], owner.meta["val"], weights.held[owner.name].parts[0])
        dtypes = _INTEGERS if contract.ends else _INTEGERS[:2]
        if view is not None and index.meta["val"].dtype in dtypes:
            route = routes.setdefault((index, contract.ends), len(routes))
            asked = contract.asked(node, view.shape[0])
            read = SparseRead(view, str(node.target), route, asked)
            if node.target is BY_EXPERT:
                operator, computed = _in_body(node)
                read = replace(read, operator=operator, computed=computed)
            if _has_units(read, storages[read.storage]):
                reads[node.name] = read
    reads |= _by_tiles(graph_module.graph, node_of, weights, storages, len(routes))
    views: dict[int, set[object]] = {}
    for read in reads.values():
        rows = replace(read, view=flat(read.view)) if read.slices > 1 else read
        views.setdefault(read.storage, set()).add(rows.units)
    return {name: read for name, read in reads.items() if len(views[read.storage]) == 1}


def readers_by_units(graph: fx.Graph) -> dict[str, int]:
    """The nodes that may read their weight by units, by name, and the fake storage of that weight.

    The graph is propagated. Other nodes need all of a weight, or read it through another argument as well.
    """
    nodes = [(node, contract.operands(node.args)[0]) for node, contract in _candidates(graph)]
    nodes += [(node, node.args[1]) for node in linears(graph)]
    memory_of = {node: storages_of(weight.meta["val"])[0] for node, weight in nodes}
    return {node.name: memory for node, memory in memory_of.items() if not _reads_twice(node, memory)}


_NUMBERS = 4 * 8 + 3
"""Bytes that a round makes of each number of an index: four numbers and three truth values at the most."""


def bytes_of_rounds(node: fx.Node) -> list[Any]:
    """What a node that reads by units takes in rounds beside its result: results of rounds, and numbers."""
    result, contract = node.meta["val"].untyped_storage().nbytes(), CONTRACTS[str(node.target)]
    weight, index = contract.operands(node.args)
    if index is not None:
        return [result, (index.meta["val"].numel() + 1) * _NUMBERS]
    tiled = weight.meta["val"].untyped_storage().nbytes() >= LEAST
    return [result] if tiled and not (isinstance(result, int) and result > MOST_RESULT) else []


def _by_tiles(
    graph: fx.Graph, node_of: Mapping[Any, fx.Node], weights: Weights, storages: Sequence[Storage], route: int
) -> dict[str, SparseRead]:
    """The linears of a graph whose weights are large, by the nodes' names; each is a route of its own."""
    reads: dict[str, SparseRead] = {}
    for node in linears(graph):
        weight: fx.Node = node.args[1]  # type: ignore[assignment]
        memory = storages_of(weight.meta["val"])[0]
        owner = node_of.get(memory)
        if owner is None or _reads_twice(node, memory):
            continue
        storage = storages[weights.storage_of(owner.name)]
        if storage.kind != "streamable" or storage.nbytes < LEAST:
            continue
        view = _view(weight.meta["val"], owner.meta["val"], weights.held[owner.name].parts[0])
        tiles = tiled(view) if view is not None else None
        if tiles is not None:
            number, (count, rows, _) = route + len(reads), tiles.shape
            reads[node.name] = SparseRead(tiles, LINEAR, number, asked=count, slices=rows, tiles=True)
    return reads


def _in_body(node: fx.Node) -> tuple[str, Computed]:
    """The product in the body of a node, and the stack that all of its operands together give that."""
    body, _, *operands = node.args
    owner = node.graph.owning_module
    module = getattr(owner, str(body.target))  # type: ignore[union-attr]
    whole = propagate(module, [operand.meta["val"].detach() for operand in operands])  # type: ignore[union-attr]
    (product,) = whole.graph.output_node().all_input_nodes
    stack: fx.Node = product.args[1]  # type: ignore[assignment]
    return str(product.target), computed_like(stack.meta["val"])


def _candidates(graph: fx.Graph) -> Iterator[tuple[fx.Node, Contract]]:
    """The nodes whose operator has a contract and whose arguments have its form."""
    for node in graph.nodes:
        contract = CONTRACTS.get(str(node.target)) if node.op == "call_function" else None
        if contract is None or contract.index is None or node.kwargs:  # what is not positional may be lost
            continue
        if len(node.args) <= max(contract.weight, contract.index):
            continue
        index = node.args[contract.index]
        if contract.listed and not (isinstance(index, list | tuple) and len(index) == 1):
            continue
        weight, index = contract.operands(node.args)
        values = [operand.meta.get("val") for operand in (weight, index) if isinstance(operand, fx.Node)]
        if len(values) < 2 or not all(isinstance(value, torch.Tensor) for value in values):
            continue
        if node.target is torch.ops.aten.index_select.default and node.args[1] != 0:
            continue
        yield node, contract


def _reads_twice(node: fx.Node, memory: int) -> bool:
    """Tells whether more than one argument of a node is of a storage, so that it is read whole as well."""
    operands = (leaf for leaf in tree_leaves(node.args) if isinstance(leaf, fx.Node))
    return sum(memory in storages_of(operand.meta.get("val")) for operand in operands) > 1


def _view(tensor: torch.Tensor, input: torch.Tensor, part: Part) -> Part | None:
    """The geometry of a fake tensor in the storage of a part; None if it has no static slices."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    if not tensor.dim() or not all(isinstance(size, int) for size in sizes) or 0 in tensor.shape:
        return None
    shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
    within = int(tensor.storage_offset()) * tensor.itemsize - int(input.storage_offset()) * input.itemsize
    return Part("", dtype_name(tensor.dtype), shape, stride, part.storage, part.offset + within)


def _has_units(read: SparseRead, storage: Storage) -> bool:
    inside = read.view.offset >= 0 and read.unit(read.count - 1)[1] <= storage.nbytes
    return inside and read.count > 1 and read.unit_stride >= read.unit_nbytes
