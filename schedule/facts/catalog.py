"""The weights of a program, and where their bytes lie: the classes that `docs/payload.md` specifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Kind = Literal["streamable", "mutable", "returned", "inlined", "small", "produced"]
Role = Literal["parameter", "buffer", "constant", "value"]
FileKind = Literal["file", "named"]

IN_ARENA: tuple[Kind, ...] = ("streamable", "produced")
"""The kinds of storages that may be in an arena."""

ALIGNMENT = 64
"""Bytes. Kernels choose their code, and so the last bits of results, by addresses modulo this at most."""

STRICT: dict[str, object] = {"extra": "forbid", "strict": True}
"""How pydantic reads the classes of a payload from a file; it has no effect elsewhere."""

ITEM_SIZES: dict[str, int] = {
    name: nbytes
    for nbytes, names in (
        (1, "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"),
        (1, "float4_e2m1fn_x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"),
        (1, "bits8 bits1x8 bits2x4 bits4x2"),
        (2, "int16 uint16 float16 bfloat16 bits16"),
        (4, "int32 uint32 float32 complex32 bcomplex32"),
        (8, "int64 uint64 float64 complex64"),
        (16, "complex128"),
    )
    for name in names.split()
}
"""The bytes that one item of each dtype takes, by torch's name of the dtype.

torch's own quantised dtypes (qint8 and the like) are missing: their tensors are more than their bytes.
"""


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file and the stamp by which it is recognised, or an entry of ExecuTorch's named data.

    `path` is relative to the artifact's folder for a packed file, and absolute for a checkpoint that
    is used in place. `nbytes` is the size of the file, and `mtime_ns` and `inode` are as in its
    `os.stat`. `header_sha256` is the hash of the length prefix and the header, and `sampled_sha256`
    that of the blocks that `runtime/files/stamp.py` samples.

    Where `kind` is `named`, `path` is the name of a `.ptd`, `nbytes` the size of the entry `key` in it, and
    the stamp is zeros and empty texts: the key has the hash of the bytes.
    """

    __pydantic_config__: ClassVar = STRICT
    path: str
    nbytes: int
    mtime_ns: int
    inode: int
    header_sha256: str
    sampled_sha256: str
    kind: FileKind = "file"
    key: str = ""


@dataclass(frozen=True)
class Extent:
    """A run of `nbytes` bytes, at `storage_offset` of a storage and at `file_offset` of file `file`."""

    __pydantic_config__: ClassVar = STRICT
    file: int
    file_offset: int
    storage_offset: int
    nbytes: int


@dataclass(frozen=True)
class Storage:
    """The bytes behind one or more parts; its index in the catalog is its identity.

    A storage may be streamed only if its `kind` is `streamable` or `produced`. One that is produced has no
    content until a step of the program writes it. `extents` is empty as long as the bytes lie in no file;
    otherwise it is sorted by `storage_offset` and covers all bytes that a part reads. `sha256` is the hash of
    the bytes, None if it is not known.

    `phase` is the address, modulo ALIGNMENT, at which a CPU computes on the storage. A file of a library
    that is used in place gives each tensor the phase at which the library maps it, and so the library's last
    bits.
    """

    __pydantic_config__: ClassVar = STRICT
    nbytes: int
    kind: Kind
    extents: tuple[Extent, ...] = ()
    sha256: str | None = None
    phase: int = 0


@dataclass(frozen=True)
class Part:
    """One strided tensor of a weight, inside one storage.

    `name` is empty for a plain tensor. `dtype` is torch's name without the prefix
    (`bfloat16`), `stride` counts elements, `offset` counts bytes from the storage's start.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int
    offset: int


@dataclass(frozen=True)
class Weight:
    """A parameter, buffer or constant that export lifted to an input, or a value that the program keeps.

    Tied weights, and weights that are views of one another, are separate weights whose parts
    name the same storage. `device` is the device the program was exported for. A weight of role `value` is
    what a forward computes and its backward reads.
    """

    __pydantic_config__: ClassVar = STRICT
    fqn: str
    role: Role
    device: str
    parts: tuple[Part, ...]


def part_nbytes(part: Part) -> int:
    """Bytes from the first to the last item of `part`, gaps between items included; 0 if it has no item."""
    if 0 in part.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride, strict=True))
    return (last + 1) * ITEM_SIZES[part.dtype]
