"""The catalog: weights and where their bytes lie. `model.py` has the rest of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.schedule.facts.hardware import STRICT as _STRICT

Kind = Literal["streamable", "mutable", "returned", "inlined", "small"]


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file and the stamp by which it is recognised.

    `path` is relative to the artifact's folder for a packed file, absolute for a checkpoint
    used in place. `header_sha256` covers the length prefix and the header, `sampled_sha256`
    the blocks that `runtime/files/source.py` samples.
    """

    __pydantic_config__: ClassVar = _STRICT
    path: str
    nbytes: int
    mtime_ns: int
    inode: int
    header_sha256: str
    sampled_sha256: str


@dataclass(frozen=True)
class Extent:
    """`nbytes` of a storage, from `storage_offset` on, that lie at `file_offset` of file `file`."""

    __pydantic_config__: ClassVar = _STRICT
    file: int
    file_offset: int
    storage_offset: int
    nbytes: int


@dataclass(frozen=True)
class Storage:
    """The bytes behind one or more parts; its index in the catalog is its identity.

    `kind` says whether it may be streamed: only `streamable` may. `extents` is empty until the
    bytes lie in a file, and sorted by `storage_offset`; it covers all bytes that a part reads.
    """

    __pydantic_config__: ClassVar = _STRICT
    nbytes: int
    kind: Kind
    extents: tuple[Extent, ...] = ()
    sha256: str | None = None


@dataclass(frozen=True)
class Part:
    """One strided tensor of a weight, inside one storage.

    `name` is empty for a plain tensor. `dtype` is torch's name without the prefix
    (`bfloat16`), `stride` counts elements, `offset` counts bytes from the storage's start.
    """

    __pydantic_config__: ClassVar = _STRICT
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int
    offset: int


@dataclass(frozen=True)
class Weight:
    """A parameter, buffer or constant that export lifted to an input.

    Tied weights, and weights that are views of one another, are separate weights whose parts
    name the same storage. `device` is the device the program was exported for.
    """

    __pydantic_config__: ClassVar = _STRICT
    fqn: str
    role: Literal["parameter", "buffer", "constant"]
    device: str
    parts: tuple[Part, ...]
