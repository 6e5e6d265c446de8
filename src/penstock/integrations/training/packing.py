"""What autograd saves within a step: weights are packed as names, as their memory is given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from penstock.integrations.called.places import Values
from penstock.integrations.emptied.absent import has_memory
from penstock.passes.weights.subclasses import each_part, has_parts, plain_tensors

_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{kind} {shape}] is at version {now}; expected version {then} instead. Hint: enable anomaly detection "
    "to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True)."
)
"""What torch says, whose own check saved tensors with hooks have not."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A saved tensor that lies in a weight, without its memory.

    Attributes:
        owner: The pass that has saved it, which is kept alive by this.
        twin: The id of the weight's twin.
        part: The name of the plain tensor in which it lies, None for a quantised weight as a whole.
        start: Where it begins, in bytes from the start of that plain tensor.
        geometry: A tensor of its shape, strides and dtype on the meta device.
    """

    owner: object
    twin: int
    part: str | None
    start: int
    geometry: torch.Tensor

    def over(self, plain: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor in the memory of `plain`, which has the values of its plain tensor."""
        shape = self.geometry
        start = plain.storage_offset() * plain.itemsize + self.start
        with torch.no_grad():
            empty = torch.empty(0, dtype=shape.dtype)
            memory = plain.untyped_storage()
            return empty.set_(memory, start // shape.itemsize, shape.shape, shape.stride())


@dataclass(frozen=True)
class _Handed:
    """What other hooks have made of a tensor, with what unpacks it."""

    packed: Any
    unpack: Callable[[Any], Any]


@dataclass(frozen=True)
class _Kept:
    """A tensor that is no weight, and its version when it was saved."""

    value: torch.Tensor
    version: int


@dataclass(frozen=True)
class _Span:
    """The memory of a plain tensor of a weight that is in memory during a step."""

    start: int
    stop: int
    twin: int
    part: str

    @classmethod
    def of(cls, twin: int, part: str, plain: torch.Tensor) -> _Span:
        last = sum((n - 1) * stride for n, stride in zip(plain.shape, plain.stride(), strict=True))
        start = plain.data_ptr()
        return cls(start, start + (last + 1) * plain.itemsize, twin, part)


class WeightHooks(saved_tensors_hooks):
    """Packs the weights of one step, and hands what is no weight to the hooks that were there.

    Only the innermost hooks of autograd are called, so that checkpointing would otherwise keep what it means
    to drop.

    Args:
        owner: The pass.
        values: The weights that are in memory for the step, by twin.
        names: The FQNs of twins.
        unpack: Returns the tensor of a packed weight.
    """

    def __init__(
        self, owner: object, values: Values, names: Any, unpack: Callable[[PackedWeight], torch.Tensor]
    ) -> None:
        parts = {twin: plain_tensors(names[twin], value) for twin, value in values.items()}
        spans = [
            _Span.of(twin, part, plain) for twin, plains in parts.items() for part, plain in plains.items()
        ]
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(value: torch.Tensor) -> Any:
            if has_parts(value):
                packed = _pack_whole(owner, value, parts, spans)
                if isinstance(packed, PackedWeight):
                    return packed
                value = packed
            elif has_memory(value) and value.numel():
                span = next((s for s in spans if s.start <= value.data_ptr() < s.stop), None)
                if span is not None:
                    if value.is_conj() or value.is_neg():
                        return _Kept(value.clone(), 0)
                    start = value.data_ptr() - span.start
                    return PackedWeight(owner, span.twin, span.part, start, _geometry(value))
            if outer is not None:
                return _Handed(outer[0](value), outer[1])
            return _Kept(value, value._version)

        def unpacked(packed: Any) -> Any:
            if isinstance(packed, PackedWeight):
                return unpack(packed)
            if isinstance(packed, _Handed):
                return packed.unpack(packed.packed)
            value = packed.value
            if value._version != packed.version:
                facts = {"kind": value.type(), "shape": list(value.shape), "now": value._version}
                raise RuntimeError(_WRITTEN.format(then=packed.version, **facts))
            return value

        super().__init__(pack, unpacked)
        self._parts = parts

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._parts.clear()  # what is saved keeps `pack`, and with it these weights


def _geometry(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _pack_whole(
    owner: object, value: torch.Tensor, weights: dict[int, dict[str, torch.Tensor]], spans: Sequence[_Span]
) -> PackedWeight | torch.Tensor:
    """Pack a quantised tensor: a weight as a whole; another one that shares its memory is copied."""
    own = [plain for plain in plain_tensors("", value).values() if has_memory(plain)]
    places = [plain.data_ptr() for plain in own]
    for twin, parts in weights.items():
        if places == [plain.data_ptr() for plain in parts.values()]:
            shapes = zip(own, parts.values(), strict=True)
            if all((a.shape, a.stride()) == (b.shape, b.stride()) for a, b in shapes):
                return PackedWeight(owner, twin, None, 0, _geometry(own[0]))
    if any(span.start <= place < span.stop for place in places for span in spans):
        return each_part(value, lambda plain: plain.clone())
    return value
