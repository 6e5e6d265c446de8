"""Which values that a forward keeps have a place among the weights, so that they may leave memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.training.joint import Joint
from penstock.passes.training.partition import Partition
from penstock.passes.weights.values import part_of, tensor_in

SMALLEST = 4096
"""The bytes from which on a value gets a place: less than a page is not worth a step of its own."""


@dataclass(frozen=True)
class Slots:
    """The places of kept values, by the nodes of a joint graph.

    `stored` has, for each node whose value is the whole of a place, the name of that place's tensor; `read`
    has the names of the tensors by which the backward reads places, by the nodes of the same value.
    `tensors` are all of them by name, without values; those of one place share their memory.
    """

    stored: Mapping[fx.Node, str]
    read: Mapping[fx.Node, str]
    tensors: Mapping[str, torch.Tensor]


NO_SLOTS = Slots({}, {}, {})


def find_slots(joint: Joint, parts: Partition, prefix: str) -> Slots:
    """Gives places to the kept values of static size that share no memory with what a caller sees.

    Names are `prefix` with a number.
    """
    seen = _seen_by_callers(joint)
    whole: dict[int, fx.Node] = {}
    for node in parts.early:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and _is_whole(value) and not seen.intersection(storages_of(value)):
            whole.setdefault(storages_of(value)[0], node)
    stored: dict[fx.Node, str] = {}
    read: dict[fx.Node, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    memory: dict[int, torch.Tensor] = {}

    def add(node: fx.Node, storage: int) -> str:
        value = node.meta["val"]
        if storage not in memory:
            nbytes = value.untyped_storage().nbytes()
            memory[storage] = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        name = f"{prefix}{len(tensors)}"
        tensors[name] = tensor_in(memory[storage], part_of(value, 0))
        return name

    for node in parts.kept:
        value = node.meta["val"]
        storage = storages_of(value)[0] if isinstance(value, torch.Tensor) else None
        if storage not in whole or not _is_static(value):
            continue
        assert storage is not None
        read[node] = add(node, storage)
        base = whole[storage]
        if base not in stored:
            stored[base] = read[node] if _same_layout(node, base) else add(base, storage)
    return _without_mixed(Slots(stored, read, tensors), parts)


def _seen_by_callers(joint: Joint) -> set[int]:
    """The memory of inputs, results, gradients, and of what the program writes back."""
    inputs = placeholders_of(joint.graph_module.graph)
    results = [node for node in (*joint.results, *joint.written.values()) if node is not None]
    nodes = [*inputs, *results, *joint.gradients.values()]
    return {storage for node in nodes for storage in storages_of(node.meta.get("val"))}


def _is_whole(value: torch.Tensor) -> bool:
    """Tells whether a tensor of static size has each byte of its memory, once."""
    if not _is_static(value) or value.layout is not torch.strided:
        return False
    nbytes = value.untyped_storage().nbytes()
    dense = torch.empty_like(value, device="meta").stride() == value.stride()
    return nbytes >= SMALLEST and dense and not value.storage_offset() and value.nbytes == nbytes


def _is_static(value: torch.Tensor) -> bool:
    sizes = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return all(isinstance(size, int) for size in sizes)


def _same_layout(first: fx.Node, other: fx.Node) -> bool:
    return part_of(first.meta["val"], 0) == part_of(other.meta["val"], 0)


def _without_mixed(slots: Slots, parts: Partition) -> Slots:
    """Leaves out the places of memory of which the backward also needs a tensor that has none."""
    elsewhere = {s for node in parts.kept if node not in slots.read for s in storages_of(node.meta["val"])}

    def allowed(named: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
        return {
            node: name for node, name in named.items() if storages_of(node.meta["val"])[0] not in elsewhere
        }

    stored, read = allowed(slots.stored), allowed(slots.read)
    names = {*stored.values(), *read.values()}
    return Slots(stored, read, {name: tensor for name, tensor in slots.tensors.items() if name in names})
