"""What torch's other ways to make a program leave in it: tokens that order effects, and fakes that compute.

`run_decompositions` hands a token from each operator with an effect to the next, such as one that checks for
errors; a graph runs its nodes in order anyway. `draft_export` gives fake tensors real values, which they
compute with wherever they are used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export._remove_effect_tokens_pass import _remove_effect_tokens
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import copy_graph_module, placeholders_of, tensors_of
from penstock.passes.pipeline import declare


@declare(ensures=("no tokens",))
def without_tokens(exported: ExportedProgram) -> ExportedProgram:
    """Return a copy of the program without tokens, or the program if it has none."""
    if all(spec.kind is not OutputKind.TOKEN for spec in exported.graph_signature.output_specs):
        return exported
    result = copy.copy(exported)
    result._graph_module = copy_graph_module(exported.graph_module)
    result._graph_signature = copy.deepcopy(exported.graph_signature)
    return _remove_effect_tokens(result)


@declare(ensures=("plain fakes",))
def with_plain_fakes(exported: ExportedProgram) -> ExportedProgram:
    """Return a copy of the program whose fake tensors have no values, or the program if none has."""
    recorded = tensors_of([node.meta.get("val") for node in placeholders_of(exported.graph)])
    mode = next((tensor.fake_mode for tensor in recorded if isinstance(tensor, FakeTensor)), None)
    if mode is None or not mode.propagate_real_tensors:
        return exported
    plain = _plain_in(FakeTensorMode(shape_env=mode.shape_env))
    result = copy.copy(exported)
    result._graph_module = copy_graph_module(exported.graph_module)
    for module in result._graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if "val" in node.meta:
                node.meta = {**node.meta, "val": pytree.tree_map(plain, node.meta["val"])}
    return result


def _plain_in(mode: FakeTensorMode) -> Callable[[Any], Any]:
    def plain(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with mode:
            memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return memory.requires_grad_(value.requires_grad)

    return plain
