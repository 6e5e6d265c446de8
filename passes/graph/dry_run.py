"""Runs a graph that has no values yet on fake tensors, once for each operator on arguments that are alike."""

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
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils import _pytree as pytree

from penstock.passes.building.refusals import sentence
from penstock.passes.graph.nodes import placeholders_of, subgraphs_of
from penstock.passes.graph.propagation import facts_of, fake_mode_of, groups_of_any_dtype, storages_of
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.schedule.facts.errors import PassError

NAMESPACE = "penstock_in_place"

_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def as_function(operator: OpOverload) -> OpOverload:
    """The function of an in-place operator of aten, of which `is_in_place` is true."""
    name, overload = str(operator._opname), operator._overloadname
    packet = getattr(getattr(torch.ops, NAMESPACE), name, None)
    if packet is None or overload not in packet.overloads():
        _declare(operator)
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
    named_operator: OpOverload = getattr(packet, overload)
    return named_operator


def named(name: str, overload: str) -> OpOverload | None:
    """The function of the in-place operator of a name; None where aten has none."""
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return as_function(operator) if operator is not None and is_in_place(operator) else None


def is_in_place(operator: Any) -> bool:
    """Tells whether an operator of aten writes to its first argument alone, and returns it as large."""
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return False
    schema = operator._schema
    written = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    ]
    returned = [
        returned.alias_info is not None and returned.alias_info.is_write for returned in schema.returns
    ]
    moved = torch.Tag.inplace_view in operator.tags or operator._opname in ("set_", "resize_", "resize_as_")
    return bool(written) and written[0] and sum(written) == 1 and returned == [True] and not moved


def is_dense(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of static size has its elements close together, in any order."""
    if not _is_static_tensor(tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _declare(operator: OpOverload) -> None:
    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = self.new_empty_strided(self.size(), self.stride()).copy_(self)
        result: torch.Tensor = operator(copied, *args, **kwargs)
        return result

    def fake(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.new_empty_strided(self.size(), self.stride())

    name = operator._schema.name.removeprefix("aten::")
    arguments = str(operator._schema).partition("(")[2].replace("(a!)", "")
    full = f"{name}.{operator._overloadname}" if operator._overloadname != "default" else name
    tags = [tag for tag in (torch.Tag.nondeterministic_seeded, torch.Tag.pointwise) if tag in operator.tags]
    _LIBRARY.define(f"{full}({arguments}", tags=tags)
    _LIBRARY.impl(full, kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(full, kernel, "Autograd")  # so that autograd goes through what it calls
    torch.library.register_fake(f"{NAMESPACE}::{full}", fake, lib=_LIBRARY)


_OTHER_GRADIENTS = (torch.ops.aten.elu_.default, torch.ops.aten.copy_.default)
"""Operators whose functions in aten have another formula of the gradient, or none."""


@contextmanager
def layouts_kept(*, differentiated: bool = False) -> Iterator[None]:
    """Has torch make functional graphs in which what is written in place keeps its layout.

    With `differentiated`, autograd goes through what the graphs call, and finds the gradients of what the
    program calls. Raises PassError within for an operator that would change it. Only one thread may be in
    here.
    """
    dispatch: Any = FunctionalTensorMode.__torch_dispatch__

    def run_or_keep(
        self: FunctionalTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        other = differentiated and func in _OTHER_GRADIENTS
        writes = is_in_place(func) and isinstance(args[0], FunctionalTensor)
        if writes and (other or not _is_kept(func, args, kwargs)):
            functional = dispatch(self, as_function(_with_numbers(func, args)), types, args, kwargs)
            args[0].replace_(functional.from_functional())
            args[0].commit_update()
            args[0].sync()
            return args[0]
        result = dispatch(self, func, types, args, kwargs)
        _check(func, args, kwargs or {})
        return result

    with mock.patch.object(FunctionalTensorMode, "__torch_dispatch__", run_or_keep):
        yield


def _with_numbers(operator: OpOverload, args: Any) -> OpOverload:
    """The overload that takes numbers where one for tensors is given them, as PyTorch allows of its own."""
    pairs = zip(operator._schema.arguments, args, strict=False)
    if any(isinstance(value, int | float | complex) and str(a.type) == "Tensor" for a, value in pairs):
        name = operator._overloadname.replace("Tensor", "Scalar")
        overload: OpOverload = getattr(operator.overloadpacket, name, operator)
        return overload
    return operator


def _is_kept(operator: OpOverload, args: Any, kwargs: Any) -> bool:
    """Tells whether the function of aten lays its result out as the in-place operator does."""
    written = args[0]
    if operator is torch.ops.aten.copy_.default or is_contiguous_or_false(written):
        return True
    if torch.Tag.pointwise not in operator.tags or not is_dense(written):
        return False
    tensors = [value for value in (*args[1:], *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
    return all(
        not tensor.dim() or (_is_static_tensor(tensor) and _layout(tensor) == _layout(written))
        for tensor in tensors
    )


def _is_static_tensor(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.stride())


def _check(operator: Any, args: Any, kwargs: Any) -> None:
    """Raises PassError where a tensor that an operator writes to does not lie as it lay before."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable or torch.Tag.inplace_view in operator.tags:
        return
    arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        value = arguments.get(argument.name)
        if argument.alias_info is None or not isinstance(value, FunctionalTensor):
            continue
        now = torch._from_functional_tensor(value.elem)
        if _is_static_tensor(now) and _is_static_tensor(value) and _strides(now) != _strides(value):
            raise PassError(
                f"{operator} writes to a tensor of the strides {value.stride()}, which in a graph without "
                f"writes has {now.stride()}, so that gradients may differ in their bits: give it a "
                "contiguous() tensor, or use the operator that returns a new one"
            )


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


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
    """Let the mode run at most `most` operators: a loop over a dimension is as long as a stranger says."""
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
    """Keep torch from logging the traceback of a fake operator that fails: its error is raised anyway."""
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
        earlier = self._known.get(key)
        inputs = {s for operand in node.all_input_nodes for s in storages_of(operand.meta["val"])}
        follows = not self._touching.isdisjoint(node.all_input_nodes)
        # Where a followed storage goes in, a value that is no view must not look like one.
        if earlier is not None and (not follows or earlier.is_fresh_of(inputs)):
            return earlier.value
        value = _run(node)
        storages = storages_of(value)
        if earlier is None and _is_static(value) and self._followed.isdisjoint(storages):
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


def _work(graph: fx.Graph, work_of: dict[fx.Graph, int]) -> int:
    """The most nodes that a run goes through; `work_of` then has those of each graph in this one as well."""
    if graph not in work_of:
        called = [body.graph for node in graph.nodes for body in subgraphs_of(node)]
        work_of[graph] = len(graph.nodes) + _RUNS * sum(_work(body, work_of) for body in called)
    return work_of[graph]


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

    Of texts and lists, only items and sums are computed, since other functions could make very long ones.
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
    """Give the inputs of bodies the values that they are called with, or else the last operands."""

    def note(body: Any, inputs: Sequence[object]) -> None:
        for placeholder, value in zip(placeholders_of(body.graph), inputs, strict=False):
            placeholder.meta["val"] = value

    with ExitStack() as hooks:
        for body in bodies:
            note(body, operands[len(operands) - len(placeholders_of(body.graph)) :])
            hooks.callback(body.register_forward_pre_hook(note).remove)
        yield
