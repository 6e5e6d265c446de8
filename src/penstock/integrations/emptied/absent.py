"""Tensors whose values are not in memory, and which raise where torch would end the process."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from penstock.schedule.facts.errors import StreamError

if TYPE_CHECKING:
    from penstock.integrations.called.component import CalledModule

_FACTS = frozenset(
    {
        *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "names", "nbytes"),
        *("itemsize", "grad", "grad_fn", "_version", "_backward_hooks", "is_meta", "is_cpu", "is_cuda"),
        *("is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "output_nr"),
        *("size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "__len__"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_shared"),
        *("get_device", "requires_grad_", "retains_grad", "is_sparse_csr"),
    }
)
"""Attributes and methods of a tensor that do not need its values."""

_PLAIN = ("diffusers.quantizers.gguf.utils.GGUFParameter",)
"""Classes of tensors with memory of their own, whose attributes say what its bytes mean."""

_SETTABLE = ("requires_grad", "grad")

_SAYS, _STORAGE, _ANSWER = "penstock_says", "penstock_storage", "penstock_answer"
"""Attributes of an absent tensor: the sentence of its errors, its empty storage, and its `Answer`."""

_KNOWN = "penstock_known"

SAVE_INSTEAD = (
    "save a model of transformers with save_pretrained(folder) of what apply returned, or of "
    "penstock_applied after load, and any other after restore()"
)

CLASS = "penstock_class"
"""The attribute of an absent tensor that has its former class, if that is one of a library."""


def empty_storage(device: torch.device) -> torch.UntypedStorage:
    """Return a storage without memory; on a CPU one that no operator can grow, as that has no values."""
    if device.type == "cpu":
        return torch.from_numpy(numpy.empty(0, numpy.uint8)).untyped_storage()
    return torch.empty(0, device=device).untyped_storage()


def is_plain_subclass(value: torch.Tensor) -> bool:
    """Tell whether a tensor is of a class of a library that is plain memory with attributes."""
    return f"{type(value).__module__}.{type(value).__qualname__}" in _PLAIN


class Answer(NamedTuple):
    """What answers for an absent tensor: a twin, or the part of one whose name ends with `suffix`."""

    module: CalledModule
    twin: int
    suffix: str


class AbsentTensor(torch.Tensor):
    """A tensor with a shape and without memory. Whatever would read or write its values raises StreamError.

    Calls from Python are refused in `__torch_function__`; what C++ does, as in `torch.vmap` and
    `torch.tensor`, in `__torch_dispatch__`. Only `torch.utils.dlpack.to_dlpack` and `plain.data = absent` ask
    neither: whoever reads the capsule, or the plain tensor then, reads a null pointer.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name == "untyped_storage":
            return _memory_of(args[0])
        if name == "data_ptr":
            return _address_of(args[0])
        if name in ("__get__", "__set__"):
            asked, name = name, getattr(func.__self__, "__name__", "")
            name = "" if asked == "__set__" and name not in _SETTABLE else name
        if name not in _FACTS:
            if any(getattr(kind, "penstock_decides", False) for kind in types):
                # A watched tensor brings the units that the function reads, and then calls it again.
                return NotImplemented
            return _call_answered(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _sets_itself(func, args):
            return args[0]
        _refuse_values(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(_answer_of(self)[1], memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StreamError(f"{_sentence_of(self)}; {SAVE_INSTEAD}")

    def __repr__(self) -> str:  # type: ignore[override]
        kind = "parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"a {kind} of shape {tuple(self.shape)} that is not in memory"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


class AbsentParameter(AbsentTensor, nn.Parameter):
    """An absent tensor that is a parameter."""


def make_absent(
    value: torch.Tensor, name: str, sentence: str, empty: torch.UntypedStorage
) -> Callable[[torch.Tensor], None]:
    """Take a tensor's values away; returns a function that gives it values again.

    The object stays the same; its former implementation is kept beside it, without memory. It moves to the
    device of `empty`, an empty storage, which tied tensors share. `name` and `sentence` go into errors.
    """
    # Once they are exchanged, this object has the former implementation.
    former: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        AbsentParameter if isinstance(value, nn.Parameter) else AbsentTensor,
        value.shape,
        strides=value.stride(),
        storage_offset=value.storage_offset(),
        dtype=value.dtype,
        device=empty.device,
        storage_size=0,
        requires_grad=value.requires_grad,
    )
    attributes: dict[str, object] = {
        _KNOWN: weakref.ref(value),  # for which torch.utils.swap_tensors refuses to exchange it
        _SAYS: f"the parameter {name} is not in memory: {sentence}",
        _STORAGE: empty,
    }
    if is_plain_subclass(value):
        attributes[CLASS] = type(value)
    _exchange(value, former)
    value.__dict__.update(attributes)
    former.data = torch.empty(0, dtype=former.dtype, device=former.device)

    def give(data: torch.Tensor) -> None:
        former.data = data
        if former.requires_grad != value.requires_grad:
            former.requires_grad_(value.requires_grad)
        _exchange(value, former)
        for attribute in (*attributes, _ANSWER):
            value.__dict__.pop(attribute, None)

    return give


def _exchange(left: torch.Tensor, right: torch.Tensor) -> None:
    """Exchange what two objects are, except for their attributes."""
    torch._C._swap_tensor_impl(left, right)
    left.__class__, right.__class__ = right.__class__, left.__class__


def answer_with(value: torch.Tensor, answer: Answer) -> None:
    """Let operators on an absent tensor take what `answer` returns, instead of raising StreamError."""
    value.__dict__[_ANSWER] = answer


def value_of(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its values, which are read from the files if it is absent.

    The values go once nothing refers to them, and another weight is asked for. Raises StreamError for a
    tensor without values.
    """
    return _answer_of(value)[1] if isinstance(value, AbsentTensor) else value


def _sentence_of(absent: torch.Tensor) -> str:
    """Return what errors say of an absent tensor. Libraries make tensors of its class, which have no name."""
    sentence: str = vars(absent).get(
        _SAYS, "a tensor that was made like a weight which is not in memory has no values"
    )
    return sentence


def _answer_of(absent: AbsentTensor) -> tuple[Answer, torch.Tensor]:
    """Return what answers for an absent tensor, and its value. Raises StreamError if nothing does."""
    answer: Answer | None = vars(absent).get(_ANSWER)
    value = answer.module.answer(answer.twin, answer.suffix) if answer else None
    if answer is None or value is None:
        raise StreamError(_sentence_of(absent))
    return answer, value


def _memory_of(absent: torch.Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor's values while a call runs; otherwise what tells tied tensors, empty."""
    answer: Answer | None = vars(absent).get(_ANSWER)
    memory = answer.module.memory(answer.twin, answer.suffix) if answer else None
    return vars(absent)[_STORAGE] if memory is None else memory


def _address_of(absent: torch.Tensor) -> int:
    """Return an address at which the values of an absent tensor stay for a while. Raises StreamError."""
    answer: Answer | None = vars(absent).get(_ANSWER)
    address = answer.module.address(answer.twin, answer.suffix) if answer else None
    if address is None:
        raise StreamError(_sentence_of(absent))
    return address


def _call_answered(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with answers in place of absent tensors. Raises StreamError if one has no answer."""
    if _sets_itself(func, args):
        return args[0]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    answered: dict[int, tuple[AbsentTensor, Answer, torch.Tensor, tuple[int, int]]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, AbsentTensor):
            if id(leaf) not in answered:
                answer, value = _answer_of(leaf)
                answered[id(leaf)] = leaf, answer, value, _state(value)
            leaves[index] = answered[id(leaf)][2]
    if not answered:  # an argument that no pytree shows
        _refuse_values(args, kwargs)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    result = func(*args, **kwargs)
    written = pytree.tree_leaves(args[:1]) if is_in_place(func) else []
    _note_uses(func, written, result, answered.values())
    return next((leaf for leaf, _, value, _ in answered.values() if result is value), result)


def _note_uses(
    func: Any,
    written: Sequence[Any],
    result: Any,
    answered: Iterable[tuple[AbsentTensor, Answer, torch.Tensor, tuple[int, int]]],
) -> None:
    """Tell answers what a function has written, and of what it returns views.

    Fused optimisers change no version. Arrays and capsules do not show whose memory they have.
    """
    leaves = pytree.tree_leaves(result)
    memories = {leaf.untyped_storage()._cdata for leaf in leaves if has_memory(leaf)}
    is_hidden = any(type(leaf).__name__ in _MEMORY_OF_OTHERS for leaf in leaves)
    for leaf, answer, value, before in answered:
        if _state(value) == before and any(value is tensor for tensor in written):
            torch.autograd.graph.increment_version(value)
        if _state(value) != before or func.__name__ == "__set__":
            if not answer.module.write(answer.twin, value):
                raise StreamError(f"{_sentence_of(leaf)}, and {func.__name__} would write to it")
        elif is_hidden or value.untyped_storage()._cdata in memories:
            answer.module.share(answer.twin, answer.suffix, value)


_MEMORY_OF_OTHERS = ("ndarray", "PyCapsule")
"""Classes of results that may be views of a tensor's memory."""

_NO_WRITES = ("__invert__", "__index__", "__int__", "__iter__")


def is_in_place(func: Any) -> bool:
    """Tell whether a function writes to its first argument, as far as its name tells."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    return in_place or (name.startswith("__i") and name not in _NO_WRITES)


def _sets_itself(func: Any, args: Sequence[Any]) -> bool:
    """Tell whether a tensor is set to the memory that it has, as parametrizations do."""
    return func.__name__.partition(".")[0] == "set_" and len(args) == 2 and args[0] is args[1]


def _state(value: torch.Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written to, or is given other memory."""
    return value._version, value.untyped_storage()._cdata


def has_memory(value: object) -> bool:
    """Tell whether a value is a plain tensor that shows its memory; a functorch wrapper shows none."""
    plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided  # type: ignore[attr-defined]
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(value)  # type: ignore[arg-type]


def _refuse_values(args: Any, kwargs: Any) -> NoReturn:
    """Raise StreamError, which names the tensor where the arguments show it."""
    leaves = pytree.tree_leaves((args, kwargs))
    sentences = [_sentence_of(leaf) for leaf in leaves if isinstance(leaf, AbsentTensor)]
    raise StreamError(sentences[0] if sentences else "a parameter is not in memory: call the model itself")
