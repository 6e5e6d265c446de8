"""Slices: the part of a checkpoint's tensor that is the weight of one rank's program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from penstock.runtime.checkpoint.stored_tensor import Region, StoredTensor
from penstock.runtime.files.safetensors_file import ITEM_BITS
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Weight

Slice = tuple[int, int, int]
"""A dimension, a rank and the number of ranks: that rank's equal part of the dimension."""

Slices = Mapping[str, Slice]
"""Slices by a pattern of FQNs."""


def match_slices(weights: Sequence[Weight], slices: Slices) -> dict[str, Slice]:
    """Returns the slice of each weight that has one, by FQN.

    Raises SourceError for values that are no slices, for a pattern that matches no weight, and for a weight
    that two patterns match.
    """
    _check_form(slices)
    pattern_of: dict[str, str] = {}
    for pattern in slices:
        names = [weight.fqn for weight in weights if fnmatchcase(weight.fqn, pattern)]
        if not names:
            raise SourceError(f"slices= has {pattern!r}, which matches no weight of the program: correct it")
        for name in names:
            if name in pattern_of:
                raise SourceError(
                    f"slices= has {pattern_of[name]!r} and {pattern!r} for weight {name}: leave one"
                )
            pattern_of[name] = pattern
    return {name: slices[pattern] for name, pattern in pattern_of.items()}


def _check_form(slices: object) -> None:
    requested = slices.items() if isinstance(slices, Mapping) else [("", slices)]
    for pattern, region in requested:
        numbers = region if isinstance(region, tuple | list) else ()
        if not pattern or len(numbers) != 3 or not all(type(number) is int for number in numbers):
            raise SourceError(
                f"slices= has {region!r} for {pattern!r}, expected (dimension, rank, ranks) by pattern, such "
                'as {"fc1.*": (0, rank, ranks)}'
            )


def region(fqn: str, name: str, tensor: StoredTensor, share: Slice | None) -> Region:
    """Returns the region of a tensor that a weight takes.

    Raises SourceError for a slice that the tensor does not have.
    """
    if share is None:
        return tensor.whole
    dim, rank, world = share
    dims = len(tensor.shape)
    if not -dims <= dim < dims or not 0 <= rank < world:
        raise SourceError(
            f"weight {fqn} has the slice {(dim, rank, world)} (dimension, rank, ranks), which tensor "
            f"{name!r} of shape {list(tensor.shape)} does not have: correct slices="
        )
    size, remainder = divmod(tensor.shape[dim], world)
    if remainder or ITEM_BITS[tensor.dtype] < 8:
        raise SourceError(
            f"tensor {name!r} of {tensor.origin} has {tensor.shape[dim]} elements of {tensor.dtype} in "
            f"dimension {dim}, which {world} ranks cannot share equally: leave {fqn} out of slices="
        )
    ranges = list(tensor.whole)
    ranges[dim] = (rank * size, (rank + 1) * size)
    return tuple(ranges)
