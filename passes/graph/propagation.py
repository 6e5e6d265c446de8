"""Runs a graph on fake tensors: what every node's value looks like, shares memory with, and costs.

Fake tensors carry storages, so two values that share memory at run time share a fake storage here.
That also finds aliases that no schema declares (dropout in eval mode, `to` without effect), which
is why nothing in these passes keeps a list of view operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.flop_counter import FlopCounterMode

from penstock.passes.graph.nodes import copy_graph_module, placeholders_of, size_hint, tensors_of
from penstock.passes.weights.lifted import Weights
from penstock.passes.weights.values import tensor_in
from penstock.schedule.facts.model import Storage, Weight

FLOPS = "penstock_flops"
"""Key of `node.meta`: floating-point operations of the node at the exported sizes."""


def propagate(graph_module: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule:
    """Returns a copy of the graph whose `meta["val"]` and `meta[FLOPS]` come from running `inputs`.

    `inputs` are fake tensors and symbolic sizes of one fake mode, as `fake_inputs` makes them.
    """
    copied = copy_graph_module(graph_module)
    mode = fake_mode_of(inputs)
    # The symbols are the exported program's own: a guard added here would make its dynamic sizes static.
    with mode.shape_env.suppress_guards() if mode.shape_env else nullcontext():
        _CountingProp(copied, mode).propagate_dont_convert_inputs(*inputs)
    return copied


def fake_inputs(graph_module: fx.GraphModule, weights: Weights | None = None) -> list[object]:
    """Makes the inputs for `propagate` from the placeholders' own `meta["val"]`.

    Weights of one storage share one fake storage, which the fakes that export recorded may not.
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
    """Names the fake storages of the tensors in a nested value."""
    return [int(tensor.untyped_storage()._cdata) for tensor in tensors_of(value)]


def _attention_flops(
    query: Sequence[Any], key: Sequence[Any], value: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """Two products a head: queries by keys, and their weights by values. Takes shapes."""
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[-2] * (size + value[-1])


def _recurrent_flops(input: Sequence[Any], *shapes: Any, **kwargs: Any) -> Any:
    """One layer and direction: every row of `input` (length, batch, size) meets both matrices."""
    matrices = shapes[:2]
    return sum(2 * input[0] * input[1] * rows * columns for rows, columns in matrices)


# What torch's own registry lacks: the kernels of a CPU.
_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
}

_aten = torch.ops.aten
_IN_CXX = (_aten.baddbmm.default, _aten.pad.default, _aten.linalg_solve_triangular.default)
"""What calls others in C++, which does not know symbolic sizes; torch logs each failure."""


class _CountingProp(FakeTensorProp):
    """FakeTensorProp that also counts floating-point operations.

    The bodies of control flow are counted apart, by whoever needs them: the counter cannot enter
    every higher-order operator.
    """

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or isinstance(n.target, HigherOrderOperator):
            return super().run_node(n)
        if isinstance(n.target, partial):
            return n.meta["val"]  # what Inductor put in the place of a pattern does not run on tensors
        try:
            counter, result = self._count(n)
        except RuntimeError as error:
            if "symbolic sizes" not in str(error) and "SymInt" not in str(error):
                raise
            # C++ decomposes `linear` (in torch 2.11) and `upsample_nearest2d`, and does not know them. Only
            # here: some views become copies when Python decomposes.
            with enable_python_dispatcher():
                counter, result = self._count(n)
        n.meta[FLOPS] = size_hint(counter.get_total_flops())
        return result

    def _count(self, n: fx.Node) -> tuple[FlopCounterMode, Any]:
        in_python = enable_python_dispatcher() if n.target in _IN_CXX else nullcontext()
        with in_python, FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
            return counter, super().run_node(n)
