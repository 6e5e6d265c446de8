"""Which nodes of a method penstock runs: a region for each node that reads a weight worth streaming.

A region consists of a *reader*, what is computed from weights alone and for it first (a transposed or
dequantised copy), and what takes its results apart. The nodes that use a state (a buffer that the program
writes) make one region together, with all that lies between them, because a state is in one region only.
Nothing else needs memory that penstock manages, so the rest stays with ExecuTorch, and the floor is that of
single nodes.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from executorch.exir.delegate import executorch_call_delegate
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument

from penstock.backends.executorch.facts import named_without_use, takes_part
from penstock.backends.executorch.options import NO_WORK
from penstock.passes.graph.nodes import needed, placeholders_of
from penstock.passes.trace import sum_of, work_of
from penstock.passes.weights.usage import Usage
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Part, Weight, Work

_log = logging.getLogger(__name__)
_STAYS = "buffer %r stays with ExecuTorch, which keeps one for each method: the program %s"


@dataclass(frozen=True)
class Region:
    """The names of a region's nodes, in the order of the graph, and the work of other nodes before it."""

    nodes: tuple[str, ...]
    lead: Work = NO_WORK


@dataclass(frozen=True)
class Regions:
    """The regions of a method in the order of the graph, and the work of other nodes behind the last one."""

    regions: tuple[Region, ...]
    tail: Work = NO_WORK


def dim_order_of(part: Part) -> tuple[int, ...] | None:
    """The dimensions from the outermost in memory to the innermost; None if there are gaps between elements.

    Where dimensions have one stride, as those of size 1 may, they keep their order.
    """
    order = sorted(range(len(part.shape)), key=lambda d: (-part.stride[d], d))
    dense = 1
    for d in reversed(order):
        if part.shape[d] > 1 and part.stride[d] != dense:
            return None
        dense *= max(part.shape[d], 1)
    return tuple(order)


@dataclass(frozen=True)
class Worth:
    """Which storages are worth a region.

    These are those of which the weight has `least` bytes or more, and those that some method writes.
    `written` has the FQNs of the latter, and `wholes` the FQN of the weight that a tensor is a part of.
    """

    least: int
    written: frozenset[str] = frozenset()
    wholes: Mapping[str, str] = field(default_factory=dict)


def find_regions(
    exported: ExportedProgram, usage: Usage, weights: Mapping[str, Weight], worth: Worth
) -> Regions:
    """Returns the regions of a program whose operators are ATen's.

    `weights` has the weights by the names of their inputs. A storage is left to ExecuTorch if some node that
    reads it cannot be in a region.
    """
    graph = _Graph(exported, usage, weights, worth)
    states = list(_states(graph))
    left: set[int] = set()
    while True:
        readers = [group for group in _readers(graph, left) if not _writes_what_stays(graph, group, states)]
        groups = _merged(graph, [*states, *_whole_weights(graph, readers)])
        groups = _with_results(graph, groups)
        inside = {node for group in groups for node in group}
        outside = {
            s for name, s in graph.storages.items() if any(u not in inside for u in graph.nodes[name].users)
        }
        shared = (outside & graph.worth) - left
        if not shared:
            break
        left |= shared
    return _in_order(usage, groups)


@dataclass
class _Graph:
    """A program's graph with what is looked up in it again and again."""

    exported: ExportedProgram
    usage: Usage
    held: Mapping[str, Weight]
    asked: Worth
    nodes: dict[str, fx.Node] = field(init=False)
    order: dict[fx.Node, int] = field(init=False)
    storages: dict[str, int] = field(init=False)
    worth: set[int] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.usage.graph_module.graph
        self.nodes = {node.name: node for node in graph.nodes}
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        self.storages = {name: weight.parts[0].storage for name, weight in self.held.items()}
        self.worth = self._worth()

    def _worth(self) -> set[int]:
        """The storages that this method does not write, and that are worth a region."""
        sizes: dict[int, int] = {}
        of_whole: dict[str, set[int]] = {}
        for name, weight in self.held.items():
            s = self.storages[name]
            sizes[s] = self.nodes[name].meta["val"].untyped_storage().nbytes()
            fqn = named_without_use(weight.fqn)
            of_whole.setdefault(self.asked.wholes.get(fqn, fqn), set()).add(s)
        least = max(self.asked.least, 1)
        worth = {s for group in of_whole.values() if sum(sizes[s] for s in group) >= least for s in group}
        worth |= {
            self.storages[name] for name, weight in self.held.items() if weight.fqn in self.asked.written
        }
        return {s for s in worth if self.usage.kinds[s] == "streamable" and sizes[s] and self._dense(s)}

    def _dense(self, storage: int) -> bool:
        parts = [w.parts[0] for w in self.held.values() if w.parts[0].storage == storage]
        return all(dim_order_of(part) is not None for part in parts)


def _readers(graph: _Graph, left: set[int]) -> Iterator[set[fx.Node]]:
    """Yields a group for each node that reads a storage that is worth it and not `left` to ExecuTorch."""
    worth = graph.worth - left
    read: dict[fx.Node, set[int]] = {}  # the storages from which alone a node's value is computed
    owned: set[fx.Node] = set()
    for node in graph.usage.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in graph.held:
            s = graph.storages[node.name]
            if graph.usage.kinds[s] == "streamable":
                read[node] = {s}
            continue
        inputs = node.all_input_nodes
        if not inputs or not takes_part(node):
            continue
        if all(operand in read for operand in inputs):
            read[node] = set().union(*(read[operand] for operand in inputs))
            continue
        if worth.intersection(*[set().union(*(read.get(operand, set()) for operand in inputs))]):
            group = {node, *_computed_for(node, read, owned)}
            if any(operand.name in graph.held for member in group for operand in member.all_input_nodes):
                owned |= group
                yield {*group, *(user for user in node.users if user.target is operator.getitem)}


def _whole_weights(graph: _Graph, groups: Sequence[set[fx.Node]]) -> list[set[fx.Node]]:
    """The groups, and one for each weight whose parts different groups read, with what lies between."""
    of_whole: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        read = {
            operand.name for node in group for operand in node.all_input_nodes if operand.name in graph.held
        }
        names = {named_without_use(graph.held[name].fqn) for name in read}
        for whole in {graph.asked.wholes[name] for name in names if name in graph.asked.wholes}:
            of_whole.setdefault(whole, []).append(number)
    joined = []
    for numbers in of_whole.values():
        hull = _hull(graph, set().union(*(groups[number] for number in numbers)))
        elsewhere = set().union(*(group for number, group in enumerate(groups) if number not in numbers))
        if len(numbers) > 1 and hull.isdisjoint(elsewhere) and all(takes_part(node) for node in hull):
            joined.append(hull)
    return [*groups, *joined]


def _computed_for(reader: fx.Node, read: Mapping[fx.Node, set[int]], owned: set[fx.Node]) -> set[fx.Node]:
    """The nodes that a reader's inputs are computed by from weights alone, and that no earlier reader has."""
    inputs = (operand for operand in reader.all_input_nodes if operand in read)
    return needed(inputs, lambda node: node.op != "placeholder" and node not in owned)


def _states(graph: _Graph) -> Iterator[set[fx.Node]]:
    """Yields a group for each buffer that the program writes: the nodes that use it, and all between them."""
    outputs = graph.exported.graph_signature.output_specs
    names = [spec.arg.name for spec in outputs]
    inputs = {weight.fqn: name for name, weight in graph.held.items()}
    for spec in outputs:
        if spec.kind is not OutputKind.BUFFER_MUTATION or spec.target not in inputs:
            continue
        state, new = graph.nodes[inputs[spec.target]], graph.nodes[spec.arg.name]
        group = _hull(graph, _users(graph, [state, new]))
        if any(_is_delegate(node) for node in group):
            _log.warning(_STAYS, spec.target, "has given another backend what uses it")
            continue
        unusual = names.count(new.name) > 1 or len(_inputs_of(graph, state.name)) > 1
        if unusual or new not in group or not all(takes_part(node) for node in group):
            _log.warning(
                _STAYS, spec.target, "returns what it writes, or uses it in a way that no delegate can"
            )
            continue
        yield group


def _writes_what_stays(graph: _Graph, group: set[fx.Node], states: Sequence[set[fx.Node]]) -> bool:
    """Tell whether a group computes a state that stays with ExecuTorch, and something else uses it."""
    outputs = graph.exported.graph_signature.output_specs
    written = {
        graph.nodes[output.arg.name] for output in outputs if output.kind is OutputKind.BUFFER_MUTATION
    }
    stays = (written & group).difference(*states)
    return any(user not in group and user.op != "output" for node in stays for user in node.users)


def _users(graph: _Graph, state: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that use a state, or what is computed from it alone, before or behind its update."""
    same = set(state)
    computed = {node for node in state if node.op != "placeholder"}
    for node in graph.order:
        inputs = set(node.all_input_nodes)
        if node.op == "output" or inputs.isdisjoint(same):
            continue
        computed.add(node)
        if inputs <= same:
            same.add(node)
    return computed


def _inputs_of(graph: _Graph, name: str) -> list[str]:
    """The inputs that share the storage of one."""
    return [other for other, s in graph.storages.items() if s == graph.storages[name]]


def _hull(graph: _Graph, nodes: set[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that lie on a way from one of them to another."""
    positions = sorted(graph.order[node] for node in nodes) or [0]
    first, last = positions[0], positions[-1]
    between = [node for node, position in graph.order.items() if first <= position <= last]
    below, above = set(nodes), set(nodes)
    for node in between:
        if any(operand in below for operand in node.all_input_nodes):
            below.add(node)
    for node in reversed(between):
        if any(user in above for user in node.users):
            above.add(node)
    return nodes | (below & above)


def _merged(graph: _Graph, groups: Sequence[set[fx.Node]]) -> list[set[fx.Node]]:
    """The groups, in which those with common nodes are one, with all that lies between them."""
    merged: list[set[fx.Node]] = []
    for group in groups:
        whole = group
        while common := [other for other in merged if not other.isdisjoint(whole)]:
            merged = [other for other in merged if other not in common]
            whole = _hull(graph, whole.union(*common))
        merged.append(whole)
    return merged


def _with_results(graph: _Graph, groups: Sequence[set[fx.Node]]) -> list[set[fx.Node]]:
    """Join groups that only write states to others: ExecuTorch drops a delegate without used results."""
    with_results = [group for group in groups if _has_result(graph, group)]
    for group in (group for group in groups if not _has_result(graph, group)):
        first = min(map(graph.order.__getitem__, group))
        for other in sorted(
            with_results, key=lambda candidate: abs(min(map(graph.order.__getitem__, candidate)) - first)
        ):
            joined = _hull(graph, group | other)
            if all(takes_part(node) for node in joined):
                with_results = _merged(
                    graph, [*(candidate for candidate in with_results if candidate is not other), joined]
                )
                break
        else:
            outputs = graph.exported.graph_signature.output_specs
            names = ", ".join(
                str(output.target) for output in outputs if graph.nodes.get(output.arg.name) in group
            )
            _log.warning(_STAYS, names, "delegates nothing else that it could be written with")
    return with_results


def _has_result(graph: _Graph, group: set[fx.Node]) -> bool:
    """Tells whether something behind a group uses a value of it, other than what it writes to a state."""
    specs = graph.exported.graph_signature.output_specs
    returned = {spec.arg.name for spec in specs if spec.kind is OutputKind.USER_OUTPUT}
    used = {user for node in group for user in node.users if user.op != "output"} - group
    return bool(used) or any(node.name in returned for node in group)


def _in_order(usage: Usage, groups: Iterable[set[fx.Node]]) -> Regions:
    """The groups as regions, in the order of their last nodes, with the work between them."""
    of = {node: number for number, group in enumerate(groups) for node in group}
    left = {
        number: sum(1 for group_number in of.values() if group_number == number) for number in of.values()
    }
    regions: list[Region] = []
    lead = Work()
    members: dict[int, list[str]] = {}
    for node in usage.graph_module.graph.nodes:
        number = of.get(node)
        if number is None:
            lead = sum_of(lead, work_of(node))
            continue
        members.setdefault(number, []).append(node.name)
        left[number] -= 1
        if not left[number]:
            regions.append(Region(tuple(members[number]), lead))
            lead = Work()
    return Regions(tuple(regions), lead)


def whole_method(exported: ExportedProgram) -> Regions:
    """Returns one region of all nodes of a program that compute; none if other backends have all weights.

    Raises PassError if other backends have a part of the program, and for results that no delegate of
    ExecuTorch can have: a number, or a buffer that the program writes too.
    """
    nodes = exported.graph_module.graph.nodes
    backends = other_backends(exported)
    if backends:
        weights = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.target is not None}
        readers = {user for node in nodes if node.name in weights for user in node.users}
        if all(_is_delegate(user) or user.op == "output" for user in readers):
            return Regions(())
        raise PassError(
            f"{' and '.join(backends)} took a part of the program before, and a compiled method is whole: "
            'name PenstockPartitioner first, or export with kernels="executorch"'
        )
    specs = exported.graph_signature.output_specs
    for spec in specs:
        if spec.kind is OutputKind.USER_OUTPUT and not isinstance(
            spec.arg, TensorArgument | ConstantArgument
        ):
            raise PassError(
                f"the program returns the number {spec.arg.name!r}, which a compiled method cannot: return "
                'tensors only, or export with kernels="executorch"'
            )
        if spec.kind is OutputKind.BUFFER_MUTATION and sum(s.arg.name == spec.arg.name for s in specs) > 1:
            raise PassError(
                f"the program writes buffer {spec.target!r} and returns it, which a compiled method cannot: "
                'return a copy of it (clone), or export with kernels="executorch"'
            )
    names = tuple(node.name for node in nodes if node.op in ("call_function", "get_attr"))
    return Regions((Region(names),) if names else ())


def other_backends(exported: ExportedProgram) -> list[str]:
    """The ids of backends that took parts of a program before."""
    modules = dict(exported.graph_module.named_modules())
    calls = [node for node in exported.graph.nodes if _is_delegate(node)]
    return sorted({str(modules[node.args[0].target].backend_id) for node in calls})


def _is_delegate(node: fx.Node) -> bool:
    return node.target is executorch_call_delegate


def tag(exported: ExportedProgram, regions: Sequence[Region], prefix: str) -> list[str]:
    """Marks the nodes of each region, and the weights that they read, for ExecuTorch; returns the tags."""
    tags = [f"{prefix}_{number}" for number in range(len(regions))]
    of = {name: tag for tag, region in zip(tags, regions, strict=True) for name in region.nodes}
    for node in exported.graph.nodes:
        if node.name in of:
            node.meta["delegation_tag"] = of[node.name]
    signature = exported.graph_signature
    weights = {spec.arg.name: spec.target for spec in signature.input_specs if spec.target is not None}
    updates = {target: name for name, target in signature.buffers_to_mutate.items()}
    for node in placeholders_of(exported.graph):
        users = [user.name for user in node.users] or [updates.get(weights.get(node.name), "")]
        first = next((of[user] for user in users if user in of), None)
        returned = any(user.op == "output" for user in node.users)  # then it stays in the .pte
        if node.name in weights and first is not None and not returned:
            node.meta["delegation_tag"] = first
    return tags
