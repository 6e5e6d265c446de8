"""A call of a module: its arguments by name, and its kind."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.integrations.calls.arguments import Collector, Tree
from penstock.passes.training.facts import Keeping
from penstock.schedule.facts.errors import StreamError


@dataclass(frozen=True)
class Call:
    """A call: the tree of its arguments, their tensors and states, and what its kind depends on.

    `entry` is the path of the method: `forward`, `decode`, `encoder.forward`.
    """

    entry: str
    tree: Tree
    tensors: tuple[torch.Tensor, ...]
    states: tuple[object, ...]
    full_masks: bool
    grad: bool
    """Whether grad mode is on, which counts where the model asks for it."""
    text: str
    """The arguments that were given, in words."""
    title: str
    """What a user calls such a call: `prompt`, `one token`, or the method and its arguments."""
    trained: tuple[tuple[str, ...], ...] = ()
    """Of a model that is trained: the names of the parameters that are the last tensors."""
    modes: tuple[bool, ...] = ()
    """Of a model that is trained: which parts are in training mode; empty if none is."""
    settings: tuple[tuple[str, object], ...] = ()
    """Of a model that is trained: what its configuration says now, of what trainers change in it."""
    keeps: Keeping | None = None
    """What is kept for a backward, where the caller may ask for gradients of the trained parameters."""

    @classmethod
    def of(cls, entry: str, arguments: Mapping[str, Any]) -> Call:
        collector = Collector()
        tree = collector.take(dict(arguments))
        _refuse_autocast(collector.tensors)
        masks = [v for k, v in arguments.items() if k.endswith("attention_mask") and _is_padding(v)]
        full = all(bool(mask.all()) for mask in masks)
        texts = [f"{name} {_text(value)}" for name, value in arguments.items() if value is not None]
        text = ", ".join(texts if full else [*texts, "padded"])
        grad = torch.is_grad_enabled()
        title = _title(arguments, full) or f"{entry} of {text}"
        return cls(entry, tree, tuple(collector.tensors), tuple(collector.states), full, grad, text, title)

    @cached_property
    def kind(self) -> str:
        """A text that is equal for calls that one exported program may serve."""
        shapes = tuple((t.dtype, t.device.type, tuple(min(n, 2) for n in t.shape)) for t in self.tensors)
        orders = tuple(_order(tensor) for tensor in self.tensors)
        facts: tuple[object, ...] = (self.entry, self.tree.key, shapes, orders, self.full_masks, _settings())
        if self.trained:
            facts = *facts, self.trained, bytes(self.modes), self.settings, self.keeps
        return repr(facts)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the caller gave."""
        return sum(tensor.nbytes for tensor in self.tensors[: len(self.tensors) - len(self.trained)])


def _title(arguments: Mapping[str, Any], full: bool) -> str:
    """What users call a call that generates text: it has a cache and tokens; empty for other calls."""
    tokens = next((v for k in ("input_ids", "inputs_embeds") if (v := arguments.get(k)) is not None), None)
    if arguments.get("past_key_values") is None or not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        return ""
    return ("one token" if tokens.shape[1] == 1 else "prompt") + ("" if full else ", padded")


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__


def _order(tensor: torch.Tensor) -> tuple[object, ...]:
    """A tensor's memory layout, about which a module may ask; export would answer as for the first call."""
    if tensor.is_contiguous():
        return ()
    last = tensor.is_contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else False
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    order = sorted(range(len(strides)), key=lambda k: -strides[k])
    return last, tuple(order), tuple(stride == 0 for stride in strides)


def _settings() -> tuple[object, ...]:
    """Global settings of torch that become part of a program where a module asks for them."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu", accelerator.type if accelerator else "cuda")
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds]
    return torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled(), *autocast


def _refuse_autocast(tensors: Sequence[torch.Tensor]) -> None:
    """Raise StreamError under torch.autocast, which an exported program does not follow."""
    if any(torch.is_autocast_enabled(kind) for kind in {tensor.device.type for tensor in tensors}):
        raise StreamError(
            "torch.autocast is on, and a program has the dtypes that it was exported with: call the model "
            "outside of it, or load the model in the dtype that it should compute in"
        )


def _is_padding(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


def refuse_grad(arguments: object) -> None:
    """Raise StreamError where the caller would expect gradients, which streaming does not give."""
    leaves = pytree.tree_leaves(arguments) if torch.is_grad_enabled() else ()
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        raise StreamError(
            "an input requires grad and grad mode is on: gradients through streamed weights are not "
            "supported, so call under torch.no_grad() or detach the input"
        )


def method_of(module: nn.Module, entry: str) -> Any:
    """The method that an entry names: `forward`, or `encoder.forward` of a submodule."""
    owner, _, name = entry.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def named(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that were not given.

    Raises TypeError for arguments that the method does not take, StreamError for those without a name.
    """
    arguments = {**signature.bind(*args, **kwargs).arguments}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
        elif parameter.kind is parameter.VAR_POSITIONAL and arguments.pop(name, ()):
            raise StreamError(f"it was called with arguments that have no name (*{name}): name them")
    return arguments
