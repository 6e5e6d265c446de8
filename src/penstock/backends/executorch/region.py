"""The bytes of a delegate: which region of which method it is, and what its code takes besides its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar, Literal

from penstock.schedule.facts.errors import PayloadError
from penstock.schedule.facts.model import STRICT
from penstock.schedule.payload.text import decode, encode, parse

PAYLOAD, PROGRAM, STORAGE = "penstock.payload.", "penstock.program.", "penstock.storage."
"""How the keys of named data begin; a hash of the data follows."""


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
    version: Literal[1]
    payload: str
    graph: int
    region: int
    regions: int
    steps: tuple[int, int]
    budget: int | None
    kernels: Literal["executorch"]
    program: str
    method: str
    inputs: int
    outputs: int
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
