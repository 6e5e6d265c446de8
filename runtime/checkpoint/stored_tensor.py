"""A tensor as it is stored in files: dense boxes, of which any region can be read by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from pathlib import Path

from penstock.runtime.files.artifact_files import CHUNK_BYTES
from penstock.runtime.files.pack import Chunk
from penstock.runtime.files.safetensors_file import (
    ITEM_BITS,
    SAFETENSORS_NAMES,
    TORCH_NAMES,
    TensorEntry,
    open_for_reading,
    read_exactly,
)
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.facts.model import Weight

Region = tuple[tuple[int, int], ...]
"""Half-open ranges of indices, one for each dimension."""

_OPEN = 64

Run = tuple[int, int, int]
"""Adjacent bytes of a file: its number, the offset of the first byte, and their count."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor, at `offsets` and of `sizes`, dense from byte `start` of file number `file` on."""

    file: int
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A checkpoint's tensor: safetensors' dtype, shape, boxes that cover it once; `origin` is its file."""

    origin: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    boxes: tuple[Box, ...]

    @property
    def whole(self) -> Region:
        return tuple((0, size) for size in self.shape)


@dataclass(frozen=True)
class Reading:
    """A region of a stored tensor, in the order of its elements; `cast` is the dtype that they become."""

    tensor: StoredTensor
    region: Region
    cast: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    @property
    def nbytes(self) -> int:
        if self.cast is not None:
            item_bytes = ITEM_BITS[SAFETENSORS_NAMES[self.cast]] // 8
            return prod(self.shape) * item_bytes
        if self.region == self.tensor.whole:
            return self.tensor.nbytes
        return prod(self.shape) * self._item

    @property
    def as_stored(self) -> bool:
        """Tells whether the bytes are one run of each box: all dimensions but the first are taken whole."""
        inner = self.tensor.whole[1:]
        sizes = self.tensor.shape[1:]
        return (
            self.cast is None
            and self.region[1:] == inner
            and all(box.sizes[1:] == sizes for box in self.tensor.boxes)
        )

    @property
    def _item(self) -> int:
        return self.tensor.nbytes // max(prod(self.tensor.shape), 1)

    def runs(self) -> Iterator[Run]:
        """Yields the runs in which the bytes of the region lie, in order."""
        boxes = self.tensor.boxes
        if len(boxes) == 1 and self.region == self.tensor.whole:  # also elements of less than a byte
            yield boxes[0].file, boxes[0].start, self.tensor.nbytes
        elif self.nbytes:
            yield from self._runs(0, [(box, box.start) for box in boxes if box.sizes])

    def chunks(self, files: Sequence[Path]) -> Iterator[Chunk]:
        """Yield the bytes of the region, at most 16 MiB at a time. Raises SourceError."""
        chunks = read_runs(self.runs(), files)
        return chunks if self.cast is None else _cast(chunks, TORCH_NAMES[self.tensor.dtype], self.cast)

    def _runs(self, dim: int, boxes: Sequence[tuple[Box, int]]) -> Iterator[Run]:
        """Yields the runs at one index of all dimensions before `dim`, at the byte given beside each box."""
        start, stop = self.region[dim]
        ends = {box.offsets[dim] for box, _ in boxes} | {
            box.offsets[dim] + box.sizes[dim] for box, _ in boxes
        }
        cuts = [start, *sorted(end for end in ends if start < end < stop), stop]
        for first, last in pairwise(cuts):
            here = [
                (box, begin)
                for box, begin in boxes
                if box.offsets[dim] <= first and last <= box.offsets[dim] + box.sizes[dim]
            ]
            if len(here) == 1 and self._whole_after(dim, here[0][0]):
                yield self._run(dim, *here[0], first, last)
                continue
            for index in range(first, last):
                inner = [(box, self._run(dim, box, begin, index, index + 1)[1]) for box, begin in here]
                yield from self._runs(dim + 1, inner)

    def _whole_after(self, dim: int, box: Box) -> bool:
        return all(
            self.region[d] == (box.offsets[d], box.offsets[d] + box.sizes[d])
            for d in range(dim + 1, len(self.region))
        )

    def _run(self, dim: int, box: Box, begin: int, first: int, last: int) -> Run:
        row = prod(box.sizes[dim + 1 :]) * self._item
        return box.file, begin + (first - box.offsets[dim]) * row, (last - first) * row


def from_entry(path: Path, number: int, stored: TensorEntry) -> StoredTensor:
    """Returns a tensor that is stored as a whole in file `number`."""
    box = Box(number, stored.start, (0,) * len(stored.shape), stored.shape)
    return StoredTensor(path, stored.dtype, stored.shape, stored.nbytes, (box,))


def _cast(chunks: Iterable[Chunk], before: str, after: str) -> Iterator[Chunk]:
    import torch

    old, new = getattr(torch, before), getattr(torch, after)
    for chunk in chunks:
        yield torch.frombuffer(chunk, dtype=old).to(new).view(torch.uint8).numpy().data


def read_runs(runs: Iterator[Run], files: Sequence[Path]) -> Iterator[Chunk]:
    """Yields the bytes of runs, in chunks of 16 MiB (the last may be smaller) that divide no element."""
    with ExitStack() as stack:
        opened: dict[int, int] = {}
        gathered = bytearray()
        for file, start, nbytes in runs:
            if file not in opened:
                if len(opened) == _OPEN:  # a thousand ranks write a thousand files
                    stack.close()
                    opened.clear()
                opened[file] = stack.enter_context(open_for_reading(files[file]))
            position = start
            while position < start + nbytes:
                count = min(start + nbytes - position, CHUNK_BYTES - len(gathered))
                gathered += read_exactly(opened[file], position, count, files[file])
                position += count
                if len(gathered) == CHUNK_BYTES:
                    yield gathered
                    gathered = bytearray()
        if gathered:
            yield gathered


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
    """The region of a tensor that a weight takes. Raises SourceError for a slice beyond the tensor."""
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
