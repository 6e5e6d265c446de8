"""The streamed module of a training program: its calls return tensors with a `grad_fn`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.passes.training.facts import BACKWARD, FORWARD, TRAINABLE, Training
from penstock.runtime.module import LoadedMethod, StreamedModule
from penstock.runtime.stream.passes import LoadedWeights
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import Trace


class TrainingModule(StreamedModule):
    """A streamed module whose parameters, which stay in memory, are trained like those of any module.

    `parameters()` are those that the program was compiled to train, under their FQNs, and `buffers()` those
    that it writes to, such as the statistics of batch norms; so are `state_dict()` and `load_state_dict()`.
    Frozen weights stream through the forward, and again through the backward. Under `torch.no_grad()` nothing
    is kept for a backward.

    With `places`, what a forward keeps has places among the weights, one for each value: a forward is refused
    while another waits for its backward.
    """

    def __init__(
        self,
        methods: Mapping[str, LoadedMethod],
        weights: LoadedWeights,
        name: str,
        training: Training,
        *,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        places: bool = False,
    ) -> None:
        super().__init__(methods, weights, name)
        self.training = True
        leaves = (self._method(name).program.convention.names for name in (FORWARD, BACKWARD))
        training.check(*map(len, leaves))
        self._facts, self._has_places = training, places
        self._kept: Callable[[], TrainingCall | None] = lambda: None  # the last call whose values were kept
        self._places = [_holder(self, fqn) for fqn in training.parameters]
        for (holder, leaf), fqn in zip(self._places, training.parameters, strict=True):
            holder._parameters[leaf] = nn.Parameter(parameters[fqn])
        for fqn, buffer in buffers.items():
            holder, leaf = _holder(self, fqn)
            holder._buffers[leaf] = buffer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward. Gradients go to the parameters, and to inputs that were exported with grad."""
        if torch.is_autocast_enabled("cpu"):
            raise StreamError(
                "autocast is on, and the program computes in the dtypes in which it was exported: call it "
                "outside of torch.autocast"
            )
        convention = self._method(FORWARD).program.convention
        trained = [getattr(holder, leaf) for holder, leaf in self._places]
        leaves = convention.flatten(args, {**kwargs, TRAINABLE: trained})
        wants = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not torch.is_grad_enabled() or not wants:
            result, _ = self.run(FORWARD, leaves)
            return result
        self._refuse_lost_gradients(leaves, convention.names)
        call = TrainingCall(self._facts, self.run, once=self._has_places)
        result = call.result(leaves)
        self._kept = weakref.ref(call)
        return result

    def run(self, method: str, leaves: Sequence[Any]) -> Any:
        if method == FORWARD:
            self._refuse_pending()
        return super().run(method, leaves)

    def measure_call(self, method: str, /, *args: Any, **kwargs: Any) -> Trace:
        self._refuse_pending()
        return super().measure_call(method, *args, **kwargs)

    def _refuse_pending(self) -> None:
        kept = self._kept()
        if self._has_places and kept is not None and not kept.spent:
            raise StreamError(
                "another call waits for its backward, whose values this one would overwrite: call backward() "
                "or drop the result of that call first, or compile with spill=False"
            )

    def train(self, mode: bool = True) -> TrainingModule:
        if not mode:
            raise StreamError(
                "eval() is not possible on a program that was compiled to train: load one that was compiled "
                "for inference, or call this one under torch.no_grad()"
            )
        return self

    def requires_grad_(self, requires_grad: bool = True) -> TrainingModule:
        nn.Module.requires_grad_(self, requires_grad)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if assign:
            raise StreamError("assign=True would replace parameters: leave it out, and values are copied")
        return nn.Module.load_state_dict(self, state_dict, strict)

    def _refuse_lost_gradients(self, leaves: Sequence[Any], names: Sequence[str]) -> None:
        trained = {*self._facts.gradients, *range(len(leaves) - len(self._places), len(leaves))}
        for k, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if k not in trained and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise StreamError(
                    f"input {name} requires grad, and the program was compiled without a gradient for it: "
                    "detach it, or compile with an example that requires grad"
                )


class TrainingCall:
    """One call of a training program: the facts, and the structure of its result.

    `run` runs a method, of the names that are given, on leaves. With `once`, what the forward keeps is there
    for one backward only.
    """

    spec: pytree.TreeSpec

    def __init__(
        self,
        facts: Training,
        run: Callable[[str, Sequence[Any]], Any],
        *,
        forward: str = FORWARD,
        backward: str = BACKWARD,
        once: bool = False,
    ) -> None:
        self.facts = facts
        self.spent, self._once = False, once
        self._run, self._forward, self._backward = run, forward, backward

    def result(self, leaves: Sequence[Any]) -> Any:
        """Run the forward on leaves; the result has a `grad_fn`, which gives leaves their gradients."""
        flat = _Pass.apply(self, *leaves)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(flat), self.spec)

    def backward(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run the backward, which returns the gradients of the leaves `facts.gradients`."""
        if self.spent:
            raise StreamError(
                "the values that this call kept have left memory with its first backward: call the module "
                "again, or compile with spill=False"
            )
        self.spent = self._once  # also if it fails on the way
        made: Sequence[Any] = self._run(self._backward, leaves)
        return made

    def forward(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results, flat, and what the backward needs: tensors, and sizes."""
        # Some kernels keep what a backward needs by the grad mode alone; a graph of their own has no use.
        own = [one.detach() if isinstance(one, torch.Tensor) else one for one in leaves]
        with torch.enable_grad():
            result, values = self._run(self._forward, own)
        flat, self.spec = pytree.tree_flatten(result)
        made = iter(values)
        return flat, [next(made) if leaf is None else leaves[leaf] for leaf in self.facts.kept]


class _Pass(torch.autograd.Function):
    """The forward and the backward of a training program, as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: TrainingCall, *leaves: Any) -> tuple[Any, ...]:
        flat, kept = call.forward(leaves)
        ctx.call, ctx.leaves = call, len(leaves)
        ctx.numbers = [None if isinstance(one, torch.Tensor) else one for one in kept]
        ctx.save_for_backward(*(one for one in kept if isinstance(one, torch.Tensor)))
        ctx.layouts = [_layout(flat[k]) for k in call.facts.tangents]
        ctx.set_materialize_grads(False)
        # A gradient that reaches a result which is left out is refused, so that it is not lost.
        seen = {*call.facts.tangents, *call.facts.left_out}
        others = [one for k, one in enumerate(flat) if k not in seen and isinstance(one, torch.Tensor)]
        ctx.mark_non_differentiable(*others)
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise StreamError(
                "gradients of gradients through streamed weights are not supported: call backward without "
                "create_graph=True"
            )
        facts: Training = ctx.call.facts
        expected = ", ".join(facts.results[k] for k in facts.tangents)
        wrong = [f"no gradient has come to {facts.results[k]}" for k in facts.tangents if grads[k] is None]
        wrong += [
            f"a gradient has come to {facts.results[k]}" for k in facts.left_out if grads[k] is not None
        ]
        if wrong:
            raise StreamError(
                f"{wrong[0]}, and the program was compiled for gradients from {expected}: compile it with "
                "losses= naming all results that the loss is computed of"
            )
        tangents = [
            _laid_out(grads[k], layout) for k, layout in zip(facts.tangents, ctx.layouts, strict=True)
        ]
        saved = iter(ctx.saved_tensors)
        kept = [next(saved) if number is None else number for number in ctx.numbers]
        with torch.autocast("cpu", enabled=False):
            made = ctx.call.backward([*kept, *tangents])
        results: list[Any] = [None] * ctx.leaves
        for leaf, gradient in zip(facts.gradients, made, strict=True):
            results[leaf] = gradient
        return (None, *results)


def _layout(result: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]] | None:
    """The shape and the strides of a result whose elements lie close together, None for any other."""
    same = torch.empty_like(result, device="meta").stride() == result.stride()
    return (result.shape, result.stride()) if same else None


def _laid_out(
    gradient: torch.Tensor | None, layout: tuple[torch.Size, tuple[int, ...]] | None
) -> torch.Tensor:
    """A gradient in the layout of its result, in which the backward was traced."""
    assert gradient is not None
    if layout is None:
        return gradient.contiguous()
    shape, stride = layout
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _holder(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """The module, which is made if need be, that holds a weight by its FQN, and the last word of that."""
    *path, name = fqn.split(".")
    for part in path:
        module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    return module, name
