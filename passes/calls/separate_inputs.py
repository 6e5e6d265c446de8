"""Keeps inputs apart that are one tensor in the example of an export.

torch.export finds the inputs of a program by the tensors of its example. Of a tensor that stands there twice
it knows the last place alone: the program reads that input wherever the model reads any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import placeholders_of
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError


def separate_inputs(module: nn.Module, example: Any) -> Any:
    """Return an example in which no tensor stands twice, nor one of the module's own: views take their
    places."""
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def separate(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in seen:
            seen.add(id(value))
            return value
        return value.detach().requires_grad_(value.requires_grad)

    return pytree.tree_map_only(torch.Tensor, separate, example)


@declare(ensures=("separate inputs",))
def refuse_shared_inputs(exported: ExportedProgram) -> ExportedProgram:
    """Return the program; raise PassError if it reads one input in the place of another.

    That is known where its example has one tensor for both, and only one of them is used.
    """
    inputs = list(_inputs(exported))
    read = {(id(value), of_call): name for node, name, value, of_call in inputs if node.users}
    for node, name, value, of_call in inputs:
        other = read.get((id(value), True)) or (of_call and read.get((id(value), False)))
        if other and not node.users:
            raise PassError(
                f"the program was exported with one tensor for {name} and {other}, and reads the latter for "
                "both: export it again with a clone() of the tensor for one of them"
            )
    return exported


def _inputs(exported: ExportedProgram) -> Iterator[tuple[fx.Node, str, object, bool]]:
    """The inputs of a program: what users call them, the tensors of its export, and whether a call gives
    them."""
    nodes = {node.name: node for node in placeholders_of(exported.graph)}
    specs = exported.graph_signature.input_specs
    leaves = iter(pytree.tree_leaves(exported.example_inputs or ()))
    for spec in specs:
        node, of_call = nodes[spec.arg.name], spec.kind is InputKind.USER_INPUT
        if of_call:
            value, name = next(leaves, None), f"input {node.name!r}"
        else:
            tensors = exported.constants if spec.target in exported.constants else exported.state_dict
            value, name = tensors.get(str(spec.target)), f"its {spec.kind.name.lower()} {spec.target!r}"
        if isinstance(value, torch.Tensor):
            yield node, name, value, of_call
