"""The call of a program: what goes in, what comes out and what is written back, as facts and as calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind
from torch.utils import _pytree as pytree

from penstock.passes.calls.expressions import parse
from penstock.passes.calls.inputs import (
    InputChecks,
    Leaf,
    TensorLeaf,
    checked,
    guards_of,
    leaves_of,
    refuse,
    user_placeholders,
)
from penstock.passes.calls.stored_graph import Values, decode_value, encode_value
from penstock.passes.calls.tracers import refuse_tracers
from penstock.passes.graph.nodes import exported_device
from penstock.passes.pipeline import declare
from penstock.schedule.facts.errors import PassError, StreamError

_WRITTEN_BACK = {OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION}
_UNDERSTOOD = {*_WRITTEN_BACK, OutputKind.USER_OUTPUT}


@dataclass(frozen=True)
class CallSignature:
    """The structure of a call's inputs and result, its leaves, and the meaning of the graph's flat outputs.

    Output i is written back to input leaf `to_leaf[i]` or to weight `to_weight[i]`; otherwise it is the next
    of `results` results. Result k is `constants[k]` if its value was fixed at export. A guard is a pair: its
    text, and an expression (`expressions.py`).
    """

    device: torch.device
    in_spec: pytree.TreeSpec | None
    out_spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    guards: tuple[tuple[str, str], ...]
    to_leaf: Mapping[int, int]
    to_weight: Mapping[int, str]
    results: int
    constants: Mapping[int, Any]


@declare(requires=("one grad mode",), ensures=("known signature",))
def check_signature(exported: ExportedProgram) -> ExportedProgram:
    """Returns the program; raises PassError if its calls could not be checked or written back.

    It is raised for outputs that are neither results nor mutations, and for guards that no call can check.
    """
    guards_of(exported)
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in _UNDERSTOOD:
            raise PassError(
                f"output {spec.arg.name!r} is a {spec.kind.name.lower()}, expected results and mutations: "
                "export the model for inference"
            )
    return exported


def signature_of(exported: ExportedProgram) -> CallSignature:
    """Returns the signature of a program. Raises PassError for a program that `check_signature` refuses."""
    names = [node.name for node in user_placeholders(exported)]
    specs = exported.graph_signature.output_specs
    results = [spec.arg for spec in specs if spec.kind not in _WRITTEN_BACK]
    inputs = {i: str(s.target) for i, s in enumerate(specs) if s.kind is OutputKind.USER_INPUT_MUTATION}
    written = {i: str(s.target) for i, s in enumerate(specs) if s.kind in _WRITTEN_BACK and i not in inputs}
    return CallSignature(
        device=exported_device(exported.graph_module),
        in_spec=exported.call_spec.in_spec,
        out_spec=exported.call_spec.out_spec,
        leaves=leaves_of(exported),
        guards=guards_of(exported),
        to_leaf={position: names.index(target) for position, target in inputs.items()},
        to_weight=written,
        results=len(results),
        constants={k: arg.value for k, arg in enumerate(results) if isinstance(arg, ConstantArgument)},
    )


def output_names(signature: CallSignature) -> tuple[str, ...]:
    """The name of each result that is no constant, from its path in the structure of the results."""
    tree = pytree.tree_unflatten(list(range(signature.results)), signature.out_spec)
    paths = [path for path, _ in pytree.tree_leaves_with_path(tree)]
    return tuple(path_name(path) for k, path in enumerate(paths) if k not in signature.constants)


def path_name(path: pytree.KeyPath) -> str:
    """The name of a leaf in a file of outputs: its path without outer signs, `output` if it has none."""
    return pytree.keystr(path).strip(".[]'") or "output"


def encode_signature(signature: CallSignature) -> dict[str, Any]:
    """The signature in plain JSON values.

    Raises PassError for a value that has no form in JSON, and for a class in its trees that was registered
    without a name.
    """
    return {field.name: encode_value(getattr(signature, field.name)) for field in fields(signature)}


def decode_signature(stored: Any, *, trust: bool = False) -> CallSignature:
    """The signature that `encode_signature` stored.

    Raises PassError for JSON that is none, and for a class that nothing has registered in this process. With
    `trust` it may have classes that torch imports.
    """
    names = {field.name for field in fields(CallSignature)}
    if not isinstance(stored, dict) or stored.keys() != names:
        refuse(stored, "signature of a call")
    values = Values(None, trust)
    decoded = checked(CallSignature(**{name: decode_value(value, values) for name, value in stored.items()}))
    trees = 0 if decoded.in_spec is None else decoded.in_spec.num_leaves
    fits = decoded.in_spec is None or (trees == len(decoded.leaves) and _is_call(decoded.in_spec))
    if (
        not fits
        or decoded.results != decoded.out_spec.num_leaves
        or decoded.constants.keys() - set(range(decoded.results))
    ):
        raise PassError(
            f"a call of {len(decoded.leaves)} inputs and {decoded.results} results does not fit the "
            f"structures of {trees} and {decoded.out_spec.num_leaves}: compile again"
        )
    for _, source in decoded.guards:
        parse(source)
    return decoded


def _is_call(spec: pytree.TreeSpec) -> bool:
    """Tells whether a structure is of positional arguments and keyword arguments."""
    parts = spec.children()
    return spec.type is tuple and [part.type for part in parts] == [tuple, dict]


class CallingConvention:
    """Turns a call's arguments into checked leaves, and flat values into the call's result.

    `names` are the names of the leaves. Leaves that were on the exported program's device must be on
    `target`.
    """

    def __init__(self, signature: CallSignature, target: torch.device) -> None:
        self._in_spec = signature.in_spec
        self._out_spec = signature.out_spec
        self._flat = _is_flat(self._in_spec)
        self._keywords: list[str] = list(self._in_spec.children()[1].context or ()) if self._in_spec else []
        leaves = [_moved(leaf, signature.device, target) for leaf in signature.leaves]
        self.names = [leaf.name for leaf in leaves]
        self._checks = InputChecks(leaves, signature.guards)
        self._to_leaf, self._to_weight = signature.to_leaf, signature.to_weight

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the leaves in the graph's order.

        Keyword arguments may come in any order. Raises StreamError for arguments of another structure than
        the exported ones, for a leaf that `InputChecks` refuses, and within a tracer of torch's.
        """
        if self._flat and not kwargs and all(type(arg) is torch.Tensor for arg in args):
            leaves = list(args)
            if len(leaves) == self._flat:
                refuse_tracers(leaves)
                self._checks.check(leaves)
                return leaves
        if kwargs.keys() == set(self._keywords):
            kwargs = {name: kwargs[name] for name in self._keywords}
        leaves, received = pytree.tree_flatten((args, dict(kwargs)))
        if self._in_spec is not None and received != self._in_spec:
            raise StreamError(_describe_mismatch(self._in_spec, received, self.names))
        refuse_tracers(leaves)
        self._checks.check(leaves)
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns positional and keyword arguments from leaves in the graph's order."""
        if self._in_spec is None:
            return tuple(leaves), {}
        args, kwargs = pytree.tree_unflatten(list(leaves), self._in_spec)
        return args, kwargs

    def finish(
        self, values: Sequence[Any], leaves: Sequence[Any], tensors: Mapping[str, torch.Tensor]
    ) -> Any:
        """Writes mutated inputs and weights back, and returns the results in the caller's structure.

        `values` are the flat outputs of a functional program, and `tensors` the bound weights by FQN.
        """
        results = []
        for position, value in enumerate(values):
            if position in self._to_leaf:
                leaves[self._to_leaf[position]].copy_(value)
            elif position in self._to_weight:
                tensors[self._to_weight[position]].copy_(value)
            else:
                results.append(value)
        return self.unflatten_results(results)

    def unflatten_results(self, results: list[Any]) -> Any:
        """Returns flat results in the structure of the exported module's result."""
        return pytree.tree_unflatten(results, self._out_spec)


def _moved(leaf: Leaf, source: torch.device, target: torch.device) -> Leaf:
    if isinstance(leaf, TensorLeaf) and leaf.device == source.type:
        return replace(leaf, device=target.type)
    return leaf


def _is_flat(spec: pytree.TreeSpec | None) -> int:
    """The number of positional arguments if all are leaves and there are no keyword arguments; else 0."""
    if spec is None:
        return 0
    positional, keywords = spec.children()
    nested = keywords.num_children or any(not child.is_leaf() for child in positional.children())
    return 0 if nested else positional.num_children


def _describe_mismatch(expected: pytree.TreeSpec, got: pytree.TreeSpec, leaves: Sequence[str]) -> str:
    """Say which arguments are missing, too many or of another structure; `leaves` are names of `expected`."""
    names, keywords = _names(expected, leaves), _keywords(expected)
    takes = ", ".join(names) + (", *, " if names else "*, ") * bool(keywords) + ", ".join(keywords)
    wrong = [*_positional(expected, got, names), *_by_keyword(expected, got, names)]
    return f"the call does not fit the program: {'; '.join(wrong)}. It takes ({takes}), as it was exported"


def _names(expected: pytree.TreeSpec, leaves: Sequence[str]) -> list[str]:
    """The names of positional arguments. An argument with several leaves is named by their common prefix."""
    names, begin = [], 0
    for position, child in enumerate(expected.children()[0].children()):
        own_leaves = leaves[begin : begin + child.num_leaves]
        begin += child.num_leaves
        words = zip(*(name.split("_") for name in own_leaves), strict=False)
        shared = "_".join(word[0] for word in takewhile(lambda word: len(set(word)) == 1, words))
        name = shared if child.is_leaf() else shared.rstrip("_0123456789")
        names.append(name or f"argument {position + 1}")
    return names


def _keywords(spec: pytree.TreeSpec) -> list[str]:
    return list(spec.children()[1].context or ())


def _positional(expected: pytree.TreeSpec, got: pytree.TreeSpec, names: Sequence[str]) -> Iterator[str]:
    by_position = got.children()[0].children()
    by_keyword = set(_keywords(got)) - set(_keywords(expected))
    for name in names[len(by_position) :]:
        yield f"{name} is given by keyword, and is positional" if name in by_keyword else f"{name} is missing"
    if len(by_position) > len(names):
        many = (
            f"{len(by_position)} positional arguments are"
            if len(by_position) > 1
            else "a positional argument is"
        )
        yield f"{many} given, and it takes {len(names) or 'none'}"
    for name, wanted_tree, other in zip(names, expected.children()[0].children(), by_position, strict=False):
        yield from _differences(name, wanted_tree, other)


def _by_keyword(expected: pytree.TreeSpec, got: pytree.TreeSpec, names: Sequence[str]) -> Iterator[str]:
    wanted = dict(zip(_keywords(expected), expected.children()[1].children(), strict=True))
    by_name = dict(zip(_keywords(got), got.children()[1].children(), strict=True))
    for name, tree in wanted.items():
        if name not in by_name:
            yield f"{name} is missing"
        else:
            yield from _differences(name, tree, by_name[name])
    late = names[len(got.children()[0].children()) :]
    for name in by_name.keys() - wanted.keys() - set(late):
        yield f"{name} is given twice" if name in names else f"{name} is no argument of it"


def _differences(name: str, expected: pytree.TreeSpec, got: pytree.TreeSpec) -> Iterator[str]:
    """Yield the differences in one argument, down to the first trees that differ in kind or length."""
    if expected == got:
        return
    same = expected.type is got.type and expected.context == got.context
    if expected.is_leaf() or got.is_leaf() or not same or expected.num_children != got.num_children:
        yield f"{name} is {_kind(got)}, expected {_kind(expected)}"
        return
    for key, wanted_tree, other in zip(_keys(expected), expected.children(), got.children(), strict=True):
        yield from _differences(f"{name}[{key!r}]", wanted_tree, other)


def _kind(spec: pytree.TreeSpec) -> str:
    """A tree in words: one value, or a class with its length, or with its keys if it is a dictionary."""
    if spec.is_leaf():
        return "one value"
    if isinstance(spec.type, type) and issubclass(spec.type, dict):
        return f"a {spec.type.__name__} of {', '.join(map(repr, _keys(spec))) or 'nothing'}"
    return f"a {spec.type.__name__} of {spec.num_children}"


def _keys(spec: pytree.TreeSpec) -> list[Any]:
    """The keys of a tree's children: those of a dictionary, and positions otherwise."""
    if isinstance(spec.context, list) and len(spec.context) == spec.num_children:
        return spec.context
    return list(range(spec.num_children))
