"""The values that forwards saved for backwards that have not come."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Values = frozenset[StorageWeakRef]
"""The memory of the values that one forward saved."""


class Saved:
    """Counts the memory of values that autograd holds.

    It frees them after their backward, or when the result of their forward is dropped, and tells nobody: the
    storages themselves are asked.
    """

    def __init__(self) -> None:
        self._nbytes: dict[StorageWeakRef, int] = {}

    def add(self, values: Iterable[object], given: Iterable[object]) -> Values:
        """Count the values that a forward saved, except for those in the memory of what it was given."""
        known = {ref for ref, _ in _storages(given)}
        own = {ref: nbytes for ref, nbytes in _storages(values) if ref not in known}
        self._nbytes |= own
        return frozenset(own)

    def nbytes(self, besides: Collection[StorageWeakRef] = ()) -> int:
        """The bytes that are in memory still, without those that are counted elsewhere."""
        self._nbytes = {ref: nbytes for ref, nbytes in self._nbytes.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        return sum(nbytes for ref, nbytes in self._nbytes.items() if ref not in besides)


def _storages(values: Iterable[object]) -> Iterable[tuple[StorageWeakRef, int]]:
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
