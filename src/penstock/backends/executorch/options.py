"""What a partitioner tells the backend about its regions: the compile specs, which are JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import STRICT, Hardware, Input, Part, Symbol, Work
from penstock.schedule.payload.text import decode, encode, parse

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec

Kernels = Literal["executorch", "aotinductor"]
NO_WORK = Work()


@dataclass(frozen=True)
class Settings:
    """What the user has asked for, which is the same for all regions of a program.

    `budget` is in the user's words (`"50%"`), empty if there is none. `data_file` is the name of the
    `.ptd`, and `least` the number of bytes from which on a storage is worth a region.
    """

    __pydantic_config__: ClassVar = STRICT
    hardware: Hardware
    budget: str = ""
    keep: tuple[str, ...] = ()
    kernels: Kernels = "executorch"
    data_file: str = "weights.ptd"
    least: int = 0


@dataclass(frozen=True)
class RegionFacts:
    """The work of ExecuTorch's own kernels before a region, and behind the last one of a method."""

    __pydantic_config__: ClassVar = STRICT
    lead: Work = NO_WORK
    tail: Work = NO_WORK


@dataclass(frozen=True)
class Alias:
    """One of several names of the same memory, whose number in this list is `part.storage`."""

    __pydantic_config__: ClassVar = STRICT
    fqn: str
    role: Literal["parameter", "buffer", "constant"]
    part: Part


@dataclass(frozen=True)
class PartName:
    """The tensor `name` of the program is the part `part` of the weight `fqn`."""

    __pydantic_config__: ClassVar = STRICT
    name: str
    fqn: str
    part: str


@dataclass(frozen=True)
class MethodFacts:
    """What only the whole method shows: its inputs, and names of weights that its regions do not have.

    `guards` are what export assumed of inputs beyond their sizes, for code that is compiled.
    """

    __pydantic_config__: ClassVar = STRICT
    inputs: tuple[Input, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    aliases: tuple[Alias, ...] = ()
    parts: tuple[PartName, ...] = ()
    guards: tuple[str, ...] = ()


_KINDS: dict[str, type] = {
    "penstock.settings": Settings,
    "penstock.region": RegionFacts,
    "penstock.method": MethodFacts,
}


def to_spec(facts: Settings | RegionFacts | MethodFacts) -> CompileSpec:
    """The compile spec that carries these facts."""
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    key = next(key for key, kind in _KINDS.items() if isinstance(facts, kind))
    return CompileSpec(key, encode(facts))


def from_specs(specs: Iterable[CompileSpec]) -> dict[type, object]:
    """The facts that compile specs carry, by their class. Raises PassError for an unknown spec."""
    options: dict[type, object] = {}
    for spec in specs:
        if spec.key not in _KINDS:
            raise PassError(
                f"the backend is given the unknown compile spec {spec.key!r}, expected those that "
                "PenstockPartitioner makes: give options to PenstockPartitioner"
            )
        kind = _KINDS[spec.key]
        text, tree = parse(spec.value, f"the compile spec {spec.key!r}")
        options[kind] = decode(kind, text, tree, f"the compile spec {spec.key!r}")
    return options


def settings_of(specs: Sequence[Sequence[CompileSpec]]) -> Settings:
    """The settings that all regions share. Raises PassError if there are none, or two that differ."""
    every_settings = [from_specs(spec).get(Settings) for spec in specs]
    for settings in every_settings:
        if not isinstance(settings, Settings) or settings != every_settings[0]:
            difference = "none" if settings is None else "other ones for another region"
            raise PassError(
                f"a region needs the settings of a PenstockPartitioner, the same for all methods, and has "
                f"{difference}: lower all methods with one PenstockPartitioner"
            )
    first = every_settings[0]
    assert isinstance(first, Settings)
    return first
