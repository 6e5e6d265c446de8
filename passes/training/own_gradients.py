"""Refuses what gives a model gradients of its own, which export drops without a word.

`torch.export` records what an `autograd.Function` computes in its forward, and not its backward; nor does it
record a tensor's hooks. Gradients of the exported program would then be those of the recorded operations: a
rounding with a straight-through gradient would have the gradient zero. An operator of `torch.library` keeps
the gradient that was registered for it. Export drops as well what a model does to the generator of random
numbers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._prims_common import is_contiguous_or_false
from torch.export import ExportedProgram

from penstock.schedule.facts.errors import PassError

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


def _refused(name: str, known: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that sets the generator, and raises PassError where a model calls it."""
    exporting = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] in ("torch", "contextlib") or threading.get_ident() != exporting:
            return known(*args, **kwargs)
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
        function_class = sys._getframe(1).f_locals.get("cls")
        known = (
            function_class is None
            or function_class is _OF_CHECKPOINTS
            or function_class.__module__.startswith("torch._")
        )
        if function_class is not None and not known and torch.is_grad_enabled():
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
