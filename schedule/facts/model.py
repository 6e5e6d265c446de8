"""The words of docs/payload.md as classes: storages, weights, traces, steps, plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    that of the blocks that `runtime/files/artifact_files.py` samples.

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


@dataclass(frozen=True)
class Computed:
    """A tensor that a program computes from units, each slice on dimension 0 from one of them."""

    __pydantic_config__: ClassVar = STRICT
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class SparseRead:
    """A read that needs of a tensor only the slices on dimension 0, its units, that an operand names.

    `view` is the tensor as the operator is given it, a weight or a view of one, whose units do not overlap.
    `operator` is the operator's name, which says how the operand names units (`passes/sparse/contracts.py`).
    Reads of one method with the same `route` have the same operand. A call of the exported sizes names at
    most `asked` different units.

    With `tiles`, every call needs all units, which are the tiles of a product that may be computed one after
    another. If `slices` is more than 1, a unit is a run of so many slices: the operator is given the tensor
    whose dimension 0 is the first two of `view` in one.

    If `computed` is there, the operator is given that in the place of `view`, a slice at a time.
    """

    __pydantic_config__: ClassVar = STRICT
    view: Part
    operator: str
    route: int
    asked: int
    slices: int = 1
    tiles: bool = False
    computed: Computed | None = None

    @property
    def storage(self) -> int:
        return self.view.storage

    @property
    def count(self) -> int:
        """The number of units."""
        return self.view.shape[0]

    @cached_property
    def unit_stride(self) -> int:
        """Bytes from the start of a unit to that of the next."""
        return self.view.stride[0] * ITEM_SIZES[self.view.dtype]

    @cached_property
    def unit_nbytes(self) -> int:
        """Bytes from the first to the last item of a unit."""
        return part_nbytes(replace(self.view, shape=self.view.shape[1:], stride=self.view.stride[1:]))

    @property
    def units(self) -> tuple[int, int, int, int]:
        """Equal for two reads of a storage that mean the same bytes by the same number of a unit."""
        return self.count, self.view.offset, self.unit_stride, self.unit_nbytes

    @property
    def dense(self) -> bool:
        """Tells whether calls of the exported sizes may ask for all units, though not as tiles."""
        return not self.tiles and self.asked >= self.count

    def unit(self, number: int) -> tuple[int, int]:
        """The bytes of a unit: start and stop, counted from the start of the storage."""
        start = self.view.offset + number * self.unit_stride
        return start, start + self.unit_nbytes


@dataclass(frozen=True)
class Pool:
    """Memory of at most `nbytes`, beside the arena, in which units come and go as calls ask for them.

    `layout[s]` is where storage s begins in the address space of the pool, in bytes, or -1 if its units are
    not in it. All reads of a storage that it serves have the same units; reads by tiles are served only with
    `tiles`, and dense ones only with `dense`. Memory is taken and given back in granules of
    `granule` bytes, counted from offset 0; what two units share is counted once.

    `expected_ns[i]` are the nanoseconds that a pass of the plan's trace number i is expected to wait for
    units, if all are asked for equally often, and `worst_ns[i]` those of a pass that finds none of them.
    Both are empty if nobody has estimated them.
    """

    __pydantic_config__: ClassVar = STRICT
    nbytes: int
    granule: int
    layout: tuple[int, ...]
    expected_ns: tuple[int, ...] = ()
    worst_ns: tuple[int, ...] = ()
    tiles: bool = False
    dense: bool = True

    def has(self, read: SparseRead) -> bool:
        """Tells whether the pool serves a read."""
        served = self.layout[read.storage] >= 0
        return served and (self.tiles or not read.tiles) and (self.dense or not read.dense)

    @property
    def storages(self) -> tuple[int, ...]:
        """The storages whose units are in the pool."""
        return tuple(s for s, place in enumerate(self.layout) if place >= 0)

    def whole(self, reads: Sequence[int], sparse: Sequence[SparseRead]) -> tuple[int, ...]:
        """All that a step reads, which has `reads` of the arena: what the pool serves of `sparse`, too."""
        return tuple(sorted({*reads, *(read.storage for read in sparse if self.has(read))}))

    def granules(self, read: SparseRead, number: int) -> tuple[int, int]:
        """The granules that hold a unit: the first one, and the one behind the last."""
        start, stop = read.unit(number)
        place = self.layout[read.view.storage]
        return (place + start) // self.granule, -(-(place + stop) // self.granule)

    def bytes_in(self, granules: tuple[int, int], storage: int, nbytes: int) -> tuple[int, int]:
        """The bytes of a storage of `nbytes` in granules, from the first to one behind the last."""
        (first, stop), place = granules, self.layout[storage]
        return max(first * self.granule, place), min(stop * self.granule, place + nbytes)


ArenaKind = Literal["contiguous", "paged"]
Backing = Literal["mapped", "anonymous"]
Wrap = Literal["overlap", "barrier"]
Timing = Literal["modelled", "measured"]
Direction = Literal["in", "out"]


# Facts: the order of reads, and what it costs.


@dataclass(frozen=True)
class Work:
    """The work of some kernels: floating-point operations, and bytes read and written, weights included."""

    __pydantic_config__: ClassVar = STRICT
    flops: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Step:
    """One position of the lowered order that reads or writes at least one storage of the arena.

    `lead_ns` is the compute since the step before, which reads no streamable storage, and `read_ns` the
    compute that reads those in `reads`, which holds storage indices in ascending order. `name` is that of the
    node or kernel that reads. `lead_work` and `read_work` are the work from which times are modelled.
    `writes` are the produced storages whose whole content is written during the read, in ascending order.
    `sparse` says of some storages in `reads` that single units of them may do. In the traces of a plan with a
    pool, `reads` are what has to be in the arena, and so not what the pool serves.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    reads: tuple[int, ...]
    lead_ns: int
    read_ns: int
    lead_work: Work = Work()
    read_work: Work = Work()
    writes: tuple[int, ...] = ()
    sparse: tuple[SparseRead, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The steps of one method in the order the lowered program runs them, at one shape point.

    `graph` is the number that the method's probes carry. `shape` names the shape point
    (`batch=1,sequence=16`; empty for a static program). `tail_ns` is the compute after the last
    step, and `gap_ns` the time between two calls. `times` says whether the times are modelled or measured.
    `follows` is the number of the method whose call comes before each call of this one, if that is another.
    """

    __pydantic_config__: ClassVar = STRICT
    method: str
    graph: int
    shape: str
    steps: tuple[Step, ...]
    tail_ns: int
    gap_ns: int
    times: Timing
    tail_work: Work = Work()
    follows: int | None = None

    @property
    def compute_ns(self) -> int:
        """Nanoseconds of one pass with every weight in memory."""
        return sum(s.lead_ns + s.read_ns for s in self.steps) + self.tail_ns + self.gap_ns


@dataclass(frozen=True)
class Input:
    """A leaf of a method's inputs: a tensor, or a Python value, whose `dtype` is the name of its type.

    A dimension in `shape` is a size, or the name of a symbol of the method. `value` is the repr of a
    Python value that export has made constant.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    dtype: str
    shape: tuple[int | str, ...] = ()
    device: str = "cpu"
    value: str | None = None


@dataclass(frozen=True)
class Symbol:
    """A dynamic size of a method's inputs, from `lower` to `upper` (both included, None: no limit).

    `example` is its value in the inputs that the method was exported with.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    lower: int
    upper: int | None
    example: int


@dataclass(frozen=True)
class Method:
    """The inputs of a method: its leaves in pytree order, and the symbols in their shapes.

    `graph` is the number that the method's probes carry.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    graph: int
    inputs: tuple[Input, ...]
    symbols: tuple[Symbol, ...] = ()


# Facts: the machine.


UNEVEN = "measured rates are uneven: see `penstock hardware`"
"""The end of the note of hardware that has a doubtful figure."""

MEASURED = "measured on"
"""The beginning of the note of hardware whose figures were measured."""


@dataclass(frozen=True)
class Confidence:
    """How far the times of a plan can be trusted.

    `level` is `measured` if the rates were measured and agreed between trials, `doubtful` if one of them did
    not or is a guess, and `assumed` if none was measured: those of a preset, or figures that were given.
    `why` has the reasons in words.
    """

    level: Literal["measured", "doubtful", "assumed"]
    why: str

    @property
    def text(self) -> str:
        """Level and reasons in one phrase."""
        return f"{self.level}: {self.why}"


@dataclass(frozen=True)
class Hardware:
    """The machine that a plan assumes. Rates are per second, and latencies are for each transfer.

    `link_bytes_per_s` is the rate at which weights reach the arena while enough bytes are on their way at
    once. With one copy of b bytes on its way it is that rate times b / (b + `link_in_flight_bytes`): the
    latter, over the rate, is the time from when a transfer may start until its bytes flow (Hockney's
    half-performance length, Parallel Computers, 1981, section 1.3.2). Copies that may start early enough hide
    it. `memory_nbytes` is all memory of the device. `disk_bytes_per_s` and `disk_latency_ns` are of the disk
    behind the host of a device; the rate is None if there is no such disk or it is not known. `note` says
    where the figures come from. `write_bytes_per_s` is the rate of copies out of the arena, None if they are
    as fast as those into it. With `duplex` the link carries both at once, each at its own rate.
    `host_step_ns` is what it takes the thread that calls a program to launch one streamed step on a device:
    to enqueue its waits, its copy and its events. It is 0 on a CPU, where the steps have that time.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_ns: int
    link_in_flight_bytes: int = 0
    memory_nbytes: int | None = None
    disk_bytes_per_s: float | None = None
    disk_latency_ns: int = 0
    note: str = ""
    write_bytes_per_s: float | None = None
    duplex: bool = False
    host_step_ns: int = 0

    @property
    def uneven(self) -> bool:
        """True if `note` says that figures of this hardware are doubtful."""
        return self.note.endswith(UNEVEN)

    def copy_ns(self, nbytes: int) -> int:
        """Nanoseconds that one transfer of `nbytes` takes, rounded up."""
        return self.link_latency_ns + -int(-nbytes * 1e9 // self.link_bytes_per_s)

    def write_ns(self, nbytes: int) -> int:
        """Nanoseconds that one transfer of `nbytes` out of the arena takes, rounded up."""
        rate = self.write_bytes_per_s or self.link_bytes_per_s
        return self.link_latency_ns + -int(-nbytes * 1e9 // rate)

    def moving_ns(self, transfer: Transfer) -> int:
        """Nanoseconds that a transfer takes in its direction, rounded up."""
        nbytes = transfer.stop - transfer.start
        return self.copy_ns(nbytes) if transfer.direction == "in" else self.write_ns(nbytes)

    @property
    def link_fill_ns(self) -> int:
        """Nanoseconds from when a transfer may start until its bytes flow, if the link is idle."""
        return -int(-self.link_in_flight_bytes * 1e9 // self.link_bytes_per_s)

    def disk_ns(self, nbytes: int) -> int:
        """Nanoseconds that the disk behind the host takes to read `nbytes`, rounded up.

        The rate of the disk must be known.
        """
        assert self.disk_bytes_per_s is not None
        return self.disk_latency_ns + -int(-nbytes * 1e9 // self.disk_bytes_per_s)


# Decisions.


@dataclass(frozen=True, order=True)
class Range:
    """Bytes `start` to `stop` of a layout, the latter excluded."""

    __pydantic_config__: ClassVar = STRICT
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Arena:
    """The facts of the memory that a plan fills, before any decision.

    `layout[s]` is the layout offset at which storage s begins, or -1 for a storage that is never in
    the arena. `granule` is the unit, in bytes, in which memory is filled and dropped; granules are
    counted from layout offset 0. `segments` are the ranges of the layout that hold bytes: one for each
    mapped file, or a single one for anonymous memory. A span is a run of granules, cut to its segment.

    In a `paged` arena, the address of a storage is its layout offset, and a range of the layout takes
    memory only while it is on the device. In a `contiguous` arena, the plan chooses addresses, each congruent
    to the layout offset modulo the granule.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ArenaKind
    backing: Backing
    granule: int
    layout: tuple[int, ...]
    segments: tuple[Range, ...]


@dataclass(frozen=True)
class Transfer:
    """One copy of the layout range `start:stop` into the arena, for the read of step `step`, or out of it.

    The copy may start once step `after` has ended. `after` is less than `step` and counts from the start of
    the pass in which `step` runs: a negative value is step `n + after` of the pass before, which has n steps.
    If that is one of the same method, it is at least `step - n`: no dependency reaches back two passes.

    A copy in direction `out` takes produced bytes to the spill file, from which another brings them back.
    Step `step` does not end before it is done, so that they may leave with that step.
    """

    __pydantic_config__: ClassVar = STRICT
    start: int
    stop: int
    step: int
    after: int
    direction: Direction = "in"
    link: int = 0


@dataclass(frozen=True)
class Drop:
    """The layout range `start:stop` leaves the device when step `step` ends."""

    __pydantic_config__: ClassVar = STRICT
    start: int
    stop: int
    step: int


@dataclass(frozen=True)
class Schedule:
    """What streams in one pass of one method: transfers in issue order, and drops by step.

    A range that no transfer brings and no drop takes is resident. The transfers with a negative
    `after` are on their way, or done, when a call begins. `predicted_ns` is the steady period, and
    `lower_bound_ns` a period that no plan can beat (`bound/period.py`), None if the solver did not find one
    in time.

    `staged[i]` is the number of bytes of transfer i that the host does not hold. The disk reads them into a
    ring of `staging_bytes` first, in issue order, as soon as earlier transfers have left room in the ring.
    `staged` is empty if the host holds the bytes of every transfer.

    `boundary` is what is on the device, or on its way, when a call of this method follows another call of
    it, or a call of the method that its trace follows. After any other call, only the resident ranges are
    there, and the rest of `boundary` is loaded in its order. None stands for the boundary of the plan. Of
    methods whose calls come in turn, each has its part of the period and of the bound.
    """

    __pydantic_config__: ClassVar = STRICT
    graph: int
    transfers: tuple[Transfer, ...]
    drops: tuple[Drop, ...]
    predicted_ns: int
    lower_bound_ns: int | None = None
    staged: tuple[int, ...] = ()
    staging_bytes: int = 0
    boundary: tuple[Range, ...] | None = None

    def moved_bytes(self, direction: Direction) -> int:
        """Bytes that the transfers of one direction move in a pass."""
        return sum(t.stop - t.start for t in self.transfers if t.direction == direction)


@dataclass(frozen=True)
class HostTier:
    """The memory of a host between disk and device: `nbytes`, in which it holds the ranges `resident`.

    The staging ring of the schedules takes a part of these bytes.
    """

    __pydantic_config__: ClassVar = STRICT
    nbytes: int
    resident: tuple[Range, ...]


@dataclass(frozen=True)
class Decisions:
    """The decisions of a plan: which bytes are on the device when, for every method, within `budget` bytes.

    This class has the decisions alone. Plans are made, stored and run as a `Plan` (`schedule/plan.py`), a
    subclass that can also be written and drawn.

    `outside` lists the storages that are held whole in ordinary memory: all that are not streamable, and all
    others too if everything fits. Their bytes and `arena_bytes` together are within the budget.
    `addresses[s]` is the address of storage s in a contiguous arena (-1 for a storage outside); it is empty
    for a paged arena. The ranges in `resident` never leave the device. `boundary`, which contains them, is on
    the device or on its way between calls, in the order in which a cold start loads it; each of several
    methods may have a boundary of its own. `traces` are those that the plan was made for. `names` and `sizes`
    (bytes) are those of the storages, for people who read the plan without its catalog; they are empty if
    nobody gave them. `host` is the memory of a host between disk and device, None if that memory holds all
    that streams. `pool` is the memory for single units of what is read sparsely, None if all is read whole.
    """

    __pydantic_config__: ClassVar = STRICT
    budget: int
    arena: Arena
    arena_bytes: int
    outside: tuple[int, ...]
    addresses: tuple[int, ...]
    resident: tuple[Range, ...]
    boundary: tuple[Range, ...]
    wrap: Wrap
    schedules: tuple[Schedule, ...]
    traces: tuple[Trace, ...]
    hardware: Hardware
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    host: HostTier | None = None
    pool: Pool | None = None

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes copied to the device in one pass of each method, summed."""
        return sum(schedule.moved_bytes("in") for schedule in self.schedules)

    @cached_property
    def written_bytes(self) -> int:
        """Bytes copied out of the arena in one pass of each method, summed."""
        return sum(schedule.moved_bytes("out") for schedule in self.schedules)

    @cached_property
    def produced(self) -> frozenset[int]:
        """The storages that a step writes: what a forward keeps for its backward."""
        return frozenset(s for trace in self.traces for step in trace.steps for s in step.writes)

    def boundary_of(self, schedule: Schedule) -> tuple[Range, ...]:
        """The ranges on the device, or on their way to it, between two calls of the schedule's method."""
        return self.boundary if schedule.boundary is None else schedule.boundary

    def reads_of(self, step: Step) -> tuple[int, ...]:
        """The storages that a step of the plan's traces reads: from the arena, and by units from the pool."""
        return self.pool.whole(step.reads, step.sparse) if self.pool else step.reads

    def expected_ns(self, number: int) -> int:
        """Nanoseconds that a pass of trace `number` takes, with what it is expected to wait for units."""
        waits = self.pool.expected_ns if self.pool else ()
        return self.schedules[number].predicted_ns + (waits[number] if waits else 0)

    @property
    def compute_ns(self) -> int:
        """Nanoseconds of one pass of each method with every weight in memory, summed."""
        return sum(trace.compute_ns for trace in self.traces)

    @property
    def predicted_ns(self) -> int:
        """Nanoseconds that one more pass of each method costs in the steady state, summed.

        If there is a pool, this has what a pass is expected to wait for units.
        """
        units = sum(self.pool.expected_ns) if self.pool else 0
        return sum(schedule.predicted_ns for schedule in self.schedules) + units

    @property
    def lower_bound_ns(self) -> int | None:
        """Nanoseconds that no plan can beat, summed over the methods; None if the bound of one is missing.

        If there is a pool, no plan with that pool can, whatever its calls ask for.
        """
        bounds = [s.lower_bound_ns for s in self.schedules if s.lower_bound_ns is not None]
        return sum(bounds) if len(bounds) == len(self.schedules) else None

    @property
    def predicted_seconds(self) -> float:
        """`predicted_ns` in seconds."""
        return self.predicted_ns / 1e9

    @property
    def lower_bound_seconds(self) -> float | None:
        """`lower_bound_ns` in seconds."""
        return None if self.lower_bound_ns is None else self.lower_bound_ns / 1e9

    @property
    def confidence(self) -> Confidence:
        """How far the predicted times can be trusted, and why."""
        known = self.hardware.note.removesuffix(UNEVEN).removesuffix("; ")
        if not known.startswith(MEASURED):
            return Confidence("assumed", f"{known or 'figures that were given'}; none of it was measured")
        doubts = [UNEVEN] if self.hardware.uneven else []
        if self.written_bytes and self.hardware.write_bytes_per_s is None:
            doubts.append("writes are taken to be as fast as reads")
        if doubts:
            return Confidence("doubtful", "; ".join([*doubts, known]))
        modelled = any(trace.times == "modelled" for trace in self.traces)
        return Confidence("measured", known + "; times of compute follow from these rates" * modelled)

    @property
    def ratio(self) -> float | None:
        """The predicted time divided by the lower bound; None if there is no bound.

        At a ratio of 1.02, no plan can be more than 2 % faster.
        """
        bound = self.lower_bound_seconds
        if bound is None:
            return None
        return self.predicted_seconds / bound if bound else 1.0


def tensor_of(weight: Weight, part: Part) -> str:
    """The name of a part among all tensors: the FQN of its weight, or `FQN.PART` where it has several."""
    return f"{weight.fqn}.{part.name}" if part.name else weight.fqn


def plain_weights(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Each part as a weight of its own, which has one part without a name."""
    return tuple(
        replace(weight, fqn=tensor_of(weight, part), parts=(replace(part, name=""),)) if part.name else weight
        for weight in weights
        for part in weight.parts
    )


def join_parts(plain: Iterable[Weight], parts: Mapping[str, tuple[str, str]]) -> tuple[Weight, ...]:
    """Undo `plain_weights`: `parts` maps the name of a tensor to its weight's FQN and its part's name."""
    joined: dict[str, Weight] = {}
    for weight in plain:
        fqn, name = parts.get(weight.fqn, (weight.fqn, ""))
        part = replace(weight.parts[0], name=name)
        first = joined.get(fqn)
        joined[fqn] = replace(weight, fqn=fqn, parts=(*(first.parts if first else ()), part))
    return tuple(joined.values())


def storages_together(weights: Sequence[Weight]) -> dict[int, tuple[int, ...]]:
    """Groups of storages that belong to exactly the same weights, for all weights of several parts.

    Maps each storage to its group, which contains it. A storage that further weights use, such as a scale
    that many weights share, is not in the group of the other parts.
    """
    holders: dict[int, list[str]] = {}
    for weight in weights:
        for part in weight.parts:
            holders.setdefault(part.storage, []).append(weight.fqn)
    groups: dict[frozenset[str], list[int]] = {}
    for storage in dict.fromkeys(p.storage for w in weights if len(w.parts) > 1 for p in w.parts):
        groups.setdefault(frozenset(holders[storage]), []).append(storage)
    return {storage: tuple(group) for group in groups.values() for storage in group}


def read_together(trace: Trace, weights: Sequence[Weight]) -> Trace:
    """The trace in which a step that reads one part of a weight reads all parts that any step reads.

    All parts of a weight are then on the device during the same steps, and leave it together. A part that any
    step reads by units is by itself: brought whole with another part, it would take what units save.
    """
    together = storages_together(weights)
    by_units = {read.storage for step in trace.steps for read in step.sparse}
    together = {s: (s,) if s in by_units else group for s, group in together.items()}
    read = {s for step in trace.steps for s in step.reads} - by_units
    steps = tuple(
        replace(step, reads=tuple(sorted(_closed(step.reads, together, read)))) for step in trace.steps
    )
    return replace(trace, steps=steps)


def _closed(reads: Iterable[int], together: Mapping[int, Sequence[int]], read: set[int]) -> set[int]:
    return {*reads, *(other for s in reads for other in together.get(s, (s,)) if other in read)}
