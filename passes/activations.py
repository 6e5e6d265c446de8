"""The memory that a program's intermediate values take, worked out from its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from penstock.passes.annotate import bytes_of_rounds, readers_by_units
from penstock.passes.calls.inputs import Dimension, dimension_of, user_placeholders
from penstock.passes.graph.nodes import tensors_of
from penstock.passes.graph.propagation import fake_inputs, propagate, storages_of


@dataclass(frozen=True)
class _Unit:
    """A unit in which sizes of storages are counted: one byte, or the value of a symbolic expression."""

    expression: Any = 1
    symbolic: Any = field(default=None, compare=False)


_BYTE = _Unit()

Moment = tuple[int, tuple[int, ...]]
"""Bytes of a set of values: a number, and how often each dynamic size is added."""


@dataclass(frozen=True)
class Activations:
    """The most bytes of intermediate values that are alive at once, as a function of the sizes of a call.

    A value lives from the node that makes it to the last node that reads it through any alias, as in the code
    that a graph module generates. Results are counted; inputs and weights are not. Memory that a kernel takes
    for itself while it runs is not in the graph, except for a mask of booleans, of which attention makes one
    of numbers: leave room for it.

    `moments` are the sets of values alive at once that may be the largest. Each is a number of bytes, and,
    for each dynamic size in `sizes`, which is in bytes too, how often that size is added. `held` is such a
    set too, of inputs that are alive throughout because another method made them for this one.
    """

    sizes: tuple[Dimension, ...]
    moments: tuple[Moment, ...]
    held: Moment = (0, ())

    @classmethod
    def of(
        cls, exported: ExportedProgram, propagated: fx.GraphModule | None = None, held: Collection[int] = ()
    ) -> Activations:
        """The activations of a program; `propagated` is its graph if it has been propagated before.

        `held` are the numbers of the leaves of a call that are counted as held.
        """
        if propagated is None:
            propagated = propagate(exported.graph_module, fake_inputs(exported.graph_module))
        held_units = _held(
            propagated,
            {placeholder.name for k, placeholder in enumerate(user_placeholders(exported)) if k in held},
        )
        input_names = {node.name for node in user_placeholders(exported)}
        inputs = [node for node in propagated.graph.nodes if node.op == "placeholder"]
        weights = {
            s for node in inputs if node.name not in input_names for s in storages_of(node.meta.get("val"))
        }
        moments_by_content = {frozenset(alive.items()): alive for alive in _alive(propagated, weights)}
        largest: list[Counter[_Unit]] = []
        for alive in sorted(moments_by_content.values(), key=Counter.total, reverse=True):
            if not any(alive <= larger for larger in largest):
                largest.append(alive)
        units = list(
            dict.fromkeys(unit for alive in (*largest, held_units) for unit in alive if unit != _BYTE)
        )
        moments = [(alive[_BYTE], tuple(alive[unit] for unit in units)) for alive in (*largest, held_units)]
        symbolic = tuple(dimension_of(exported, unit.symbolic) for unit in units)
        return cls(symbolic, tuple(moments[:-1]), moments[-1] if held_units else (0, ()))

    def peak(self, sizes: Mapping[str, int] = MappingProxyType({})) -> int:
        """The most bytes if symbols have these sizes; symbols without a size have the exported one."""
        return self.held_bytes(sizes) + max((self._at(moment, sizes) for moment in self.moments), default=0)

    def held_bytes(self, sizes: Mapping[str, int] = MappingProxyType({})) -> int:
        """The bytes of what is held, at such sizes."""
        return self._at(self.held, sizes)

    def _at(self, moment: Moment, sizes: Mapping[str, int]) -> int:
        nbytes, counts = moment
        for count, size in zip(counts, self.sizes, strict=False):
            value = size.value(sizes)
            nbytes += count * (size.example if value is None else int(value))
        return nbytes


def _held(graph_module: fx.GraphModule, names: Collection[str]) -> Counter[_Unit]:
    """The sizes of the storages of some inputs, added up by unit."""
    values = [node.meta["val"] for node in graph_module.graph.nodes if node.name in names]
    storages = {storages_of(tensor)[0]: _bytes_of(tensor) for value in values for tensor in tensors_of(value)}
    return sum(storages.values(), Counter())


def _alive(graph_module: fx.GraphModule, weights: Collection[int] = ()) -> Iterator[Counter[_Unit]]:
    """The sizes of all storages that live while each node runs; of `weights`, nodes may read units only."""
    nodes, readers = list(graph_module.graph.nodes), readers_by_units(graph_module.graph) if weights else {}
    given_storages = {
        s for node in nodes if node.op == "placeholder" for s in storages_of(node.meta.get("val"))
    }
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            last_use |= dict.fromkeys(storages_of(used.meta.get("val")), position)
    alive: dict[int, Counter[_Unit]] = {}
    alive_units: Counter[_Unit] = Counter()
    for position, node in enumerate(nodes):
        for tensor in tensors_of(node.meta.get("val")):
            storage = int(tensor.untyped_storage()._cdata)
            if storage not in given_storages and storage not in alive:
                alive[storage] = _bytes_of(tensor)
                alive_units += alive[storage]
        with_own = alive_units + _own_bytes(node, readers.get(node.name) in weights)
        yield from (with_own + inner for inner in (Counter(), *_in_bodies(graph_module, node)))
        for storage in [s for s in alive if last_use[s] <= position]:
            alive_units -= alive.pop(storage)


def _bytes_of(tensor: torch.Tensor) -> Counter[_Unit]:
    return _counted(tensor.untyped_storage().nbytes())


def _own_bytes(node: fx.Node, by_units: bool) -> Counter[_Unit]:
    """Bytes that a node takes beside its result.

    Attention converts a mask of booleans to the dtype of its queries. An operator that reads its weight by
    units may run in rounds (`sparse/calls.py`), each of which has a result and numbers of its own.
    """
    if by_units and node.meta["val"].device.type == "cpu":
        return sum(map(_counted, bytes_of_rounds(node)), Counter())
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return Counter()
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    masks = tensors_of(mask.meta.get("val")) if isinstance(mask, fx.Node) else ()
    (query,) = tensors_of(node.all_input_nodes[0].meta.get("val"))
    sizes = [tensor.numel() * query.element_size() for tensor in masks if tensor.dtype == torch.bool]
    return _counted(sizes[0]) if sizes else Counter()


def _counted(nbytes: Any) -> Counter[_Unit]:
    return Counter({_BYTE: nbytes} if isinstance(nbytes, int) else {_Unit(nbytes.node.expr, nbytes): 1})


def _in_bodies(graph_module: fx.GraphModule, node: fx.Node) -> Iterator[Counter[_Unit]]:
    """Yields what `_alive` yields for each body that a node of control flow runs."""
    for name in [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]:
        body = getattr(graph_module, name)
        if isinstance(body, fx.GraphModule):
            yield from [_recorded(body)] if getattr(node.target, "is_recorded", False) else _alive(body)


def _recorded(body: fx.GraphModule) -> Counter[_Unit]:
    """All that a segment computes, which autograd may hold until the segment's gradients are there."""
    result_units = {}
    for node in reversed(body.graph.nodes):
        for tensor in tensors_of(node.meta.get("val")):
            storage = int(tensor.untyped_storage()._cdata)
            result_units[storage] = Counter() if node.op == "placeholder" else _bytes_of(tensor)
    return sum(result_units.values(), Counter())
