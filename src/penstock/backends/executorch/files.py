"""The files of an export, written and read without ExecuTorch: `.pte`, `.ptd`, and a delegate's bytes."""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal

from penstock.backends.executorch.plans import BLOCK, arena, floor_of, kept_by_all
from penstock.runtime.system.atomic import replace_files
from penstock.schedule.atomic_file import reporting, write_all
from penstock.schedule.bounded_file import CEILINGS, open_regular
from penstock.schedule.facts.errors import BudgetError, PayloadError, PlanError, SourceError
from penstock.schedule.facts.model import ITEM_SIZES, STRICT, Input, Part, Symbol
from penstock.schedule.facts.sizes import format_budget, format_size, parse_size
from penstock.schedule.facts.validity import LARGEST_SIZE, size_faults
from penstock.schedule.payload.codec import Payload, verify_payload
from penstock.schedule.payload.text import decode, encode, parse
from penstock.schedule.plan import Plan

Bytes = bytes | memoryview

# The positions of fields in their tables.
_PLANS, _INLINE, _SEGMENTS, _NAMED = 1, 3, 4, 7  # of a program
_PLAN_NAME, _DELEGATES = 0, 7
_BACKEND_FIELD, _PROCESSED = 0, 1
_LOCATION, _INDEX = 0, 1
_DATA_SEGMENTS, _DATA_NAMED = 1, 2  # of the head of a .ptd
_KEY, _SEGMENT = 0, 1
_OFFSET, _SIZE = 0, 1

_PTE: Final = "a .pte without weights"

_LARGEST_HEAD = 64 << 20
"""The most bytes of the list in a `.ptd` that are read; an entry takes some 150."""


@dataclass(frozen=True)
class Delegate:
    """A delegate of a method: the name of its backend, and the bytes that the backend made."""

    method: str
    backend: str
    processed: bytes


@dataclass(frozen=True)
class Pte:
    """The named data in a `.pte` by key, and its delegates in the order of calls."""

    named: Mapping[str, bytes]
    delegates: tuple[Delegate, ...]


def read_open_pte(file: BinaryIO, wanted: Callable[[str], bool]) -> Pte:
    """What an open `.pte` holds: the named data of keys, and the delegates of backends, that are `wanted`.

    Other segments are not read, as they may be weights. Raises ValueError for other bytes, and for more bytes
    than are read of any.
    """
    try:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(32)
        if head[4:6] != b"ET":
            raise ValueError("its first bytes are not those of a .pte")
        size, base = end, 0
        if head[8:12] == b"eh00":
            size, base = struct.unpack_from("<QQ", head, 16)
        pieces = _Pieces(file, end)
        program = _Table.root(memoryview(pieces.read(0, min(size, end))))
        segments = [
            (base + segment.number(_OFFSET, "Q"), segment.number(_SIZE, "Q"))
            for segment in program.tables(_SEGMENTS)
        ]
        if sum(size for _, size in segments) > end:
            raise ValueError(f"its segments have more bytes than its {end}")

        @functools.cache  # several may have the same bytes
        def segment(index: int) -> bytes:
            return pieces.read(*segments[index])

        keys = [(named.text(_KEY), named.number(_SEGMENT, "I")) for named in program.tables(_NAMED)]
        named = {key: segment(index) for key, index in keys if wanted(key)}
        inline = list(program.tables(_INLINE))
        delegates = []
        for plan in program.tables(_PLANS):
            method = plan.text(_PLAN_NAME)
            for delegate in plan.tables(_DELEGATES):
                backend, place = delegate.text(_BACKEND_FIELD), delegate.table(_PROCESSED)
                index, in_segment = place.number(_INDEX, "I"), place.number(_LOCATION, "b")
                if not in_segment or wanted(backend):
                    processed = segment(index) if in_segment else inline[index].vector(0)
                    delegates.append(Delegate(method, backend, processed))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"it is cut off or damaged ({error})") from None
    return Pte(named, tuple(delegates))


def read_ptd(file: BinaryIO) -> dict[str, tuple[int, int]]:
    """The absolute offset and the size of each entry of a `.ptd`, by key, or ValueError for other bytes."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)

    def inside(start: int, size: int) -> tuple[int, int]:
        if start + size > end:
            raise ValueError(f"it is cut off: it has {end} bytes, and {start + size} are needed")
        return start, size

    try:
        head = file.read(48)
        if head[4:6] != b"FT" or head[8:12] != b"FH01":
            raise ValueError("its first bytes are not those of a .ptd")
        start, size, base = struct.unpack_from("<QQQ", head, 16)
        most = sum(inside(start, size))
        if most > _LARGEST_HEAD:
            raise ValueError(f"its head has {most} bytes, expected {_LARGEST_HEAD} at most")
        file.seek(0)
        tensors = _Table.root(memoryview(file.read(most)))
        segments = [
            inside(base + segment.number(_OFFSET, "Q"), segment.number(_SIZE, "Q"))
            for segment in tensors.tables(_DATA_SEGMENTS)
        ]
        return {
            named.text(_KEY): segments[named.number(_SEGMENT, "I")] for named in tensors.tables(_DATA_NAMED)
        }
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"it is cut off or damaged ({error})") from None


class _Pieces:
    """Reads pieces of a file of `end` bytes, which are no more in all than are read of any `.pte`."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self._end, self._left = file, end, CEILINGS[_PTE]

    def read(self, start: int, size: int) -> bytes:
        if start + size > self._end:
            raise ValueError("it is cut off")
        self._left -= size
        if self._left < 0:
            raise ValueError(f"{_PTE} has {CEILINGS[_PTE]:,} bytes at most, and it has more")
        self._file.seek(start)
        return self._file.read(size)


class _Unread:
    """How many bytes of lists and texts may still be read.

    Those of a file are no more than it has, as each lies at a place of its own. Where many refer to the same
    one, reading them would take a time and a memory that no one sees in the size of the file.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def take(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        if self._nbytes < 0:
            raise IndexError("its lists and texts have more bytes than the file")


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer, at a position of its bytes."""

    data: memoryview
    at: int
    unread: _Unread

    @staticmethod
    def root(data: memoryview) -> _Table:
        return _Table(data, struct.unpack_from("<I", data)[0], _Unread(len(data)))

    def number(self, field: int, form: str) -> int:
        place = self._place(field)
        return 0 if place is None else int(struct.unpack_from(f"<{form}", self.data, place)[0])

    def text(self, field: int) -> str:
        return self.vector(field).decode()

    def vector(self, field: int) -> bytes:
        start, size = self._vector(field) or (0, 0)
        self.unread.take(size)
        return bytes(self.data[start : start + size])

    def table(self, field: int) -> _Table:
        place = self._place(field)
        if place is None:
            raise IndexError(f"field {field} is missing")
        return _Table(self.data, self._follow(place), self.unread)

    def tables(self, field: int) -> Iterator[_Table]:
        first, count = self._vector(field) or (0, 0)
        self.unread.take(4 * count)
        return (_Table(self.data, self._follow(first + 4 * k), self.unread) for k in range(count))

    def _place(self, field: int) -> int | None:
        fields = self.at - int(struct.unpack_from("<i", self.data, self.at)[0])
        size, position = struct.unpack_from("<H", self.data, fields)[0], 4 + 2 * field
        offset = struct.unpack_from("<H", self.data, fields + position)[0] if position < size else 0
        return self.at + offset if offset else None

    def _follow(self, place: int) -> int:
        return place + int(struct.unpack_from("<I", self.data, place)[0])

    def _vector(self, field: int) -> tuple[int, int] | None:
        place = self._place(field)
        if place is None:
            return None
        start = self._follow(place)
        return start + 4, int(struct.unpack_from("<I", self.data, start)[0])


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
    for region in regions:
        name = f"{source}, region {region.region} of graph {region.graph}"
        for fault in catalog.faults(region):
            raise PayloadError(f"{name}: {fault}; export again")
    for graph in catalog.steps:
        of_graph = [region for region in regions if region.graph == graph]
        for position, region in enumerate(sorted(of_graph, key=lambda region: region.region)):
            if (region.region, region.regions) != (position, len(of_graph)):
                raise PayloadError(
                    f"{source}, graph {graph}: $.region and $.regions: expected {position} of the "
                    f"{len(of_graph)} regions that there are, got {region.region} of "
                    f"{region.regions}; export again"
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
        for i, appended in enumerate(region.appended):
            path = f"$.appended[{i}]"
            if not 0 <= appended.storage < len(self.storages):
                yield f"{path}.storage: expected one of {len(self.storages)} storages, got {appended.storage}"
                continue
            storage = self.storages[appended.storage]
            untouched = (
                region.kernels == "aotinductor"
            )  # what no step reads, the code asks for and never reads
            if storage.kind == "streamable" and appended.storage not in there and not untouched:
                got = appended.storage
                yield f"{path}.storage: expected one that $.steps read, {sorted(there)}, got {got}"
            if appended.mutable and storage.kind != "mutable":
                yield f"{path}.mutable: expected false, as the storage is {storage.kind}, got true"
            yield from _tensor_faults(appended, path, storage.nbytes)
            yield from _part_faults(appended, path, self.parts.get(appended.name))


def _tensor_faults(appended: Appended, path: str, nbytes: int) -> Iterator[str]:
    """What no tensor in a storage of `nbytes` has."""
    if appended.dtype not in ITEM_SIZES:
        yield f"{path}.dtype: expected torch's name of a dtype, got {appended.dtype!r}"
    elif sorted(appended.dim_order) != list(range(len(appended.shape))):
        yield f"{path}.dim_order: expected each dimension of $.shape once, got {list(appended.dim_order)}"
    elif not _fits(appended, nbytes):
        yield f"{path}.shape: expected a tensor inside of its {nbytes} bytes, got {list(appended.shape)}"


def _fits(appended: Appended, nbytes: int) -> bool:
    if (
        len(appended.shape) > _DIMENSIONS
        or not 0 <= min(appended.shape, default=0) <= max(appended.shape, default=0) <= _SIDE
    ):
        return False
    size = ITEM_SIZES[appended.dtype]
    # The strides of a tensor without items count the other sizes.
    room = LARGEST_SIZE if 0 in appended.shape else nbytes - appended.offset
    return (
        0 <= appended.offset <= nbytes and size * math.prod(max(1, size) for size in appended.shape) <= room
    )


def _part_faults(appended: Appended, path: str, part: Part | None) -> Iterator[str]:
    """How a tensor differs from that of its name in the payload, where there is one."""
    if part is None:
        return
    for name in ("storage", "offset", "dtype", "shape"):
        expected, got = getattr(part, name), getattr(appended, name)
        if expected != got:
            yield f"{path}.{name}: expected {expected!r}, as {appended.name} has in the payload, got {got!r}"
            return
    dense = 1
    for d in reversed(appended.dim_order):
        if appended.shape[d] > 1 and part.stride[d] != dense and 0 not in appended.shape:
            got = list(appended.dim_order)
            yield f"{path}.dim_order: expected that of {appended.name} in the payload, got {got}"
            return
        dense *= appended.shape[d]


_REMEDY = "export with to_executorch(ExecutorchBackendConfig(segment_alignment=4096))"
_BACKEND = "PenstockBackend"
_OWN = (PAYLOAD, PROGRAM, COMPILED)
"""What the keys of penstock's named data begin with."""


@dataclass(frozen=True)
class Exported:
    """What a `.pte` holds of penstock, and where the `.ptd` files beside it have the weights.

    Attributes:
        path: The `.pte`.
        payload: Its weights, traces and plans.
        regions: The regions of all methods, in the order in which each method runs them.
        programs: The code of regions, by key.
        places: The file, and the absolute offset, of each storage's bytes, by key.
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
        """Return the kinds of arena that plans are made for."""
        return (arena(self.payload).kind,)

    def floor(self, *, arena: str) -> int:
        """Return the smallest budget in bytes, with what the export keeps in memory.

        Args:
            arena: One of `arenas()`.
        """
        return floor_of(self.payload, kept_by_all(self.payload)).upper_bytes

    def place_of(self, part: Part) -> tuple[Path, int] | None:
        """Return the file of a part and its absolute offset there; None for one that no file has.

        Args:
            part: A part of one of the payload's weights.
        """
        extents = self.payload.storages[part.storage].extents
        if not extents:
            return None
        path, offset = self.places[self.payload.files[extents[0].file].key]
        return path, offset + extents[0].file_offset + part.offset

    def plan(self, budget: int | str) -> Plan:
        """Return the plan that a program with a budget runs.

        Args:
            budget: Bytes, a size, or a share of the weights (`"50%"`).

        Raises:
            BudgetError: The budget is below that of the lowest plan.
            PlanError: The file has no plans.
        """
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
    """Write what `to_executorch` returned, and return the path.

    An error leaves all files as they were. They are replaced one by one, the `.pte` last: a process that is
    killed between two of them leaves a `.pte` that `read` refuses beside the new `.ptd`.

    Args:
        program: What `to_executorch` returned.
        path: The `.pte`. The `.ptd` files go beside it.
        force: Replace files that exist.

    Raises:
        SourceError: The path does not end in .pte, a file exists, weights do not begin at multiples of 4,096
            bytes, or the program has no values.
        PayloadError: The program is no export of penstock's.
    """
    path = Path(path)
    if path.suffix != ".pte":
        raise SourceError(f"the program goes to a file with the ending .pte, got {path}")
    pte = bytes(program.buffer)
    exported = _exported(path, _contents(path, BytesIO(pte)))
    verify_payload(exported.payload)
    data = {
        name if name.endswith(".ptd") else f"{name}.ptd": content
        for name, content in program._tensor_data.items()
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
    """Read a `.pte`, and the heads of the `.ptd` files beside it that its payload names.

    Args:
        path: The `.pte`.

    Raises:
        PayloadError: The file is no export of penstock's, or its regions contradict its payload.
        SourceError: A file is missing, a `.ptd` is of another program, or its weights do not begin at
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
    places: dict[str, tuple[Path, int, int]] = {}
    for target in sorted({path.parent / file.path for file in payload.files}):
        places |= {key: (target, *place) for key, place in _entries(target, open_file).items()}
    for file in payload.files:
        if file.key not in places:
            raise SourceError(
                f"{path.parent / file.path} is not the file that was exported with {path.name}: it has no "
                f"entry {file.key!r}; put the original back, or export again"
            )
        where, offset, nbytes = places[file.key]
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
    return {key: (where, offset) for key, (where, offset, _) in places.items()}


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
    delegates = [delegate for delegate in contents.delegates if delegate.backend == _BACKEND]
    if len({delegate.processed for delegate in delegates}) < len(delegates):
        raise PayloadError(f"{path} has the same region of penstock twice, expected it once: export again")
    regions = tuple(
        RegionCode.from_bytes(delegate.processed, source=f"{path}, a delegate of {delegate.method!r}")
        for delegate in delegates
    )
    for key in {key for region in regions for key in (region.payload, region.program)}:
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
