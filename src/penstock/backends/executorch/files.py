"""The files of an export: writes `.pte` and `.ptd`, and reads what they say without reading the weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from penstock.backends.executorch.containers import Pte, read_open_pte, read_ptd
from penstock.backends.executorch.plans import BLOCK, arenas, floors, kept_by_all
from penstock.backends.executorch.region import COMPILED, PAYLOAD, PROGRAM, RegionCode, check_regions
from penstock.runtime.system.atomic import replace_files
from penstock.schedule.atomic_file import reporting, write_all
from penstock.schedule.bounded_file import open_regular
from penstock.schedule.facts.errors import BudgetError, PayloadError, PlanError, SourceError
from penstock.schedule.facts.model import Part
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size
from penstock.schedule.payload.codec import Payload, verify_payload
from penstock.schedule.plan import Plan

_REMEDY = "export with to_executorch(ExecutorchBackendConfig(segment_alignment=4096))"
_BACKEND = "PenstockBackend"
_OWN = (PAYLOAD, PROGRAM, COMPILED)
"""What the keys of penstock's named data begin with."""


@dataclass(frozen=True)
class Exported:
    """What a `.pte` holds of penstock, and where the `.ptd` files beside it have the weights.

    `regions` are those of all methods, in the order in which each method runs them. `programs` has their
    code, by key. `places` has the file and the absolute offset of each storage's bytes, by key.
    """

    path: Path
    payload: Payload
    regions: tuple[RegionCode, ...]
    programs: Mapping[str, bytes]
    places: Mapping[str, tuple[Path, int]]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that penstock holds; each storage is counted once."""
        return sum(storage.nbytes for storage in self.payload.storages)

    def arenas(self) -> tuple[str, ...]:
        """The kinds of arena that plans are made for, the preferred first."""
        return tuple(arenas(self.payload))

    def floor(self, *, arena: str) -> int:
        """The smallest budget in bytes for a kind of arena, with what the export keeps in memory."""
        return floors(self.payload, kept_by_all(self.payload))[arena].upper_bytes

    def place_of(self, part: Part) -> tuple[Path, int] | None:
        """The file of a part and its absolute offset there; None for one that no file has."""
        extents = self.payload.storages[part.storage].extents
        if not extents:
            return None
        path, offset = self.places[self.payload.files[extents[0].file].key]
        return path, offset + extents[0].file_offset + part.offset

    def plan(self, budget: int | str) -> Plan:
        """The plan that a program with this budget runs; raises BudgetError if it is below the lowest."""
        plans = sorted(self.payload.plans, key=lambda plan: plan.budget)
        if not plans:
            raise PlanError(f"{self.path.name} has no plans, so no budget can be chosen for it: export again")
        nbytes = parse_size(budget, total=self.weight_bytes or 100)
        fitting = [plan for plan in plans if plan.budget <= nbytes]
        if not fitting:
            lowest = plans[0].budget
            raise BudgetError(
                f"the budget of {format_budget(nbytes)} is below that of the lowest plan of "
                f"{self.path.name}, {format_size(lowest, up=True)}: give at least {lowest} bytes",
                floor_bytes=lowest,
            )
        return fitting[-1]


def save(program: Any, path: str | PathLike[str], *, force: bool = False) -> Path:
    """Writes what `to_executorch` returned: the `.pte` at `path`, and the `.ptd` files beside it.

    What fails leaves all files as they were. They are replaced one by one, the `.pte` last: a process that is
    killed between two of them leaves a `.pte` that `read` refuses beside the new `.ptd`. Raises SourceError
    for an alignment from which weights cannot be read in place, for a program without values, and for a file
    that is there already unless `force` is given.
    """
    path = Path(path)
    if path.suffix != ".pte":
        raise SourceError(f"the program goes to a file with the ending .pte, got {path}")
    pte = bytes(program.buffer)
    exported = _exported(path, _contents(path, BytesIO(pte)))
    verify_payload(exported.payload)
    data = {
        name if name.endswith(".ptd") else f"{name}.ptd": one for name, one in program._tensor_data.items()
    }
    if missing := sorted({file.path for file in exported.payload.files} - {path.name, *data}):
        raise SourceError(f"the program has no values for {', '.join(missing)}: export again")
    targets = [*(path.parent / name for name in sorted(data)), path]
    with replace_files(targets, force=force) as fds:
        for target, fd in zip(targets, fds, strict=True):
            with reporting(target):
                if target == path:
                    write_all(fd, pte)
                else:
                    with os.fdopen(os.dup(fd), "wb") as file:
                        data[target.name].write_to_file(file)
        opened = dict(zip(targets, fds, strict=True))
        _places(path, exported.payload, lambda target: os.fdopen(os.dup(opened[target]), "rb"))
    return path


def read(path: str | PathLike[str]) -> Exported:
    """Reads a `.pte`, and the heads of the `.ptd` files beside it that its payload names.

    Raises PayloadError for a file that is no such export, or whose regions contradict its payload, and
    SourceError for a `.ptd` that is missing, that is of another program, or whose weights do not begin at
    multiples of 4,096 bytes.
    """
    path = Path(path)
    try:
        with open(open_regular(path), "rb") as file:
            contents = _contents(path, file)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None
    exported = _exported(path, contents)
    places = _places(path, exported.payload, lambda target: os.fdopen(open_regular(target), "rb"))
    exported = replace(exported, places=places)
    verify_payload(exported.payload)
    return exported


def _places(
    path: Path, payload: Payload, open_file: Callable[[Path], BinaryIO]
) -> dict[str, tuple[Path, int]]:
    """Where the files that a payload names have the bytes of storages, by key; `open_file` opens them."""
    found: dict[str, tuple[Path, int, int]] = {}
    for target in sorted({path.parent / file.path for file in payload.files}):
        found |= {key: (target, *place) for key, place in _entries(target, open_file).items()}
    for file in payload.files:
        if file.key not in found:
            raise SourceError(
                f"{path.parent / file.path} is not the file that was exported with {path.name}: it has no "
                f"entry {file.key!r}; put the original back, or export again"
            )
        where, offset, nbytes = found[file.key]
        if nbytes != file.nbytes:
            raise SourceError(
                f"{where} has {nbytes} bytes as {file.key!r}, expected {file.nbytes}: put the original "
                "back, or export again"
            )
        if offset % BLOCK:
            raise SourceError(
                f"{where} has weights at byte {offset}, expected a multiple of {BLOCK}, from which they are "
                f"read in place: {_REMEDY}"
            )
    return {key: (where, offset) for key, (where, offset, _) in found.items()}


def _entries(path: Path, open_file: Callable[[Path], BinaryIO]) -> dict[str, tuple[int, int]]:
    """The absolute offset and the size of each entry of a `.ptd`, by its key; reads its head only."""
    try:
        with open_file(path) as file:
            return read_ptd(file)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; it belongs beside the .pte") from None
    except ValueError as error:
        raise SourceError(f"{path} cannot be read: {error}; export again") from None


def _contents(path: Path, file: BinaryIO) -> Pte:
    try:
        return read_open_pte(file, lambda name: name == _BACKEND or name.startswith(_OWN))
    except ValueError as error:
        raise PayloadError(f"{path} is no .pte: {error}") from None


def _exported(path: Path, contents: Pte) -> Exported:
    """What a `.pte` holds of penstock, checked as docs/payload.md says; without the places of weights."""
    named = contents.named
    payloads = [key for key in named if key.startswith(PAYLOAD)]
    if len(payloads) != 1:
        raise PayloadError(
            f"{path} holds {len(payloads) or 'no'} payloads of penstock, expected one: lower all methods at "
            "once, with PenstockPartitioner before other backends"
        )
    payload = Payload.from_bytes(_checked(path, named, payloads[0]), source=str(path))
    own = [one for one in contents.delegates if one.backend == _BACKEND]
    if len({one.processed for one in own}) < len(own):
        raise PayloadError(f"{path} has the same region of penstock twice, expected it once: export again")
    regions = tuple(
        RegionCode.from_bytes(one.processed, source=f"{path}, a delegate of {one.method!r}") for one in own
    )
    for key in {key for one in regions for key in (one.payload, one.program)}:
        _checked(path, named, key)
    check_regions(regions, payload, str(path))
    programs = {key: value for key, value in named.items() if key.startswith(_OWN[1:])}
    return Exported(path, payload, regions, programs, {})


def _checked(path: Path, named: Mapping[str, bytes], key: str) -> bytes:
    """An entry whose key ends with its hash."""
    if key not in named:
        raise PayloadError(f"{path} lacks {key!r}, which a delegate of it names: export again")
    if key.rpartition(".")[2] != sha256(named[key]).hexdigest():
        raise PayloadError(f"{path} is damaged: the hash of {key!r} is not that in its key; export again")
    return named[key]
