"""Divides a joint graph into a forward and a backward, between which no weight is kept."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import fx
from torch._ops import OpOverload

from penstock.passes.graph import dry_run
from penstock.passes.graph.nodes import dependent, needed, placeholders_of, size_hint, tensors_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.training.joint import Joint
from penstock.passes.weights.usage import is_view


@dataclass(frozen=True)
class Partition:
    """Which nodes of a joint graph run in the forward, which in the backward, and what goes between them.

    `early` are the nodes of the forward, and `late` those of the backward, in order; views of inputs, and
    what is computed again, are in both. `inputs` are the placeholders of inputs that the backward takes, and
    `kept` the values that the forward returns for it. `same` maps a node to the one among `kept` that is the
    same value.
    """

    early: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    same: dict[fx.Node, fx.Node]


def partition(
    joint: Joint,
    frozen: Collection[str] = (),
    again: Collection[fx.Node] = frozenset(),
    kept: dict[object, fx.Node] | None = None,
) -> Partition:
    """Returns the partition that keeps what the backward reads of the forward, except for nodes in `again`.

    The backward computes those again, from what they are computed of, where it needs them first. `frozen` are
    the names of inputs that are weights and have no gradient. `kept` are the values that are kept for other
    backwards of that forward, to which this one's are added.
    """
    nodes = list(joint.graph_module.graph.nodes)
    early = forward_of(joint)
    after = dependent(node for node in joint.tangents if node is not None)
    checks = [node for node in nodes if node in after and node.op == "call_function" and node.is_impure()]
    backward_nodes = needed([*joint.gradients.values(), *checks]) - early
    crossing = _Crossing(joint, {*again, *unpacked(joint, frozen)}, {} if kept is None else kept)
    for node in nodes:
        if node in backward_nodes and node.op != "placeholder":
            for operand in node.all_input_nodes:
                if operand not in backward_nodes:
                    crossing.take(operand)
    return Partition(
        tuple(node for node in nodes if node in early and node.op != "placeholder"),
        tuple(_where_needed(joint, backward_nodes | crossing.again)),
        tuple(node for node in placeholders_of(joint.graph_module.graph) if node in crossing.inputs),
        tuple(dict.fromkeys(crossing.same.values())),
        crossing.same,
    )


def forward_of(joint: Joint) -> set[fx.Node]:
    """The nodes that the forward runs: what its results and what it writes are computed of."""
    after = dependent(joint.given)
    results = [node for node in (*joint.written.values(), *joint.results) if node is not None]
    effects = [
        node
        for node in joint.graph_module.graph.nodes
        if node.op == "call_function" and node.is_impure() and node not in after
    ]
    early = needed([*results, *effects])
    return early | {user for node in early for user in node.users if user.target is operator.getitem}


def steady_storages(joint: Joint) -> set[int]:
    """The storages of inputs that the program does not write to, which the backward can read as well."""
    inputs = (node for k, node in enumerate(joint.inputs) if node is not None and k not in joint.written)
    return {storage for node in inputs for storage in storages_of(node.meta["val"])}


def unpacked(joint: Joint, frozen: Collection[str]) -> set[fx.Node]:
    """What is computed from frozen weights alone, the same each time that it is computed."""
    inputs = (node for k, node in enumerate(joint.inputs) if node is not None and k not in joint.written)
    unchanged = {node for node in inputs if node.name in frozen}
    reached = set(unchanged)
    for node in joint.graph_module.graph.nodes:
        operands = node.all_input_nodes
        if node.op == "call_function" and operands and reached.issuperset(operands) and _repeats(node):
            reached.add(node)
    return reached - unchanged


def _where_needed(joint: Joint, late: Set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of the backward, in the order in which autograd calls those that gradients go through.

    Each other value is computed right before the first of them that needs it: all of them at the beginning
    would take as much memory as if they had been kept.
    """
    nodes = [node for node in joint.graph_module.graph.nodes if node.op != "placeholder"]
    position = {node: k for k, node in enumerate(nodes)}
    after = dependent(joint.given)
    left = late & position.keys()
    for node in [candidate for candidate in nodes if candidate in left and candidate in after] + [
        *joint.gradients.values()
    ]:
        missing = needed([node], left.__contains__)
        yield from sorted(missing, key=position.__getitem__)
        left -= missing


@dataclass
class _Crossing:
    """Collects what crosses from the forward to the backward."""

    joint: Joint
    repeated: Collection[fx.Node]
    kept: dict[object, fx.Node]
    inputs: set[fx.Node] = field(default_factory=set)
    again: set[fx.Node] = field(default_factory=set)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The backward cannot read what the program has written over since: it keeps a copy.
        self._steady = steady_storages(self.joint)

    def take(self, first: fx.Node) -> None:
        left = [first]
        while left:
            node = left.pop()
            storages = storages_of(node.meta["val"])
            lasting = bool(storages) and self._steady.issuperset(storages)
            if node.op == "placeholder" and (lasting or node in self.joint.tangents):
                self.inputs.add(node)
            elif node in self.repeated or (node.op != "placeholder" and lasting and is_view(node)):
                if node not in self.again:
                    self.again.add(node)
                    left += node.all_input_nodes
            else:
                self.same[node] = self.kept.setdefault(_identity(node), node)


_KNOWN = frozenset({"aten", "prims", dry_run.NAMESPACE, "quantized_decomposed", "torchao"})
"""Namespaces of operators whose tags tell whether they draw random numbers."""


def _repeats(node: fx.Node) -> bool:
    """Tells whether an operator has no effect, draws no random numbers, and writes to nothing.

    Of those from other libraries nothing is known.
    """
    if getattr(node.target, "namespace", "aten") not in _KNOWN:
        return False
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    if node.target is operator.getitem:
        return True
    return schema is not None and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags


def _identity(node: fx.Node) -> object:
    """Equal for nodes whose values are the same: sizes by their expression, tensors by their memory."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        layout = (value.storage_offset(), tuple(value.shape), value.stride())
        return (storages_of(value)[0], value.dtype, *map(str, layout))
    return value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat) else node


_BY_GRAD_MODE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
"""Operators that return less where gradients are not recorded, as in a backward."""

_REPEATABLE = ("aten", dry_run.NAMESPACE)
"""Namespaces of operators whose tags tell whether they give the same bits again."""

_LIMITS, _MOST_PLACES = 32, 256
"""How many sizes of the largest segment are tried, and of how many positions its ends are chosen."""


def keep(joint: Joint, frozen: Collection[str] = ()) -> frozenset[fx.Node]:
    """Returns what is computed again if all is kept that the backward reads: nothing."""
    return frozenset()


def layers(joint: Joint, frozen: Collection[str] = ()) -> frozenset[fx.Node]:
    """Returns what is computed again if only values are kept that go from one segment to the next.

    A segment begins where few bytes go from the nodes in front of it to those behind: between two layers, one
    value does. The segments are those for which what is kept, and what the largest of them computes again,
    take the fewest bytes together.
    """
    values = _Values(joint, frozen)
    between = {storage for position in _segments(values) for storage in values.crossing[position]}
    return frozenset(
        node
        for node in values.repeatable
        if not values.owns(node) or between.isdisjoint(_storage_bytes(node))
    )


def boundaries(joint: Joint, frozen: Collection[str] = ()) -> list[fx.Node]:
    """Returns the nodes at which segments of a forward begin, without the first, if all is computed again.

    What is random counts as computed again too, and of each segment all that it computes is held at once, and
    all that it reads of frozen weights.
    """
    values = _Values(joint, frozen)
    values.repeatable.update(values.nodes)
    values.needed, values.first = {}, {}
    for k, node in enumerate(values.nodes):
        if node.op == "placeholder":
            continue
        read = [
            operand
            for operand in node.all_input_nodes
            if operand.name in frozen or operand in values.unpacked
        ]
        for source in [node, *read]:
            values.needed |= _storage_bytes(source)
            values.first |= {s: k for s in _storage_bytes(source) if s not in values.first}
    return [values.nodes[position] for position in _segments(values)]


def may_draw(node: fx.Node) -> bool:
    """Tells whether a node may draw random numbers: an operator from outside of torch may."""
    target = node.target
    if not isinstance(target, OpOverload) or _is_deterministic(node):
        return False
    return target.namespace not in (*_REPEATABLE, "prims") or torch.Tag.nondeterministic_seeded in target.tags


class _Values:
    """The values of a joint graph's forward, and what may be computed again of them."""

    def __init__(self, joint: Joint, frozen: Collection[str]) -> None:
        self.joint, self.frozen, self.steady = joint, frozen, steady_storages(joint)
        self.unpacked = unpacked(joint, frozen)
        inputs = {s for node in joint.inputs if node is not None for s in storages_of(node.meta.get("val"))}
        self._written = inputs - self.steady
        early = forward_of(joint)
        self.nodes = [node for node in joint.graph_module.graph.nodes if node in early]
        self.own = needed(joint.gradients.values()) - early
        self.repeatable: set[fx.Node] = set()
        for node in self.nodes:
            if self._gives_the_same(node):
                self.repeatable.add(node)

    def _gives_the_same(self, node: fx.Node) -> bool:
        if not storages_of(node.meta.get("val")):
            return False  # sizes are kept, as numbers
        if node.target is operator.getitem:
            return node.args[0] in self.repeatable
        if any(
            self._written.intersection(storages_of(operand.meta.get("val")))
            for operand in node.all_input_nodes
        ):
            return False  # the backward would read what the program has written since
        return node.op == "call_function" and _is_deterministic(node)

    def is_given(self, node: fx.Node) -> bool:
        """Tells whether the backward has a value anyway: inputs, views of them, sizes, unpacked weights."""
        return node in self.unpacked or self.steady.issuperset(storages_of(node.meta.get("val")))

    def owns(self, node: fx.Node) -> bool:
        """Tells whether a node's value is the tensor that a storage was made for, and no view of one."""
        if node.target is operator.getitem:
            return not is_view(node.args[0])  # type: ignore[arg-type]
        return isinstance(node.meta.get("val"), torch.Tensor) and not (
            is_view(node) and node.op != "placeholder"
        )

    @cached_property
    def needed(self) -> dict[int, int]:
        """The bytes of each storage that the backward reads, where nothing is computed again."""
        kept_nodes = partition(self.joint, self.frozen).kept
        return {s: n for node in kept_nodes for s, n in _storage_bytes(node).items()}

    @cached_property
    def first(self) -> dict[int, int]:
        """The position of the first node of each storage."""
        first_of: dict[int, int] = {}
        for k, node in enumerate(self.nodes):
            first_of |= {s: k for s in storages_of(node.meta.get("val")) if s not in first_of}
        return first_of

    @cached_property
    def crossing(self) -> list[dict[int, int]]:
        """For each node, the bytes of each storage that is made before it, and read by it or behind it.

        Those that are kept in any case are left out.
        """
        last: dict[int, int] = {}
        fixed: set[int] = set()
        for k, node in enumerate(self.nodes):
            last |= {s: k for operand in node.all_input_nodes for s in storages_of(operand.meta.get("val"))}
            if node not in self.repeatable:
                fixed.update(storages_of(node.meta.get("val")))
        crossing: list[dict[int, int]] = []
        alive: dict[int, int] = {}
        for k, node in enumerate(self.nodes):
            alive = {s: n for s, n in alive.items() if last[s] >= k}
            crossing.append(alive)
            new = {} if node.op == "placeholder" or self.is_given(node) else _storage_bytes(node)
            alive = alive | {s: n for s, n in new.items() if s in last and s not in fixed}
        return crossing


def _is_deterministic(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in _REPEATABLE or target in _BY_GRAD_MODE:
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_bitwise in target.tags:
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return True
    # Attention has the tag for its dropout, and draws nothing where there is none.
    arguments = target._schema.arguments
    arguments_given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    arguments_given |= dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    return arguments_given.get("dropout_p") == 0


def _storage_bytes(node: fx.Node) -> dict[int, int]:
    """The bytes of the storages of a node's value at the exported sizes."""
    tensors = tensors_of(node.meta.get("val"))
    return {storages_of(tensor)[0]: size_hint(tensor.untyped_storage().nbytes()) for tensor in tensors}


def _segments(values: _Values) -> Sequence[int]:
    """The positions of the nodes at which segments begin, without the first.

    For each size of the largest segment, in bytes that the backward needs of it, the positions at which
    fewest bytes are kept are found from the end. What goes through several positions is kept once.
    """
    places = [0, *_narrow(values), len(values.nodes)]
    crossing = [*values.crossing, {}]
    inside = _inside(values, places)
    added = [[sum(n for s, n in crossing[b].items() if s not in crossing[a]) for b in places] for a in places]
    best: tuple[int, list[int]] | None = None
    largest, most = max(b - a for a, b in pairwise(inside)), inside[-1]
    for limit in {largest + (most - largest) * k * k // _LIMITS**2 for k in range(_LIMITS + 1)}:
        bytes_kept, after = [0] * len(places), [0] * len(places)
        for a in reversed(range(len(places) - 1)):
            reached = [b for b in range(a + 1, len(places)) if inside[b] - inside[a] <= limit]
            after[a] = min(reached, key=lambda b: added[a][b] + bytes_kept[b])
            bytes_kept[a] = added[a][after[a]] + bytes_kept[after[a]]
        if best is None or bytes_kept[0] + limit < best[0]:
            chosen = [after[0]]
            while chosen[-1] < len(places) - 1:
                chosen.append(after[chosen[-1]])
            best = bytes_kept[0] + limit, [places[k] for k in chosen[:-1]]
    return best[1] if best else ()


def _narrow(values: _Values) -> list[int]:
    """The positions where fewer bytes cross than around them, and the fewest of all if there are many."""
    widths = [sum(storages.values()) for storages in values.crossing]
    changes = [k for k in range(1, len(widths)) if values.crossing[k] != values.crossing[k - 1]]
    around = zip([0, *changes], changes, [*changes[1:], None], strict=False)
    narrow = [
        k
        for before, k, behind in around
        if 0 < widths[k] <= widths[before] and (behind is None or widths[k] <= widths[behind])
    ]
    return sorted(sorted(narrow, key=widths.__getitem__)[:_MOST_PLACES])


def _inside(values: _Values, places: Sequence[int]) -> list[int]:
    """The bytes that the backward needs of what is made in front of each of these positions."""
    first = values.first
    return [sum(n for s, n in values.needed.items() if first.get(s, 0) < place) for place in places]
