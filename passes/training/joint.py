"""A program's forward and the gradients of its results in one graph, as an exported program itself."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._C import DispatchKey
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._prims_common import is_contiguous_or_false
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from penstock.passes.building.refusals import sentence
from penstock.passes.graph.dry_run import as_function, is_dense, layouts_kept
from penstock.passes.graph.nodes import copy_program, placeholders_of
from penstock.passes.graph.propagation import fake_inputs, groups_of_any_dtype, propagate, strides_of_kernels
from penstock.passes.graph.torch_state import kept_torch_state
from penstock.passes.weights.lifted import Weights
from penstock.schedule.facts.errors import PassError


def align(
    first: fx.GraphModule, other: fx.GraphModule, pairs_given: Collection[str]
) -> dict[fx.Node, fx.Node]:
    """Adds a trace to the graph of a first one, and returns the nodes there of all nodes of the other.

    `pairs_given` are the names of the other's placeholders of gradients, which become further inputs; all
    others are those of equal names. Raises PassError where the other trace would have an effect a second
    time.
    """
    keys = _Keys()
    twins = {
        key: node
        for node in first.graph.nodes
        if node.op != "output" and (key := keys.key(node, {})) is not None
    }
    inputs = {node.name: node for node in placeholders_of(first.graph)}
    last = placeholders_of(first.graph)[-1]
    keys = _Keys()
    here: dict[fx.Node, fx.Node] = {}
    behind: set[fx.Node] = set()
    for node in other.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            if node.name in pairs_given:
                with first.graph.inserting_after(last):
                    here[node] = last = first.graph.placeholder(f"{node.name}_again")
                last.target, last.meta = last.name, dict(node.meta)
                behind.add(node)
            else:
                here[node] = inputs[node.name]
            continue
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        key = None if node in behind else keys.key(node, here)
        twin = twins.get(key) if key is not None else None
        is_attribute = node.op == "get_attr"
        if twin is not None and (not is_attribute or is_equal(_attribute(node), _attribute(twin))):
            here[node] = twin
            continue
        if node not in behind and not is_attribute and node.is_impure():
            raise PassError(
                f"{node.target} has an effect, and the traces for several sets of losses do not agree on it: "
                "compile the sets one by one"
            )
        here[node] = _copied(first, node, here)
    return here


class _Keys:
    """Numbers the calls of an operator with equal arguments."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def key(self, node: fx.Node, here: Mapping[fx.Node, fx.Node]) -> Hashable:
        """What a node calls, with which arguments, for the how manieth time; None for a placeholder."""
        if node.op == "placeholder":
            return None
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: here.get(argument, argument))
        called = node.op, node.target, repr(arguments)
        self._counts[called] += 1
        return (*called, self._counts[called])


def _copied(graph_module: fx.GraphModule, node: fx.Node, here: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node of another module at the end of a graph, with the attribute that it reads."""
    graph = graph_module.graph
    with graph.inserting_before(graph.output_node()):
        copied = graph.node_copy(node, here.__getitem__)
    if node.op == "get_attr":
        number, name = 0, str(node.target).replace(".", "_")
        while hasattr(graph_module, f"{name}_{number}"):
            number += 1
        setattr(graph_module, f"{name}_{number}", _attribute(node))
        copied.target = f"{name}_{number}"
    return copied


def _attribute(node: fx.Node) -> Any:
    attribute: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        attribute = getattr(attribute, name)
    return attribute


def is_equal(first: Any, other: Any) -> bool:
    """Tells whether two attributes of graphs have the same value: tensors, or graphs without tensors."""
    if isinstance(first, fx.GraphModule) and isinstance(other, fx.GraphModule):
        values = [*first.state_dict().values(), *other.state_dict().values()]
        return not values and codes(first) == codes(other)
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        return first is other or (
            first.dtype == other.dtype and first.shape == other.shape and torch.equal(first, other)
        )
    return first is other


def codes(graph_module: fx.GraphModule) -> list[str]:
    """The code of a graph and of all graphs within it."""
    return [part.code for part in graph_module.modules() if isinstance(part, fx.GraphModule)]


_GENERATOR = ("fork_rng", "manual_seed", "seed", "set_rng_state")
"""Functions of torch that set its generator."""


def refuse_hooks(model: nn.Module, trainable: Sequence[str]) -> None:
    """Raises PassError for hooks of a model on gradients, which no compiled module calls.

    `trainable` are the patterns of the parameters that are trained.
    """
    for name, part in model.named_modules():
        for hook in (*part._backward_hooks.values(), *part._backward_pre_hooks.values()):
            raise PassError(
                f"{name or 'the model'} has a hook on its gradients ({_named(hook)}), which torch.export "
                "drops: remove it, and hook the parameters of the module that load() returns"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        hooks: list[Any] = [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
        trained = any(fnmatchcase(name, pattern) for pattern in trainable)
        for hook in (registered for by_id in hooks if trained and by_id for registered in by_id.values()):
            raise PassError(
                f"the parameter {name} has a hook ({_named(hook)}), which is the model's own: remove it, and "
                "register it on that parameter of the module that load() returns"
            )


def _named(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _refused(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that sets the generator, and raises PassError where a model calls it."""
    exporting = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] in ("torch", "contextlib") or threading.get_ident() != exporting:
            return function(*args, **kwargs)
        raise PassError(f"the model calls torch.random.{name} in its forward, {_DROPPED}")

    return called


_DROPPED = (
    "which torch.export drops: draw from torch's generator as it is, set it outside of the model, or give "
    "the model its random numbers as an input"
)


_OF_CHECKPOINTS = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
"""What checkpoints keep their inputs by in torch 2.11; no gradient goes through it."""


@contextmanager
def refused_own_gradients() -> Iterator[None]:
    """Has `autograd.Function` and `register_hook` raise PassError where a gradient would go through them.

    So does what sets torch's generator. Export itself draws nothing.
    """
    functions: Any = torch.autograd.function
    is_defined = functions._is_setup_context_defined

    def asked(setup_context: Any) -> bool:
        # `Function.apply` asks this first, also where a module holds it as a function of its own.
        function_class: Any = sys._getframe(1).f_locals.get("cls")
        is_own = function_class not in (None, _OF_CHECKPOINTS) and torch.is_grad_enabled()
        if is_own and not function_class.__module__.startswith("torch._"):
            raise PassError(
                f"{function_class.__qualname__} is an autograd.Function, of which torch.export keeps the "
                "forward and drops the backward: make it an operator (torch.library.custom_op, "
                "register_autograd), or use what it does in plain operations"
            )
        return bool(is_defined(setup_context))

    def hooked(tensor: torch.Tensor, hook: object) -> NoReturn:
        raise PassError(
            "the model registers a hook on a tensor in its forward, which torch.export drops: compute what "
            "it does to the gradient outside of the model"
        )

    state = torch.get_rng_state()
    with ExitStack() as entered:
        entered.enter_context(mock.patch.object(functions, "_is_setup_context_defined", asked))
        entered.enter_context(mock.patch.object(torch.Tensor, "register_hook", hooked))
        for module in (torch, torch.random):
            for name in _GENERATOR:
                if known := getattr(module, name, None):
                    entered.enter_context(mock.patch.object(module, name, _refused(name, known)))
        yield
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise PassError(f"the model sets torch's generator in its forward, {_DROPPED}")


def refuse_written_tensors(graph: fx.Graph, exported: ExportedProgram, names: Sequence[str]) -> None:
    """Raises PassError where the program writes to a parameter or a constant; `names` are its inputs'."""
    parameters = exported.graph_signature.inputs_to_parameters
    constants = exported.graph_signature.inputs_to_lifted_tensor_constants
    for meaning in graph.output_node().meta["desc"]:
        if isinstance(meaning, InputMutationAOTOutput):
            name = names[meaning.mutated_input.idx]  # type: ignore[attr-defined]
            if name in parameters:
                raise PassError(
                    f"the model writes to its parameter {parameters[name]} when it is called, as an "
                    "Embedding with max_norm does: leave that out, or write to it between the steps"
                )
            if name in constants:
                raise PassError(
                    f"the model writes to its tensor {constants[name]} when it is called: register it as a "
                    "buffer"
                )


def refuse_random_slopes(graph: fx.Graph, *, forward_only: bool) -> None:
    """Raises PassError for an RReLU in training whose gradient torch does not find in a graph like this one.

    The slopes, which eager PyTorch writes to a tensor of its own, are a second result here, and autograd does
    not look at it; nor do kernels take a value that is not contiguous beside them.
    """
    for node in graph.nodes:
        if node.target is not torch.ops.aten.rrelu_with_noise_functional.default or node.args[4:5] != (True,):
            continue
        if forward_only or not is_contiguous_or_false(node.args[0].meta["val"]):
            raise PassError(
                "the model has an RReLU in training mode, of which backward='segments' has no gradient, and "
                "another backward only that of a contiguous value: put the RReLU into eval mode, use "
                "LeakyReLU, or make the value contiguous() and leave backward= out"
            )


aten = torch.ops.aten

# torch 2.11 drops it, as nothing reads what it returns. The list is that of all graphs of the process.
fx.has_side_effect(aten._linalg_check_errors.default)

Value = fx.Node | None

_DEFINED_TWICE = (
    *("dropout", "gru", "lstm", "rnn_relu", "rnn_tanh"),
    *(f"{name}{n}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
    *("hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward"),
)
"""Operators that torch defines in C++ and, for its tracers, in Python by other operators."""


_TOKENS_IN = (ForwardTokenAOTInput, BackwardTokenAOTInput)
_TOKENS_OUT = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)

_LOCK = threading.RLock()
"""Held while torch's table of operators is changed."""


@dataclass(frozen=True)
class Joint:
    """The graph of forward and backward, and what its inputs and outputs mean.

    `inputs[k]` is the placeholder of input k of the program, None where the input is no tensor and no size.
    `results[k]` is the value of result k, and `tangents[k]` the placeholder of the gradient of it, None if it
    has none. Results are counted without constants. `written[k]` is the new value of input k, where the
    program writes to it. `gradients[k]` is the gradient of input k, for those that have one. The results
    `left_out` depend on what is trained, and are not among those that gradients come from. `given` are the
    placeholders of all gradients in the graph, which other joints may share.
    """

    graph_module: fx.GraphModule
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    tangents: tuple[Value, ...]
    written: dict[int, fx.Node]
    gradients: dict[int, fx.Node]
    left_out: frozenset[int]
    given: tuple[fx.Node, ...]


class _Flat(nn.Module):
    """The graph of a program as a module of the inputs and results that autograd may see.

    Each result is a copy, so that none shares memory with another or with an input: autograd would then take
    the gradient of something else. `trace_joint` removes the copies.
    """

    def __init__(self, exported: ExportedProgram, inputs: Sequence[Any], losses: Collection[int]) -> None:
        super().__init__()
        self._graph_module = exported.graph_module
        self.forward_only = False
        self.inputs = list(inputs)
        self.shown = [k for k, value in enumerate(inputs) if is_value(value)]
        self._results, self._losses = result_positions(exported), frozenset(losses)
        self.left_out: set[int] = set()

    def forward(self, *values: Any) -> list[Any]:
        inputs = list(self.inputs)
        for k, value in zip(self.shown, values, strict=True):
            inputs[k] = value
        outputs = self._graph_module(*inputs)
        results = [outputs[position] for position in self._results]
        for k, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                if result.requires_grad and k not in self._losses:
                    self.left_out.add(k)
                differs = k in self._losses and not self.forward_only
                results[k] = (result if differs else result.detach()).clone()
        if self.forward_only:  # autograd wants something to differentiate
            results.append(sum(leaf.sum() for leaf in inputs if getattr(leaf, "requires_grad", False)))
        return results


def is_value(value: object) -> bool:
    """Tells whether an input is a tensor or a size, and not a constant of the program."""
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat)


def trace_joint(
    exported: ExportedProgram, weights: Weights, trainable: Collection[str], losses: Sequence[Collection[int]]
) -> list[Joint]:
    """Returns the joints of a program, for the gradients of its inputs of the names `trainable`.

    Names are those of placeholders: of parameters, and of user inputs. Each joint has the gradients of the
    results of the numbers in one of `losses`, which leave constants out. All are in one graph, whose forward
    they share, and so are their inputs, their results and what they write. Raises PassError where autograd
    cannot trace the program.
    """
    traces = [_traced(exported, weights, trainable, results_of_loss) for results_of_loss in losses]
    first, *later = traces
    meanings = [_meanings(first, {})]
    for trace in later:
        gradients = {node.name for node in placeholders_of(trace.made.graph) if _is_gradient(node)}
        meanings.append(_meanings(trace, align(first.made, trace.made, gradients)))
    graph_module = propagate(first.made, fake_inputs(first.made, weights))
    for node, copied in zip(first.made.graph.nodes, graph_module.graph.nodes, strict=True):
        copied.name = node.name  # copying renames what is a builtin of Python, such as `input`
    joints = [
        _described(graph_module, trace.flat, len(result_positions(exported)), meaning)
        for trace, meaning in zip(traces, meanings, strict=True)
    ]
    shared = joints[0]
    given_here = tuple(node for joint in joints for node in joint.tangents if node is not None)
    return [
        replace(joint, inputs=shared.inputs, results=shared.results, written=shared.written, given=given_here)
        for joint in joints
    ]


def trace_forward(
    exported: ExportedProgram, weights: Weights, trainable: Collection[str], losses: Collection[int]
) -> Joint:
    """Returns a joint without gradients: the graph of the forward, as autograd sees it.

    What a region without gradients computes is detached in it. What is computed of an input that the program
    writes to is computed of a copy, so that it can be computed again. Raises PassError where that has no
    trace.
    """
    trace = _traced(_with_detached_regions(exported), weights, trainable, losses, forward_only=True)
    results, graph = len(result_positions(exported)), trace.made.graph
    output = graph.output_node()
    returned: Any = output.args[0]
    named = [
        (node, meaning)
        for node, meaning in zip(returned, output.meta["desc"], strict=True)
        if isinstance(meaning, InputMutationAOTOutput)
        or (isinstance(meaning, PlainAOTOutput) and meaning.idx < results)
    ]
    output.args = ([node for node, _ in named],)
    output.meta["desc"] = [meaning for _, meaning in named]
    graph.eliminate_dead_code()
    for node in placeholders_of(graph):
        if _is_gradient(node):
            graph.erase_node(node)
    _copy_written(graph)
    meanings = _meanings(trace, {})
    graph_module = propagate(trace.made, fake_inputs(trace.made, weights))
    for node, copied in zip(graph.nodes, graph_module.graph.nodes, strict=True):
        copied.name = node.name
    joint = _described(graph_module, trace.flat, results, meanings)
    return replace(joint, results=tuple(_attached(node) for node in joint.results))


def _copy_written(graph: fx.Graph) -> None:
    """Puts copies, as they lie in memory, in place of the inputs that a program writes to."""
    meanings = graph.output_node().meta["desc"]
    written = [meaning.mutated_input for meaning in meanings if isinstance(meaning, InputMutationAOTOutput)]
    inputs = placeholders_of(graph)
    for node in [placeholder for placeholder in inputs if placeholder.meta["desc"] in written]:
        with graph.inserting_after(inputs[-1]):
            if is_dense(node.meta["val"]):
                copied = graph.call_function(aten.clone.default, (node,))
            else:
                copied = graph.call_function(as_function(aten.copy_.default), (node, node))
        for user in [reader for reader in node.users if reader is not copied and reader.op != "output"]:
            user.replace_input_with(node, copied)


def _attached(result: Any) -> Any:
    """The value that `_Flat` detached to return it."""
    detached = isinstance(result, fx.Node) and result.target is aten.detach.default
    return result.args[0] if detached else result


def _with_detached_regions(exported: ExportedProgram) -> ExportedProgram:
    """The program, in which what comes out of a region without gradients is detached.

    The trace, which is of what autograd calls, has no other sign of such a region.
    """
    copied = copy_program(exported)
    for node in list(copied.graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for user in node.users:
                with copied.graph.inserting_after(user):
                    detached = copied.graph.call_function(aten.detach.default, (user,))
                user.replace_all_uses_with(
                    detached, lambda candidate, detached_node=detached: candidate is not detached_node
                )
    copied._graph_module.recompile()
    return copied


@dataclass(frozen=True)
class _Trace:
    """A graph as autograd traced it, and the module that it traced."""

    made: fx.GraphModule
    flat: _Flat


@kept_torch_state()
def _traced(
    exported: ExportedProgram,
    weights: Weights,
    trainable: Collection[str],
    losses: Collection[int],
    *,
    forward_only: bool = False,
) -> _Trace:
    recorded = fake_inputs(exported.graph_module, weights)
    names = [node.name for node in placeholders_of(exported.graph)]
    inputs = [_seen(value, name in trainable) for name, value in zip(names, recorded, strict=True)]
    flat = _Flat(exported, inputs, losses)
    flat.forward_only = forward_only
    with ExitStack() as entered:
        entered.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's own, about gradients of fake tensors that are no leaves
        entered.enter_context(torch.enable_grad())
        entered.enter_context(_as_eager())
        entered.enter_context(groups_of_any_dtype())
        entered.enter_context(strides_of_kernels())
        entered.enter_context(layouts_kept(differentiated=forward_only))
        sizes = _Sizes(inputs)
        try:
            graph_module = aot_export_joint_with_descriptors(
                entered, flat, tuple(inputs[k] for k in flat.shown), decompositions={}
            )
        except PassError:
            raise
        except Exception as error:
            raise _refusal(error, forward_only=forward_only) from error
        sizes.check()
    graph = graph_module.graph_module.graph
    refuse_written_tensors(graph, exported, [names[k] for k in flat.shown])
    graph.set_codegen(fx.graph.CodeGen())  # its own has the structure of the trace's arguments
    refuse_random_slopes(graph, forward_only=forward_only)
    _erase_assertions(graph)
    _unwrap_effects(graph)
    _name_inputs(
        graph,
        {
            placeholder.meta["desc"]: names[flat.shown[placeholder.meta["desc"].idx]]
            for placeholder in _plain(graph)
        },
    )
    return _Trace(graph_module.graph_module, flat)


def _plain(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in placeholders_of(graph) if isinstance(node.meta["desc"], PlainAOTInput)]


def _name_inputs(graph: fx.Graph, names: Mapping[object, str]) -> None:
    """Gives inputs the names that they have in the program, and another one to each node that has that."""
    taken = {*names.values()}
    for node in graph.nodes:
        if node.name in taken:
            node._rename(f"{node.name}_value")
    for node in _plain(graph):
        node.name = names[node.meta["desc"]]


def _refusal(error: Exception, *, forward_only: bool) -> PassError:
    other = "" if forward_only else ", or compile with backward='segments', which traces the forward only"
    return PassError(
        f"autograd cannot trace the program ({type(error).__name__}: {sentence(error)}): export what it "
        f"trains without this operation{other}"
    )


@contextmanager
def _as_eager() -> Iterator[None]:
    """Has operators divided into others as eager PyTorch divides them, and not as torch.compile does.

    For these torch has a second definition in Python, which takes precedence while it traces, and whose
    gradients differ in the last bits: dropout in bfloat16 is one.
    """
    packets = [getattr(aten, name) for name in _DEFINED_TWICE if hasattr(aten, name)]
    operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    with _LOCK:
        taken = [
            (overload, key, overload.py_kernels.pop(key))
            for overload in operators
            for key in keys
            if key in overload.py_kernels
        ]
        try:
            for operator in operators:
                operator._dispatch_cache.clear()
            yield
        finally:
            for operator, key, kernel in taken:
                operator.py_kernels[key] = kernel
                operator._dispatch_cache.clear()


def _seen(value: Any, trained: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if trained and not value.is_floating_point():
        raise PassError(f"an input of dtype {value.dtype} has no gradient: leave it out of trainable=")
    return value.detach().requires_grad_(trained)


class _Sizes:
    """The symbolic sizes of inputs, which autograd's trace must not make narrower."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        tensors = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
        sizes = [size for tensor in tensors for size in tensor.shape] + [
            leaf for leaf in inputs if not isinstance(leaf, torch.Tensor)
        ]
        self._sizes = [
            size for size in sizes if isinstance(size, torch.SymInt) and size.node.expr.free_symbols
        ]

    def check(self) -> None:
        for size in self._sizes:
            if not size.node.shape_env.replace(size.node.expr).free_symbols:
                raise PassError(
                    f"the gradients hold for {size.node.expr} = {size.node.hint} only, a size that the "
                    "program takes as dynamic: export it with that size fixed"
                )


def result_positions(exported: ExportedProgram) -> list[int]:
    """The positions of results that are tensors or sizes among the flat outputs of a program's graph."""
    specs = exported.graph_signature.output_specs
    user = [k for k, spec in enumerate(specs) if spec.kind.name == "USER_OUTPUT"]
    return [k for k in user if not isinstance(specs[k].arg, ConstantArgument)]


def _erase_assertions(graph: fx.Graph) -> None:
    """Removes assertions about metadata, which calls are checked for anyway.

    They count as effects: left in place, they would bring the products whose values they look at into the
    backward, which would then compute these again.
    """
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "overloadpacket", None) is aten._assert_tensor_metadata:
            graph.erase_node(node)


def _unwrap_effects(graph: fx.Graph) -> None:
    """Puts operators with effects, such as the check behind `linalg.cholesky`, in place of their wrappers.

    Autograd hands a token from one to the next, so that no compiler changes their order. The order of the
    graph is kept here.
    """
    for node in [
        candidate for candidate in graph.nodes if candidate.target is torch.ops.higher_order.with_effects
    ]:
        _, operator, *args = node.args
        with graph.inserting_before(node):
            result = graph.call_function(operator, tuple(args), node.kwargs)
        values = node.meta["val"][1:]
        result.meta = {**node.meta, "val": values[0] if len(values) == 1 else values}
        for user in list(node.users):
            number = user.args[1]
            if number == 0:
                user.replace_all_uses_with(None)
            elif len(values) == 1:
                user.replace_all_uses_with(result)
            else:
                user.args = (result, number - 1)
                continue
            graph.erase_node(user)
        graph.erase_node(node)
    output = graph.output_node()
    meanings = output.meta["desc"]
    left = [k for k, meaning in enumerate(meanings) if not isinstance(meaning, _TOKENS_OUT)]
    returned: Any = output.args[0]
    output.args = ([returned[k] for k in left],)
    output.meta["desc"] = [meanings[k] for k in left]
    for node in placeholders_of(graph):
        if isinstance(node.meta["desc"], _TOKENS_IN):
            graph.erase_node(node)


_Meanings = tuple[list[tuple[str, Any]], list[tuple[str | None, Any]]]
"""What the inputs and the outputs of a trace mean, by the names of their nodes in the graph of all."""


def _is_gradient(node: fx.Node) -> bool:
    return isinstance(node.meta["desc"], TangentAOTInput)


def _meanings(trace: _Trace, here: Mapping[fx.Node, fx.Node]) -> _Meanings:
    output = trace.made.graph.output_node()
    returned: Any = output.args[0]
    return (
        [(here.get(node, node).name, node.meta["desc"]) for node in placeholders_of(trace.made.graph)],
        [
            (node and here.get(node, node).name, meaning)
            for node, meaning in zip(returned, output.meta["desc"], strict=True)
        ],
    )


def _described(graph_module: fx.GraphModule, flat: _Flat, results: int, meanings: _Meanings) -> Joint:
    nodes: dict[str | None, Any] = {node.name: node for node in graph_module.graph.nodes}
    inputs: list[Value] = [None] * len(flat.inputs)
    tangents: list[Value] = [None] * results
    for name, meaning in meanings[0]:
        if isinstance(meaning, PlainAOTInput):
            inputs[flat.shown[meaning.idx]] = nodes[name]
        elif isinstance(meaning, TangentAOTInput) and isinstance(meaning.output, PlainAOTOutput):
            tangents[meaning.output.idx] = nodes[name]
        else:
            raise PassError(f"autograd's trace takes {meaning}, expected inputs and gradients of results")
    values: list[Value] = [None] * results
    written: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    for returned, meaning in meanings[1]:
        node: Any = nodes.get(returned)
        if isinstance(meaning, PlainAOTOutput):
            values[meaning.idx] = _original(node)
        elif isinstance(meaning, InputMutationAOTOutput):
            written[flat.shown[meaning.mutated_input.idx]] = node  # type: ignore[attr-defined]
        elif isinstance(meaning, GradAOTOutput):
            if node is not None:
                gradients[flat.shown[meaning.grad_of.idx]] = node  # type: ignore[attr-defined]
        elif node is not None:
            raise PassError(f"autograd's trace returns {meaning}, expected results, mutations and gradients")
    left_out = frozenset(flat.left_out)
    return Joint(
        graph_module, tuple(inputs), tuple(values), tuple(tangents), written, gradients, left_out, ()
    )


def _original(result: Any) -> Any:
    """The value that `_Flat` copied to return it."""
    if isinstance(result, fx.Node) and result.target is aten.clone.default:
        return result.args[0]
    return result
