"""Runs a graph that has no values yet on fake tensors, once for each operator on arguments that are alike.

A stored graph has operators and arguments only. Where the memory of its values lies, a run on fake tensors
tells, which takes a millisecond a node. Layers repeat, though, and of arguments that are alike an operator
makes values that are alike: what is run is the first of each kind, and what makes views of followed memory.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from penstock.passes.building.refusals import sentence
from penstock.passes.graph.grouped import groups_of_any_dtype
from penstock.passes.graph.nodes import placeholders_of, subgraphs_of
from penstock.passes.graph.propagation import facts_of, fake_mode_of, storages_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.schedule.facts.errors import PassError

_RUNS = 4
"""How often a node of control flow runs a body on fake tensors at most, and once to follow it."""

_NODES, _REPEATS = 100_000, 64
"""The nodes that a run may go through, and so many more for each node that is there. So many operators, and
tensors of their lists, may be called."""

_LARGEST = 256
"""The most binary digits of a number, and so the largest exponent, that a graph computes from its sizes."""


@kept_torch_state()
def dry_run(graph: fx.Graph, inputs: Sequence[object], followed: frozenset[int]) -> None:
    """Gives the nodes of a graph, and the inputs of its bodies, their values in `meta["val"]`.

    `inputs` are fake tensors of one mode. Values that share memory with no storage in `followed` (numbers of
    `storages_of`) may be the values of several nodes. Raises PassError for a node that cannot run on what it
    is given.
    """
    works: dict[fx.Graph, int] = {}
    work = _work(graph, works)
    most = _NODES + _REPEATS * sum(len(body.nodes) for body in works)
    if work > most:
        raise PassError("its nodes call bodies that call bodies, so often that it would take for ever")
    values = _Values(followed, shares=not any(map(_moves, works)))
    next_input, mode = iter(inputs), fake_mode_of(inputs)
    with mode, _counted(mode, most), groups_of_any_dtype(), _silent():
        for node in graph.nodes:
            if node.op == "placeholder":
                values.note(node, next(next_input))
            elif node.op == "get_attr":
                node.meta["val"] = getattr(graph.owning_module, str(node.target))
            elif node.op == "call_function":
                try:
                    values.note(node, values.of(node))
                except Exception as error:
                    raise PassError(
                        f"node {node.name} cannot run {node.target!s:.100} on what it is given "
                        f"({type(error).__name__}: {sentence(error)})"
                    ) from error


@contextmanager
def _counted(mode: FakeTensorMode, most: int) -> Iterator[None]:
    """Within the body, the mode runs `most` operators, those that operators consist of included.

    A loop over a dimension, or a list of its parts, would be as long as a stranger says.
    """
    left, dispatch = most, mode.dispatch

    def counted(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal left
        left -= 1 + _parts(func, args)
        if left < 0:
            raise PassError(f"{func} is called, or makes parts, so often that it would take for ever")
        return dispatch(func, types, args, kwargs)

    with mock.patch.object(mode, "dispatch", counted):
        yield


def _parts(func: Any, args: Sequence[Any]) -> int:
    """The most tensors in the list that an operator makes of the parts of one."""
    schema, whole = getattr(func, "_schema", None), args[0] if args else None
    if schema is None or not isinstance(whole, torch.Tensor) or not whole.dim():
        return 0
    if not any(str(returned.type) == "List[Tensor]" for returned in schema.returns):
        return 0
    most, by = max(size for size in (0, *whole.shape) if type(size) is int), args[1] if len(args) > 1 else 1
    if isinstance(by, list | tuple):
        return len(by)
    return most // max(by, 1) if "split" in func._opname and type(by) is int else most


@contextmanager
def _silent() -> Iterator[None]:
    """Within the body, torch logs no traceback where a fake fails, which is raised as the graph's error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


@dataclass(frozen=True)
class _Known:
    """A value, its storages, and whether they were none of those that went in."""

    value: object
    storages: frozenset[int]
    fresh: bool

    def is_fresh_of(self, known: set[int]) -> bool:
        return self.fresh and self.storages.isdisjoint(known)


class _Values:
    """The values of nodes so far, and by its facts the value of each call that others may share."""

    def __init__(self, followed: frozenset[int], *, shares: bool) -> None:
        self._followed, self._shares = followed, shares
        self._known: dict[object, _Known] = {}
        self._facts: dict[fx.Node, object] = {}
        self._touching: set[fx.Node] = set()

    def note(self, node: fx.Node, value: object) -> None:
        node.meta["val"] = value
        self._facts[node] = facts_of(value)
        if not self._followed.isdisjoint(storages_of(value)):
            self._touching.add(node)

    def of(self, node: fx.Node) -> object:
        if not self._shares or not _tells_aliases(node.target):
            return _run(node)
        key = (node.target, self._key(node.args), self._key(node.kwargs))
        known = self._known.get(key)
        inputs = {s for operand in node.all_input_nodes for s in storages_of(operand.meta["val"])}
        follows = not self._touching.isdisjoint(node.all_input_nodes)
        # Where a followed storage goes in, a value that is no view must not look like one.
        if known is not None and (not follows or known.is_fresh_of(inputs)):
            return known.value
        value = _run(node)
        storages = storages_of(value)
        if known is None and _is_static(value) and self._followed.isdisjoint(storages):
            self._known[key] = _Known(value, frozenset(storages), inputs.isdisjoint(storages))
        return value

    def _key(self, value: Any) -> object:
        if isinstance(value, fx.Node):
            return self._facts.get(value, value)
        if isinstance(value, list | tuple):
            return (type(value), *map(self._key, value))
        if isinstance(value, dict):
            return tuple((key, self._key(content)) for key, content in value.items())
        return facts_of(value)


def _moves(graph: fx.Graph) -> bool:
    """Tells whether an operator changes the sizes of its argument, and so the value of another node."""
    return any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes)


def _work(graph: fx.Graph, known: dict[fx.Graph, int]) -> int:
    """The most nodes that a run goes through; `known` then has those of each graph in this one as well."""
    if graph not in known:
        called = [body.graph for node in graph.nodes for body in subgraphs_of(node)]
        known[graph] = len(graph.nodes) + _RUNS * sum(_work(body, known) for body in called)
    return known[graph]


def _tells_aliases(target: Any) -> bool:
    """Tells whether an operator's fake has all its aliases; those of a custom one may be in its schema."""
    if not isinstance(target, OpOverload):
        return False
    return target.namespace == "aten" or not any(returned.alias_info for returned in target._schema.returns)


def _is_static(value: object) -> bool:
    """Tells whether a value consists of tensors, all of which have sizes that are numbers."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(
        isinstance(leaf, FakeTensor) and all(type(size) is int for size in (*leaf.shape, *leaf.stride()))
        for leaf in leaves
    )


def _run(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    if not isinstance(node.target, OpOverload | HigherOrderOperator):
        return _computed(node.target, args, kwargs)
    with _noting_inputs(subgraphs_of(node), pytree.tree_leaves((args, kwargs))):
        return node.target(*args, **kwargs)


def _computed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of a function on numbers. Raises TypeError or OverflowError for what could take for ever.

    Of texts and lists, functions make such as are longer: only items are taken from them, and sums.
    """
    if function not in (operator.getitem, torch.sym_sum):
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, str | list | tuple | dict):
                raise TypeError("it computes with numbers, and not with texts and lists")
        if function in _POWERS and any(
            isinstance(argument, int) and abs(argument) > _LARGEST for argument in args[1:]
        ):
            raise OverflowError(f"the number may be of more than {_LARGEST} binary digits")
    value = function(*args, **kwargs)
    if isinstance(value, int) and value.bit_length() > _LARGEST:
        raise OverflowError(f"the number is of more than {_LARGEST} binary digits")
    return value


_POWERS = (pow, operator.pow, round)


@contextmanager
def _noting_inputs(bodies: Sequence[fx.GraphModule], operands: Sequence[object]) -> Iterator[None]:
    """Gives the inputs of bodies the values that they are called with within.

    Those that are not called have the last operands, which are their inputs.
    """

    def note(body: Any, inputs: Sequence[object]) -> None:
        for placeholder, value in zip(placeholders_of(body.graph), inputs, strict=False):
            placeholder.meta["val"] = value

    with ExitStack() as hooks:
        for body in bodies:
            note(body, operands[len(operands) - len(placeholders_of(body.graph)) :])
            hooks.callback(body.register_forward_pre_hook(note).remove)
        yield
