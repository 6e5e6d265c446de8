"""The bytes of a delegate: which region of which method it is, and what its code takes besides its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, Literal

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import ITEM_SIZES, STRICT, Input, Part, Symbol
from penstock.schedule.facts.validity import LARGEST_SIZE, size_faults
from penstock.schedule.payload.codec import Payload
from penstock.schedule.payload.text import decode, encode, parse

PAYLOAD, PROGRAM, STORAGE = "penstock.payload.", "penstock.program.", "penstock.storage."
COMPILED = "penstock.compiled."
"""How the keys of named data begin; a hash of the data follows."""

_DIMENSIONS, _SIDE = 16, (1 << 31) - 1
"""The most dimensions that a tensor of ExecuTorch has, and the largest size of one."""


@dataclass(frozen=True)
class Appended:
    """A tensor of a storage that the code of a region takes: a weight, or a state. Sizes count elements."""

    __pydantic_config__: ClassVar = STRICT
    storage: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    name: str
    mutable: bool


@dataclass(frozen=True)
class RegionCode:
    """What `docs/payload.md` says of a region, field by field."""

    __pydantic_config__: ClassVar = STRICT
    format: Literal["penstock-region"]
    version: Literal[2]
    payload: str
    graph: int
    region: int
    regions: int
    steps: tuple[int, int]
    budget: int | None
    kernels: Literal["executorch", "aotinductor"]
    program: str
    method: str
    inputs: int
    outputs: int
    takes: tuple[Input, ...]
    symbols: tuple[Symbol, ...]
    appended: tuple[Appended, ...]

    def to_bytes(self) -> bytes:
        """The `processed_bytes`: the hash of the JSON, and the JSON."""
        text = encode(self)
        return sha256(text).hexdigest().encode() + b"\n" + text

    @staticmethod
    def from_bytes(data: bytes, *, source: str = "a delegate") -> RegionCode:
        """Reads the bytes of a delegate; raises PayloadError for others."""
        digest, _, data = data.partition(b"\n")
        if digest != sha256(data).hexdigest().encode():
            raise PayloadError(f"{source} is damaged: the sha256 of its bytes differs; copy the .pte again")
        text, tree = parse(data, source)
        if not isinstance(tree, dict) or tree.get("format") != "penstock-region":
            raise PayloadError(f"{source}: expected the region of a penstock payload, got another format")
        return decode(RegionCode, text, tree, source)


def check_regions(regions: Sequence[RegionCode], payload: Payload, source: str) -> None:
    """Raises PayloadError for the first field of a region that does not belong to the payload.

    docs/payload.md, "A region", has the rules; native/executorch/catalog.cpp checks the same of one region.
    """
    catalog = _Catalog(payload)
    for one in regions:
        name = f"{source}, region {one.region} of graph {one.graph}"
        for fault in catalog.faults(one):
            raise PayloadError(f"{name}: {fault}; export again")
    for graph in catalog.steps:
        own = [one for one in regions if one.graph == graph]
        for position, one in enumerate(sorted(own, key=lambda one: one.region)):
            if (one.region, one.regions) != (position, len(own)):
                raise PayloadError(
                    f"{source}, graph {graph}: $.region and $.regions: expected {position} of the {len(own)} "
                    f"regions that there are, got {one.region} of {one.regions}; export again"
                )


class _Catalog:
    """What a payload says of steps and weights, with which its regions have to agree."""

    def __init__(self, payload: Payload) -> None:
        self.steps = {trace.graph: trace.steps for trace in payload.traces}
        self.storages = payload.storages
        self.parts = {weight.fqn: weight.parts[0] for weight in payload.tensors}
        outside = [set(plan.outside) for plan in payload.plans]
        self.stay = set.intersection(*outside) if outside else set()

    def faults(self, region: RegionCode) -> Iterator[str]:
        """One sentence for each field that contradicts the payload."""
        if region.graph not in self.steps:
            yield f"$.graph: expected that of a method, one of {sorted(self.steps)}, got {region.graph}"
            return
        steps, (first, behind) = self.steps[region.graph], region.steps
        most = {"executorch": 1}.get(region.kernels, len(steps))
        if not 0 <= first <= behind <= min(first + most, len(steps)):
            yield f"$.steps: expected one of {len(steps)} steps, or none, got {[first, behind]}"
            return
        for name in ("inputs", "outputs"):
            yield from size_faults(getattr(region, name), f"$.{name}")
        taken = region.inputs if region.kernels == "aotinductor" else 0
        if len(region.takes) != taken:
            yield f"$.takes: expected {taken} inputs, got {len(region.takes)}"
        there = self.stay.union(*(step.reads for step in steps[first:behind]))
        for i, one in enumerate(region.appended):
            path = f"$.appended[{i}]"
            if not 0 <= one.storage < len(self.storages):
                yield f"{path}.storage: expected one of {len(self.storages)} storages, got {one.storage}"
                continue
            storage = self.storages[one.storage]
            untouched = (
                region.kernels == "aotinductor"
            )  # what no step reads, the code asks for and never reads
            if storage.kind == "streamable" and one.storage not in there and not untouched:
                yield f"{path}.storage: expected one that $.steps read, {sorted(there)}, got {one.storage}"
            if one.mutable and storage.kind != "mutable":
                yield f"{path}.mutable: expected false, as the storage is {storage.kind}, got true"
            yield from _tensor_faults(one, path, storage.nbytes)
            yield from _part_faults(one, path, self.parts.get(one.name))


def _tensor_faults(one: Appended, path: str, nbytes: int) -> Iterator[str]:
    """What no tensor in a storage of `nbytes` has."""
    if one.dtype not in ITEM_SIZES:
        yield f"{path}.dtype: expected torch's name of a dtype, got {one.dtype!r}"
    elif sorted(one.dim_order) != list(range(len(one.shape))):
        yield f"{path}.dim_order: expected each dimension of $.shape once, got {list(one.dim_order)}"
    elif not _fits(one, nbytes):
        yield f"{path}.shape: expected a tensor inside of its {nbytes} bytes, got {list(one.shape)}"


def _fits(one: Appended, nbytes: int) -> bool:
    if (
        len(one.shape) > _DIMENSIONS
        or not 0 <= min(one.shape, default=0) <= max(one.shape, default=0) <= _SIDE
    ):
        return False
    item = ITEM_SIZES[one.dtype]
    # The strides of a tensor without items count the other sizes.
    room = LARGEST_SIZE if 0 in one.shape else nbytes - one.offset
    return 0 <= one.offset <= nbytes and item * math.prod(max(1, size) for size in one.shape) <= room


def _part_faults(one: Appended, path: str, part: Part | None) -> Iterator[str]:
    """How a tensor differs from that of its name in the payload, where there is one."""
    if part is None:
        return
    for name in ("storage", "offset", "dtype", "shape"):
        expected, got = getattr(part, name), getattr(one, name)
        if expected != got:
            yield f"{path}.{name}: expected {expected!r}, as {one.name} has in the payload, got {got!r}"
            return
    dense = 1
    for d in reversed(one.dim_order):
        if one.shape[d] > 1 and part.stride[d] != dense and 0 not in one.shape:
            yield f"{path}.dim_order: expected that of {one.name} in the payload, got {list(one.dim_order)}"
            return
        dense *= one.shape[d]
