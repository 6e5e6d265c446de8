"""Weights of which only some units are in memory: its operands tell which an operator reads.

A watched tensor has a geometry and no memory. Facts and views of it need none. Every other operator is handed
to the root of its storage, which has the units brought that the operator reads, and runs it on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from penstock.integrations.emptied.absent import (
    _FACTS,
    _SAYS,
    _SETTABLE,
    _STORAGE,
    AbsentParameter,
    AbsentTensor,
    empty_storage,
    is_in_place,
)
from penstock.passes.graph.nodes import dtype_name
from penstock.passes.sparse.contracts import CONTRACTS, LINEAR
from penstock.runtime.arena.reading import tensor_at
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.model import ITEM_SIZES, Part, part_nbytes

_VIEWS = frozenset(
    {
        *("transpose", "t", "T", "mT", "H", "mH", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
        *("view", "view_as", "unflatten", "unsqueeze", "squeeze", "expand", "expand_as", "as_strided"),
        *("select", "narrow", "chunk", "split", "tensor_split", "unbind", "unfold", "diagonal", "__iter__"),
        *("detach", "data", "alias"),
    }
)
"""Functions whose results are views. Of complex tensors mH and H are none, as values change."""

_MAY_VIEW = frozenset({"reshape", "flatten", "ravel", "contiguous", "reshape_as"})
"""Functions that return views where the geometry allows."""

_MAY_CONVERT = frozenset({"to", "float", "half", "bfloat16", "double", "type_as", "cpu"})
"""Functions that return the tensor itself where it has what they ask for."""

_REFUSED = frozenset(
    {"data_ptr", "__dlpack__", "share_memory_", "storage", "_typed_storage", "set_", "apply_", "map_"}
)

_ROOT, _GEOMETRY = "penstock_root", "penstock_geometry"


class Root:
    """The storage behind watched tensors: `run` has an operator run that reads some of them."""

    def __init__(self, part: Part, nbytes: int, says: str, run: Callable[..., Any]) -> None:
        self.part, self.nbytes, self.says, self.run = part, nbytes, says, run
        self._flat: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        count = nbytes // ITEM_SIZES[part.dtype]
        whole = torch.empty(count, dtype=getattr(torch, part.dtype), device="meta")
        start = part.offset // ITEM_SIZES[part.dtype]
        self.geometry = whole.as_strided(part.shape, part.stride, start)

    @property
    def storage(self) -> int:
        """The number of the storage."""
        return self.part.storage

    def watch(self, twin: torch.Tensor, unit: int | None = None) -> None:
        """Have an absent tensor stand for this root, or for one unit of it."""
        twin.__class__ = WatchedParameter if isinstance(twin, nn.Parameter) else WatchedTensor
        twin.__dict__.update({_ROOT: self, _GEOMETRY: self.geometry if unit is None else self.geometry[unit]})

    def tensor(self, watched: torch.Tensor, address: int) -> torch.Tensor:
        """Return the plain tensor of a watched one, whose storage begins at `address`."""
        shape = vars(watched)[_GEOMETRY]
        flat = self._flat.get((address, shape.dtype))
        if flat is None:
            count = self.nbytes // shape.dtype.itemsize
            with torch.inference_mode(False):
                flat = tensor_at(address, Part("", dtype_name(shape.dtype), (count,), (1,), self.storage, 0))
            self._flat[address, shape.dtype] = flat
        with torch.no_grad():
            return flat.as_strided(shape.shape, shape.stride(), shape.storage_offset())

    def versions(self) -> list[int]:
        """Return the versions of all memory of this root."""
        return [memory._version for memory in self._flat.values()]

    def forget(self) -> None:
        """Forget memory that is given back."""
        self._flat.clear()

    def covers(self, address: int, value: torch.Tensor) -> bool:
        """Tell whether a tensor lies in the memory at `address`."""
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        return type(value) is torch.Tensor and address <= value.data_ptr() < address + self.nbytes

    def like(self, value: torch.Tensor, address: int) -> torch.Tensor:
        """Return a watched tensor in place of a plain one over the memory at `address`, or a copy."""
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return value.clone()
        if value.is_conj() or value.is_neg():
            return value.resolve_conj().resolve_neg()
        offset, odd = divmod(value.data_ptr() - address, value.itemsize)
        if odd:
            return value.clone()
        base = torch.empty(self.nbytes // value.itemsize, dtype=value.dtype, device="meta")
        return self.made(base.as_strided(value.shape, value.stride(), offset))

    def made(self, geometry: torch.Tensor) -> torch.Tensor:
        """Return the watched tensor of a geometry."""
        wrapper: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            WatchedTensor,
            geometry.shape,
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=geometry.dtype,
            device=torch.device("cpu"),
            storage_size=0,
        )
        wrapper.__dict__.update({_ROOT: self, _GEOMETRY: geometry, _SAYS: self.says, _STORAGE: _EMPTY})
        return wrapper


_EMPTY = empty_storage(torch.device("cpu"))


class WatchedTensor(AbsentTensor):
    """A tensor whose bytes come by units, when an operator reads them."""

    penstock_decides = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        elif name == "__set__":
            return _set(func, *args)
        elif name == "untyped_storage":
            return super().__torch_function__(func, types, args, kwargs)
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "_make_dual":  # neither a watched tensor nor memory that is given back has tangents
            return func(*pytree.tree_map_only(WatchedTensor, torch.clone, args), **kwargs)
        first = args[0] if args else None
        if isinstance(first, WatchedTensor):
            answer = _without_reading(func, name, args, kwargs)
            if answer is not None:
                return answer
        return root_of(next(watched_in(args, kwargs))).run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Serve what asks for no function of a tensor's own, as code in C++ and transforms do."""
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], WatchedTensor):
            return _view(func, args, kwargs)
        watched = next(iter(watched_in(args, kwargs)), None)
        if watched is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return root_of(watched).run(func, args, kwargs)


class WatchedParameter(WatchedTensor, AbsentParameter):
    """A watched tensor that is a parameter."""


def root_of(watched: torch.Tensor) -> Root:
    """Return the root of a watched tensor."""
    root: Root = vars(watched)[_ROOT]
    return root


def part_of(watched: torch.Tensor) -> Part:
    """Return the geometry of a watched tensor in its storage."""
    shape, storage = vars(watched)[_GEOMETRY], root_of(watched).storage
    start = shape.storage_offset() * shape.itemsize
    return Part("", dtype_name(shape.dtype), tuple(shape.shape), tuple(shape.stride()), storage, start)


def geometry_of(watched: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory of the same geometry."""
    shape: torch.Tensor = vars(watched)[_GEOMETRY]
    return shape


def watched_in(*values: Any) -> Iterator[Any]:
    """Yield the watched tensors among arguments."""
    return (value for value in pytree.tree_leaves(values) if isinstance(value, WatchedTensor))


def bytes_of_view(part: Part) -> tuple[int, int]:
    """Return where a view begins in its storage, and where it ends."""
    return part.offset, part.offset + part_nbytes(part)


def _set(func: Any, watched: torch.Tensor, value: Any) -> None:
    """Set an attribute that needs no values, or `data` to the tensor itself, which changes nothing."""
    name = func.__self__.__name__
    if name in _SETTABLE:
        with torch._C.DisableTorchFunctionSubclass():
            func(watched, value)
    elif name != "data" or value is not watched:
        raise StreamError(f"{vars(watched)[_SAYS]}, and {name} of it cannot be set within a call")


def _without_reading(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function makes of a watched tensor without reading it; None where it reads."""
    first = args[0]
    if name in _VIEWS or (name == "__getitem__" and _is_view(args[1])):
        return _view(func, args, kwargs)
    if name in _MAY_VIEW:
        return _view(func, args, kwargs, may_copy=True)
    if name in _MAY_CONVERT and not kwargs.keys() & {"copy", "memory_format"}:
        with torch._C.DisableTorchFunctionSubclass():
            empty = torch.empty(0, dtype=first.dtype)
        return first if func(empty, *args[1:], **kwargs) is empty else None
    if name.partition(".")[0] in _REFUSED:
        raise StreamError(f"{vars(first)[_SAYS]}, and {name} would hand its memory on: clone it first")
    return None


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, may_copy: bool = False) -> Any:
    """Return the watched tensors of a view; None where a function that may copy does."""
    root, shape = root_of(args[0]), geometry_of(args[0])
    arguments = pytree.tree_map_only(WatchedTensor, geometry_of, args[1:])
    viewed = func(shape, *arguments, **kwargs)
    if may_copy:
        if viewed.untyped_storage()._cdata != shape.untyped_storage()._cdata:
            return None
        if viewed is shape:
            return args[0]
    if isinstance(viewed, torch.Tensor):
        return root.run(func, args, kwargs) if viewed.is_conj() or viewed.is_neg() else root.made(viewed)
    views = [root.made(view) for view in viewed]
    return iter(views) if func.__name__ == "__iter__" else type(viewed)(views)


def _is_view(index: Any) -> bool:
    """Tell whether a tensor that is indexed so gives a view."""
    return all(_is_place(part) for part in (index if isinstance(index, tuple) else (index,)))


def _is_place(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        plain = type(index) is torch.Tensor and not index.dim() and index.dtype != torch.bool
        return plain and not index.is_floating_point() and not index.is_complex()
    if isinstance(index, bool) or type(index).__name__ == "bool_":
        return False
    return index is None or index is Ellipsis or isinstance(index, slice) or hasattr(index, "__index__")


class Form(NamedTuple):
    """A call in the form of an operator that has a contract."""

    operator: str
    arguments: tuple[Any, ...]


def form_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form | None:
    """Return the operator by which a call names units, with its arguments in their order, or None."""
    make = _FORMS.get(func)
    if make is None:
        name = str(func) if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) else ""
        name = name if isinstance(func, torch._ops.OpOverload) else f"{name}.default"
        if name not in CONTRACTS:
            return None
        names = [argument.name for argument in getattr(func, "default", func)._schema.arguments]
        arguments = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
        form: Form | None = Form(name, arguments)
    else:
        form = make(*args, **kwargs)
    if form is None:
        return None
    contract, arguments = CONTRACTS[form.operator], form.arguments
    if contract.index is not None and len(arguments) <= contract.index:
        return None
    weight, index = contract.operands(arguments)
    if not isinstance(weight, WatchedTensor) or sum(1 for _ in watched_in(arguments)) > 1:
        return None
    return form if index is None or type(index) is torch.Tensor else None


def _embedding(
    input: Any, weight: Any, padding_idx: int | None = None, *options: Any, **named: Any
) -> Form | None:
    if (options and options[0] is not None) or named.get("max_norm") is not None:
        return None  # it writes to rows
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Form("aten.embedding.default", (weight, input, padding, False, False))


def _grouped(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Form | None:
    if offs is None:
        return None
    return Form("aten._grouped_mm.default", (x, weight, offs, bias, out_dtype))


def _selected(input: Any, dim: Any, index: Any, **options: Any) -> Form | None:
    return None if dim != 0 or options else Form("aten.index_select.default", (input, 0, index))


def _indexed(weight: Any, index: Any) -> Form | None:
    named = isinstance(index, torch.Tensor) and index.dim() and index.dtype in (torch.int64, torch.int32)
    return Form("aten.index.Tensor", (weight, [index])) if named else None


def _linear(input: Any, weight: Any, bias: Any = None) -> Form:
    return Form(LINEAR, (input, weight, bias))


_FORMS: dict[Any, Callable[..., Form | None]] = {
    functional.embedding: _embedding,
    functional.linear: _linear,
    torch._grouped_mm: _grouped,
    torch.index_select: _selected,
    torch.Tensor.index_select: _selected,
    torch.Tensor.__getitem__: _indexed,
}
if hasattr(functional, "grouped_mm"):
    _FORMS[functional.grouped_mm] = lambda mat_a, mat_b, *, offs=None, bias=None, out_dtype=None: _grouped(
        mat_a, mat_b, offs, bias, out_dtype
    )


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the watched tensors that a function writes to, as far as its name tells."""
    return list(watched_in(args[:1] if is_in_place(func) else (), kwargs.get("out")))
