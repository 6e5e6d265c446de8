"""The forward of a program by itself: nothing is kept, and the parameters that are trained are inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec
from torch.utils import _pytree as pytree

from penstock.passes.graph.nodes import copy_graph_module
from penstock.passes.training.aligned import codes, is_equal
from penstock.passes.training.facts import TRAINABLE
from penstock.schedule.facts.errors import PassError


def alone(exported: ExportedProgram, parameters: Sequence[str]) -> ExportedProgram:
    """Returns a program that computes the same, and takes parameters, by FQN, behind its own inputs.

    Its graph is that of the program, so it calls what the program calls where nothing is differentiated.
    Raises PassError for a parameter that the program does not have.
    """
    graph_module = copy_graph_module(exported.graph_module)
    nodes: dict[str, fx.Node] = {}
    for before, node in zip(exported.graph.nodes, graph_module.graph.nodes, strict=True):
        node.name = before.name  # copying renames what is a builtin of Python, such as `input`
        nodes[node.name] = node
    specs = list(exported.graph_signature.input_specs)
    last = nodes[specs[-1].arg.name]
    for fqn in parameters:
        spec = next((s for s in specs if s.kind is InputKind.PARAMETER and s.target == fqn), None)
        if spec is None:
            raise PassError(f"the program has no parameter {fqn}: export the model in which it is trained")
        specs.remove(spec)
        specs.append(InputSpec(InputKind.USER_INPUT, spec.arg, None))
        if nodes[spec.arg.name] is not last:
            last.append(nodes[spec.arg.name])
            last = nodes[spec.arg.name]
    names, called, result = call_with(exported, [*parameters])
    targets = {str(spec.target) for spec in specs}
    (_, in_spec), (_, out_spec) = pytree.tree_flatten(called), pytree.tree_flatten(result)
    program = ExportedProgram(
        graph_module,
        graph_module.graph,
        ExportGraphSignature(specs, list(exported.graph_signature.output_specs)),
        {name: value for name, value in exported.state_dict.items() if name in targets},
        exported.range_constraints,
        [ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec, names))],
        None,
        {name: value for name, value in exported.constants.items() if name in targets},
        verifiers=exported.verifiers,
    )
    program._guards_code = exported._guards_code
    program.graph_module.meta.update(exported.graph_module.meta)  # parts of weights, and values of buffers
    return program


def call_with(exported: ExportedProgram, trained: Sequence[Any]) -> tuple[list[str] | None, Any, Any]:
    """The names of the arguments of a program that is given parameters, its call, and the program's result.

    The last two are trees, whose leaves mean nothing. Raises PassError for a program that has an argument of
    the name by which they are given.
    """
    spec = exported.call_spec
    args, kwargs = pytree.tree_unflatten(list(range(spec.in_spec.num_leaves)), spec.in_spec)
    if TRAINABLE in kwargs:
        raise PassError(
            f"the program takes an argument {TRAINABLE!r}, by which penstock gives parameters: rename it"
        )
    call = exported.module_call_graph[0].signature
    names = call and call.forward_arg_names
    result = pytree.tree_unflatten(list(range(spec.out_spec.num_leaves)), spec.out_spec)
    return names and [*names, TRAINABLE], (args, {**kwargs, TRAINABLE: [*trained]}), result


def is_same(first: ExportedProgram, other: ExportedProgram) -> bool:
    """Tells whether two exports of a module are one program; it is certain only where it says so."""
    return (
        str(first.graph_signature) == str(other.graph_signature)
        and codes(first.graph_module) == codes(other.graph_module)
        and first.constants.keys() == other.constants.keys()
        and all(is_equal(value, other.constants[name]) for name, value in first.constants.items())
    )
