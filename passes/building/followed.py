"""Exports a module whose call may change more than its results, and leaves the module as it was.

A program has no attributes, no counters and no generators but torch's: an export writes what a call reads
of them into the program, as it was then. So a module that changes such state when it is called is refused by
name, unless no later call can tell: exported again, from the state that its call left, it must be the same
program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._export.verifier import SpecViolationError
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from penstock.passes.building.module_state import (
    MISSING,
    Change,
    ModuleState,
    empty_caches,
    is_same,
    noted_clocks,
)
from penstock.passes.building.refusals import own_sentence, refuse_scripted, remedy, where
from penstock.passes.graph.nodes import needed, placeholders_of, tensors_of, writes
from penstock.passes.graph.torch_state import generator_states, kept_torch_state
from penstock.passes.weights.lifted import has_values, storage_identity
from penstock.schedule.facts.errors import PassError

_NAMED = 3
"""How many changes a message names."""


def export_as_called(module: nn.Module, export: Callable[[], ExportedProgram]) -> ExportedProgram:
    """Return the program that `export` makes of a module, and undo what the call of the module changed.

    `export` calls the module once. Undone are changes of the module and of what its code uses. Raises
    PassError, by name, where the call changes something that a later call may read: an attribute, a name
    outside of functions, or a generator that is not torch's.
    """
    with kept_torch_state(), export_errors(module), empty_caches(module), _watched(module, export) as call:
        with noted_clocks(0) as clocks:
            exported, changes = call(())
        if changes or clocks:
            _refuse_state(call, exported, changes, clocks)
        return exported


@contextmanager
def export_errors(module: nn.Module) -> Iterator[None]:
    """Raise PassError, with the line of the model and advice, for errors of an export of the module."""
    try:
        yield
    except PassError:
        raise
    except Exception as error:
        # torch.export calls a scripted part with an argument too many, or finds no parameters in it.
        if isinstance(error, TypeError | SpecViolationError):
            refuse_scripted(module)
        reason = own_sentence(error).rstrip(". ")
        raise PassError(f"the model cannot be exported{where(error)}: {reason}; {remedy(error)}") from error


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Let all parts of a module be in eval mode, without methods by which a part may change its weights."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode


_Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor that a call left, and the one that stands in for it."""

_Given = Sequence[tuple[Change, Any]]
"""Changes of a module's state, and the values that they shall have."""

_Call = Callable[[_Given], tuple[ExportedProgram, list[Change]]]


@contextmanager
def _watched(module: nn.Module, export: Callable[[], ExportedProgram]) -> Iterator[_Call]:
    """A function that exports a module from its state with some changes, and returns what the call changes.

    That is taken back as soon as the call ends: torch.export would copy a buffer that is new to an input.
    """
    state: list[ModuleState] = []
    changes: list[Change] = []
    drawn: list[str] = []

    def note(*_: Any) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            now = generator_states()
            drawn.extend(name for name, value in generators.items() if not is_same(value, now[name]))
            changes[:] = state[-1].changes()
            for change in changes:
                change.give(change.old)

    def call(inputs: _Given) -> tuple[ExportedProgram, list[Change]]:
        before.restore()
        _give_attributes(module)
        for change, value in inputs:
            change.give(value)
        state.append(ModuleState(module))
        with warnings.catch_warnings(), patch.object(nn.Module, "register_buffer", _register):
            warnings.filterwarnings("ignore", "The tensor attribute", UserWarning)  # which are judged here
            exported = export()
        if drawn:
            does = "sets torch's generator" if "torch" in drawn else f"draws {drawn[0]}'s random numbers"
            raise PassError(
                f"the model {does} when it is called, which a program cannot: draw from torch's generator "
                "as it is, or give the model the numbers as an input"
            )
        return exported, list(changes)

    generators = generator_states()
    hook = module.register_forward_hook(note)
    before = ModuleState(module)
    try:
        yield call
    finally:
        before.restore()
        hook.remove()


def _give_attributes(module: nn.Module) -> None:
    """Make attributes of buffers that are None: torch.export cannot follow how a call makes a buffer."""
    for part in module.modules():
        for name in [name for name, value in part._buffers.items() if value is None]:
            vars(part)[name] = part._buffers.pop(name)


_REGISTER = nn.Module.register_buffer


def _register(part: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
    if name in part._buffers or hasattr(part, name) or not isinstance(tensor, FakeTensor):
        _REGISTER(part, name, tensor, persistent)
    else:
        vars(part)[name] = tensor


def _refuse_state(
    call: _Call, exported: ExportedProgram, changes: Sequence[Change], clocks: Sequence[str]
) -> None:
    """Raise PassError for changes that a later call could tell, by an export with them, at a later time.

    Tensors that the first call left have no values, so others stand in for them. Where the second program
    reads one, it must be a value of the first program that is the same in each call.
    """
    names = list(dict.fromkeys(change.name for change in changes))
    if changes:
        does = f"changes {', '.join(names[:_NAMED])} when it is called, and a later call may read that"
        instead = (
            "give it as an input and return it, or, if only the first call sets it, call the model before"
        )
    else:
        does, instead = f"reads {clocks[0]} when it is called", "give it as an input"
    refusal = PassError(f"the model {does}, which a program cannot: {instead}")
    stand_ins: dict[int, _Pair] = {}
    example = pytree.tree_leaves(exported.example_inputs)
    mode = next((leaf.fake_mode for leaf in example if isinstance(leaf, FakeTensor)), None)
    try:
        left = pytree.tree_map_only(
            FakeTensor, lambda fake: _stand_in(fake, stand_ins, mode), [fake.new for fake in changes]
        )
        with noted_clocks(1):
            again, more = call(list(zip(changes, left, strict=True)))
    except Exception as error:
        raise refusal from error
    sources: dict[fx.Node, int] = {}
    read: dict[fx.Node, int] = {}
    for number, (fake, changed) in enumerate(stand_ins.values()):
        if (node := _read(again, changed)) is None:
            continue
        source = _source(exported, fake)
        if source is None or any(changed is other for change in more for other in tensors_of(change.old)):
            raise refusal
        sources[source], read[node] = number, number
    if not all(map(_is_written_again, more)) or _text(exported, sources) != _text(again, read):
        raise refusal


def _stand_in(fake: FakeTensor, pairs: dict[int, _Pair], mode: FakeTensorMode | None) -> torch.Tensor:
    """A tensor of zeros that is like a fake one, or a fake one of a mode; the same one for the same one."""
    if id(fake) not in pairs:
        sizes = [*fake.shape, *fake.stride()]
        if not all(type(size) is int for size in sizes):
            raise PassError("its size depends on that of an input")
        with mode or nullcontext():
            stand_in = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
            pairs[id(fake)] = fake, stand_in.zero_()
    return pairs[id(fake)][1]


def _read(exported: ExportedProgram, value: torch.Tensor) -> fx.Node | None:
    """The placeholder of a tensor of the module that the program reads."""
    nodes = {node.name: node for node in placeholders_of(exported.graph)}
    for spec in exported.graph_signature.input_specs:
        constant_value = exported.state_dict.get(str(spec.target), exported.constants.get(str(spec.target)))
        same = isinstance(constant_value, torch.Tensor) and storage_identity(
            constant_value
        ) == storage_identity(value)
        if same and nodes[spec.arg.name].users:
            return nodes[spec.arg.name]
    return None


def _source(exported: ExportedProgram, fake: torch.Tensor) -> fx.Node | None:
    """The node of a tensor that the call left, if its value is the same in every call; otherwise None."""
    nodes, layout = list(exported.graph.nodes), _layout(fake)
    source: fx.Node | None = next(
        (node for node in nodes if node.op != "output" and _layout(node.meta.get("val")) == layout), None
    )
    if source is None:
        return None
    constant = _constants(exported)
    operands = {operand for node in nodes if writes(node) for operand in node.all_input_nodes}
    written = {storage for operand in operands for storage in _storages(operand)}
    for node in needed([source]):
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        is_input = node.op == "placeholder" and node.name not in constant
        if draws or is_input or isinstance(node.target, HigherOrderOperator) or written & _storages(node):
            return None
    return source


def _layout(value: Any) -> object:
    """Where a fake tensor lies; equal for no other one, and for nothing that is none."""
    if not isinstance(value, FakeTensor):
        return value if value is None else object()
    return (
        value.untyped_storage()._cdata,
        value.storage_offset(),
        [*value.shape],
        [*value.stride()],
        value.dtype,
    )


def _storages(node: fx.Node) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(node.meta.get("val"))}


def _constants(exported: ExportedProgram) -> set[str]:
    """The names of the inputs that are the same tensors, with the same values, in every call."""
    signature = exported.graph_signature
    changing = {*signature.buffers_to_mutate.values()}
    return {
        spec.arg.name
        for spec in signature.input_specs
        if spec.kind is not InputKind.USER_INPUT
        and spec.target not in changing
        and not getattr(exported.state_dict.get(str(spec.target)), "requires_grad", False)
    }


def _is_written_again(change: Change) -> bool:
    """Tell whether a call leaves what the call before it left, but for the values of tensors."""
    if change.old is MISSING or change.new is MISSING:
        return False
    (old, first), (new, second) = pytree.tree_flatten(change.old), pytree.tree_flatten(change.new)
    pairs = zip(old, new, strict=False)
    return first == second and all(
        (isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)) or is_same(mine, other)
        for mine, other in pairs
    )


def _text(exported: ExportedProgram, numbers: Mapping[fx.Node, int]) -> list[str]:
    """What a program computes; values that are known have `numbers`. Equal only for equal programs."""
    graph = exported.graph
    signature = exported.graph_signature
    targets = {spec.arg.name: _input(exported, spec) for spec in signature.input_specs}
    roots = [graph.output_node(), *filter(writes, graph.nodes)]
    used = needed(roots, lambda node: node not in numbers)
    names: dict[fx.Node, str] = {node: f"<known {number}>" for node, number in numbers.items()}
    lines: list[str] = []
    users = [node for node in placeholders_of(graph) if targets[node.name] == ""]
    for node in graph.nodes:
        if node in numbers or node not in used:
            continue
        if node.op == "placeholder":
            names[node] = f"<input {users.index(node)}>" if node in users else targets[node.name]
            continue
        names[node] = f"<{len(lines)}>"
        if node.op == "get_attr":
            body = getattr(graph.owning_module, str(node.target))
            graph_modules = (module for module in body.modules() if isinstance(module, fx.GraphModule))
            lines.append("".join(module.code for module in graph_modules))
        else:
            args = fx.map_arg((node.args, dict(node.kwargs)), names.__getitem__)
            lines.append(f"{node.op} {'' if node.op == 'output' else node.target} {args}")
    return [*lines, *(f"{spec.kind} {spec.target}" for spec in signature.output_specs)]


def _input(exported: ExportedProgram, spec: Any) -> str:
    """What an input is: the name of a weight, the values of a constant, nothing for what a call gives."""
    if spec.kind is InputKind.USER_INPUT:
        return ""
    if spec.kind is InputKind.CONSTANT_TENSOR:
        value = exported.constants[spec.target]
        content = value.tolist() if has_values(value) else id(value)
        return f"<constant {value.dtype} {[*value.shape]} {content}>"
    return f"<weight {spec.target}>"
