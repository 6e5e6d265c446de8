"""What autograd saves within a step: weights are packed as names, as their memory is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from penstock.integrations.called.places import Values
from penstock.integrations.emptied.absent import has_memory
from penstock.integrations.training.activations import Activations
from penstock.passes.weights.subclasses import each_part, has_parts, plain_tensors


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A saved tensor that lies in a weight, without its memory.

    Attributes:
        owner: The pass that has saved it, which is kept alive by this.
        twin: The id of the weight's twin.
        part: The name of the plain tensor in which it lies, None for a quantised weight as a whole.
        start: Where it begins, in bytes from the start of that plain tensor.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides.
    """

    owner: object
    twin: int
    part: str | None
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor, owner: object, twin: int, part: str | None, start: int) -> PackedWeight:
        """Pack a tensor."""
        return cls(owner, twin, part, start, value.dtype, tuple(value.shape), value.stride())

    def over(self, plain: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor in the memory of `plain`, which has the values of its plain tensor."""
        start = plain.storage_offset() * plain.itemsize + self.start
        empty = torch.empty(0, dtype=self.dtype)
        memory = plain.untyped_storage()
        return empty.set_(memory, start // self.dtype.itemsize, self.shape, self.stride)


@contextmanager
def packing(
    owner: object,
    values: Values,
    names: Mapping[int, str],
    unpack: Callable[[PackedWeight], torch.Tensor],
    activations: Activations,
) -> Iterator[None]:
    """Pack the weights that autograd saves in the body, which is the call of one module.

    Args:
        owner: The pass.
        values: The weights that are in memory for the call, by twin.
        names: The FQNs of twins.
        unpack: Returns the tensor of a packed weight.
        others: Keeps what is no weight, if no hooks are there already.
    """
    packer = _Packer(owner, values, names, unpack, activations)
    try:
        with saved_tensors_hooks(packer.pack, packer.unpack):
            yield
    finally:
        packer.spans.clear()  # autograd keeps `packer.pack`, which must not keep the weights


@dataclass(frozen=True)
class _Span:
    """Where a plain tensor of a weight is in memory."""

    start: int
    stop: int
    twin: int
    part: str
    plain: torch.Tensor

    @classmethod
    def of(cls, twin: int, part: str, plain: torch.Tensor) -> _Span:
        last = sum((n - 1) * stride for n, stride in zip(plain.shape, plain.stride(), strict=True))
        start = plain.data_ptr()
        return cls(start, start + (last + 1) * plain.itemsize, twin, part, plain)


class _Packer:
    """Packs weights, and hands what is no weight to the hooks that were there.

    Only the innermost hooks of autograd are called, so that checkpointing would otherwise keep what it means
    to drop.
    """

    def __init__(
        self,
        owner: object,
        values: Values,
        names: Mapping[int, str],
        unpack: Callable[[PackedWeight], torch.Tensor],
        activations: Activations,
    ) -> None:
        self.spans = [
            _Span.of(twin, part, plain)
            for twin, value in values.items()
            for part, plain in plain_tensors(names[twin], value).items()
        ]
        self._owner, self._unpack_weight = owner, unpack
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._others: tuple[Callable[[Any], Any], Callable[[Any], torch.Tensor]] = outer or (
            activations.pack,
            activations.unpack,
        )

    def pack(self, value: torch.Tensor) -> object:
        """Return what autograd keeps of a tensor."""
        packed = self._whole(value) if has_parts(value) else self._plain(value)
        return self._others[0](value) if packed is None else packed

    def unpack(self, packed: Any) -> Any:
        """Return the tensor that was packed."""
        if isinstance(packed, PackedWeight):
            return self._unpack_weight(packed)
        if isinstance(packed, _Copy):
            return packed.value
        return self._others[1](packed)

    def _plain(self, value: torch.Tensor) -> object | None:
        if not has_memory(value) or not value.numel():
            return None
        span = next(
            (candidate for candidate in self.spans if candidate.start <= value.data_ptr() < candidate.stop),
            None,
        )
        if span is None:
            return None
        if value.is_conj() or value.is_neg():
            return _Copy(value.clone())
        return PackedWeight.of(value, self._owner, span.twin, span.part, value.data_ptr() - span.start)

    def _whole(self, value: torch.Tensor) -> object | None:
        """Pack a quantised tensor: a weight by its name; another one that shares its memory is copied."""
        parts = [plain for plain in plain_tensors("", value).values() if has_memory(plain)]
        spans = [span for part in parts for span in self.spans if span.start <= part.data_ptr() < span.stop]
        if not spans:
            return None
        weight = [span for span in self.spans if span.twin == spans[0].twin]
        if [_place(part) for part in parts] == [_place(span.plain) for span in weight]:
            return PackedWeight.of(value, self._owner, spans[0].twin, None, 0)
        return _Copy(each_part(value, torch.clone))


@dataclass(frozen=True)
class _Copy:
    """A copy of a tensor in a weight's memory that has no name."""

    value: torch.Tensor


def _place(plain: torch.Tensor) -> object:
    return plain.data_ptr(), plain.shape, plain.stride()
