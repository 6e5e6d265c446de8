"""Runs a graph on fake tensors, which gives the shape, the storage and the cost of every node's value."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._meta_registrations as meta
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from penstock.passes.building.refusals import sentence
from penstock.passes.graph.nodes import (
    CALLS,
    called,
    copy_graph_module,
    is_opaque,
    placeholders_of,
    size_hint,
    tensors_of,
    use_aten_operators,
    written_values,
)
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.weights.lifted import Weights, tensor_in
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Storage, Weight

_CHECKED = "_meta_grouped_mm_common"
"""The function of torch that checks the operands and makes the result."""

_LOCK = threading.RLock()
"""Held while torch's function is replaced."""

_ROW = 16
"""Bytes of which the length of a row is a multiple."""


@contextmanager
def groups_of_any_dtype() -> Iterator[None]:
    """Within the body, fake products of groups take float32 and float16, too."""
    checked = getattr(meta, _CHECKED, None)  # not in every version of torch
    if checked is None:
        yield
        return

    def lenient(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = left.dtype
        if dtype not in (torch.float32, torch.float16) or right.dtype != dtype:
            product: torch.Tensor = checked(left, right, *args, **kwargs)
            return product
        product = checked(left.to(torch.bfloat16), right.to(torch.bfloat16), *args, **kwargs)
        if dtype == torch.float16:
            return product.to(dtype)
        *outer, rows, length = product.shape
        step = _ROW // dtype.itemsize
        width = (length + step - 1) // step * step
        strides = ([rows * width] if outer else []) + [width, 1]
        return torch.empty_strided(product.shape, strides, dtype=dtype, device=product.device)

    with _LOCK, patch.object(meta, _CHECKED, lenient):
        yield


_aten = torch.ops.aten
_OPERANDS = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten._native_batch_norm_legit_no_training.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}
"""The operators whose first result lies as the kernel has it, and the position of its operand."""


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Within the body, fake batch norms have the strides of the kernels on a CPU."""
    right = {
        operator: _with_strides(decomposition_table[operator], position)
        for operator, position in _OPERANDS.items()
        if operator in decomposition_table
    }
    with patch.dict(decomposition_table, right):
        _forget()
        try:
            yield
        finally:
            _forget()


def _with_strides(fake: Callable[..., Any], position: int) -> Callable[..., Any]:
    @functools.wraps(fake)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        first, *results = fake(*args, **kwargs)
        operand: torch.Tensor = args[position]
        if first is not None and operand.device.type == "cpu":
            first = first.contiguous(memory_format=suggest_memory_format(operand))
        return (first, *results)

    return laid_out


def _forget() -> None:
    """Drop what torch remembers of these fakes."""
    for key in [key for key in FakeTensorMode.cache if key.key[0] in _OPERANDS]:
        del FakeTensorMode.cache[key]


FLOPS = "penstock_flops"
"""The key in `node.meta` of the node's floating-point operations at the exported sizes."""

WRITTEN = "penstock_written"
"""The key in `node.meta` of the fake storages that a call of a function without a schema has written."""


@kept_torch_state()
def propagate(graph_module: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule:
    """Returns a copy of the graph whose `meta["val"]` and `meta[FLOPS]` come from running it on `inputs`.

    The copy calls ATen's operators where the graph calls those of another dialect. `inputs` are fake tensors
    and symbolic sizes of one fake mode, as `fake_inputs` makes them. Raises PassError for a value without
    memory of its own, such as a sparse tensor.
    """
    copied = copy_graph_module(graph_module)
    use_aten_operators(copied)
    mode = fake_mode_of(inputs)
    # The symbols are the exported program's own: a guard added here would make its dynamic sizes static.
    unguarded = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
    with unguarded, groups_of_any_dtype():
        try:
            _CountingProp(copied, mode).propagate_dont_convert_inputs(*inputs)
        except NotImplementedError as error:
            raise PassError(
                f"the program computes a value whose memory cannot be found ({sentence(error)}), such as a "
                "sparse tensor: export it without"
            ) from error
    return copied


def is_propagated(graph_module: fx.GraphModule) -> bool:
    """Tells whether a graph of nodes that were propagated in another one needs not be propagated itself.

    What a node makes must share no memory with an input or with what another node makes: here it is computed
    from other values than there. Nor is a graph taken for propagated that has control flow.
    """
    seen: set[int] = set()
    for node in graph_module.graph.nodes:
        if node.op not in ("placeholder", "output") and FLOPS not in node.meta:
            return False
        storages = storages_of(node.meta.get("val"))
        operand_storages = {
            s for operand in node.all_input_nodes for s in storages_of(operand.meta.get("val"))
        }
        if node.op == "call_function" and not seen.isdisjoint(set(storages) - operand_storages):
            return False
        seen.update(storages)
    return True


def fake_inputs(graph_module: fx.GraphModule, weights: Weights | None = None) -> list[object]:
    """Makes the inputs for `propagate` from the placeholders' own `meta["val"]`.

    Weights of one storage share one fake storage, unlike the fake tensors that export recorded.
    """
    recorded = {node.name: node.meta.get("val") for node in placeholders_of(graph_module.graph)}
    mode = fake_mode_of(list(recorded.values()))
    bases: dict[int, torch.Tensor] = {}

    def fake(weight: Weight, storages: Sequence[Storage]) -> torch.Tensor:
        number = weight.parts[0].storage
        if number not in bases:
            bases[number] = torch.empty(storages[number].nbytes, dtype=torch.uint8, device=weight.device)
        return tensor_in(bases[number], weight.parts[0])

    with mode:
        return [
            fake(weights.held[name], weights.storages)
            if weights is not None and name in weights.held
            # Detached, so that running the graph cannot change the metadata of export's own fake.
            else (value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in recorded.items()
        ]


def fake_mode_of(values: Sequence[object]) -> FakeTensorMode:
    """Returns the fake mode of the first fake tensor among `values`, or a new one."""
    for tensor in tensors_of(values):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode()


def storages_of(value: object) -> list[int]:
    """Returns a number for the fake storage of each tensor in a nested value, equal for the same storage."""
    return [int(tensor.untyped_storage()._cdata) for tensor in tensors_of(value)]


def _attention_flops(
    query: Sequence[Any], key: Sequence[Any], value: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Two matrix products for each head: queries by keys, and their weights by values. Takes shapes."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[-2] * (size + value[-1])


def _recurrent_flops(input: Sequence[Any], *shapes: Any, **kwargs: Any) -> Any:
    """One layer in one direction: both matrices multiply each row of `input` (length, batch, size)."""
    matrices = shapes[:2]
    return sum(2 * input[0] * input[1] * rows * columns for rows, columns in matrices)


# Operators of a CPU that torch's own registry of formulas does not have.
_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
}

_IN_CXX = (_aten.baddbmm.default, _aten.pad.default, _aten.linalg_solve_triangular.default)
"""Operators that call others in C++, which fails with symbolic sizes; torch logs each failure."""


_PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class _Known:
    """What the first run of an operator on values of some facts found out about all runs on such values."""

    flops: object
    layout: object
    aliases: object


class _CountingProp(FakeTensorProp):
    """FakeTensorProp that also counts floating-point operations.

    It does not count those in the bodies of control flow, since the counter cannot enter every
    higher-order operator; `work_of` of `passes/trace.py` counts them.

    Layers repeat, and an operator does the same on values of the same facts: it is counted once. Nor is it
    run again where the value that its node has recorded has the layout that the first run gave, and shares
    memory with the same arguments and with no other value.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counted: dict[object, _Known] = {}
        self._flops: object = 0
        self._written: set[int] = set()
        self._storages: set[int] = set()
        targets = (node.target for node in self.graph.nodes)
        # An operator that changes the sizes of its argument in place would change the recorded value.
        self._reuses = not any(torch.Tag.inplace_view in getattr(target, "tags", ()) for target in targets)

    def run_node(self, n: fx.Node) -> Any:
        result = self._recorded(n)
        if result is None:
            result = self._run(n)
        self._storages.update(storages_of(result))
        return result

    def _run(self, n: fx.Node) -> Any:
        if is_opaque(n) or isinstance(n.target, HigherOrderOperator):
            return self._run_unknown(n)
        if n.op not in CALLS:
            return super().run_node(n)
        try:
            result = super().run_node(n)
        except RuntimeError:
            # C++ decomposes `linear` (in torch 2.11), `upsample_nearest2d`, `bilinear`, `fft_irfft` and
            # `istft`, and then fails, most of them with symbolic sizes. Python decomposes them only here,
            # because it turns some views into copies.
            with enable_python_dispatcher():
                result = super().run_node(n)
        n.meta[FLOPS] = self._flops
        if not isinstance(n.target, OpOverload):
            n.meta[WRITTEN] = frozenset(self._written)
        return result

    def _run_unknown(self, n: fx.Node) -> Any:
        """Runs what has no schema. It may need real tensors: then the recorded value counts."""
        if isinstance(n.target, partial):
            return n.meta["val"]  # a placeholder of Inductor's for a pattern, which does not run on tensors
        try:
            return super().run_node(n)
        except Exception as error:
            if isinstance(n.target, HigherOrderOperator) and "could not find kernel" not in str(error):
                raise
            if "val" in n.meta:
                return n.meta["val"]
            raise PassError(
                f"node {n.name!r} calls {called(n)}, which cannot run on tensors without values "
                f"({type(error).__name__}: {sentence(error)}): register it as an operator with a fake "
                "implementation (torch.library.custom_op)"
            ) from error

    def _recorded(self, n: fx.Node) -> Any:
        """The value that a node has recorded, where to run it would give one like it; otherwise None."""
        value = n.meta.get("val")
        if not self._reuses or not isinstance(n.target, OpOverload) or not _is_fake(value, self._mode):
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        counted = self._counted.get((n.target, facts_of(args), facts_of(kwargs)))
        if counted is None or counted.layout != _layout(value):
            return None
        own_storages = set(storages_of(value)).difference(storages_of((args, kwargs)))
        if not own_storages.isdisjoint(self._storages) or counted.aliases != _aliases(value, (args, kwargs)):
            return None
        n.meta[FLOPS] = counted.flops
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        self._written = set()
        if not isinstance(target, OpOverload) and storages_of((args, kwargs)):
            with _Counter() as counter, _Writes(self._written):
                result = super().call_function(target, args, kwargs)
            self._flops = size_hint(counter.get_total_flops())
            return result
        facts = (target, facts_of(args), facts_of(kwargs))
        if facts in self._counted:
            self._flops = self._counted[facts].flops
            with suppress(RuntimeError):  # symbolic sizes may be too much for C++, and not for the counter
                return super().call_function(target, args, kwargs)
        in_python = enable_python_dispatcher() if target in _IN_CXX else nullcontext()
        with in_python, _Counter() as counter:
            result = super().call_function(target, args, kwargs)
        self._flops = size_hint(counter.get_total_flops())
        self._counted[facts] = _Known(self._flops, _layout(result), _aliases(result, (args, kwargs)))
        return result

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call_function(getattr(type(args[0]), str(target)), args, kwargs)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the fake storages that the operators write which a function without a schema calls."""

    def __init__(self, written: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = written

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._written.update(storages_of(list(written_values(func, args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


class _Unregistered(ModuleTracker):
    """A tracker that follows no modules: hooks on all modules would be seen in other threads."""

    def __enter__(self) -> _Unregistered:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Counter(FlopCounterMode):
    """Counts the floating-point operations of what runs, and registers no hooks on modules."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_FORMULAS)
        self.mod_tracker = _Unregistered()


def _is_fake(value: object, mode: FakeTensorMode) -> bool:
    """Tells whether a nested value is of fake tensors of a mode, and of nothing else."""
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, FakeTensor) and leaf.fake_mode is mode for leaf in leaves)


def _layout(value: object) -> object:
    """Where the elements of the tensors of a nested value lie, and how large their storages are."""
    return [
        (facts_of(tensor), facts_of((tensor.storage_offset(), tensor.untyped_storage().nbytes())))
        for tensor in tensors_of(value)
    ]


def _aliases(value: object, inputs: object) -> list[tuple[int, ...]]:
    """For each tensor of a value, which of the given tensors and of the value's own share its storage."""
    storages = [*storages_of(inputs), *storages_of(value)]
    return [
        tuple(k for k, other in enumerate(storages) if other == storage) for storage in storages_of(value)
    ]


def facts_of(value: Any) -> object:
    """What decides about an operator's work, of its arguments: hashable, and equal only where that is."""
    if isinstance(value, torch.Tensor):
        bits = (value.is_conj(), value.is_neg())  # seen as others than those in memory
        return (value.dtype, value.device, facts_of(tuple(value.shape)), facts_of(value.stride()), bits)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return (type(value), value.node.expr)
    if isinstance(value, list | tuple):
        return (type(value), *map(facts_of, value))
    if isinstance(value, dict):
        return tuple((key, facts_of(content)) for key, content in value.items())
    if value is None or isinstance(value, _PLAIN):
        return (type(value), value)
    return object()  # equal to nothing
