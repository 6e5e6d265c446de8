"""The words of docs/payload.md as classes: storages, weights, traces, steps, plans."""

from __future__ import annotations

from collections.abc import Sequence
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

    Attributes:
        path: Relative to the artifact's folder for a packed file, absolute for a checkpoint that is used in
            place; the name of a `.ptd` for named data.
        nbytes: Bytes of the file, or of the entry.
        mtime_ns, inode: Those of its `os.stat`.
        header_sha256: The hash of the length prefix and the header.
        sampled_sha256: The hash of the blocks that `runtime/files/artifact_files.py` samples.
        kind: `"file"`, or `"named"` for named data, whose stamp is zeros and empty texts.
        key: The key of the entry, which has the hash of the bytes; empty for a file.
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
    """A run of `nbytes` bytes: at `storage_offset` of a storage, and at `file_offset` of number `file`."""

    __pydantic_config__: ClassVar = STRICT
    file: int
    file_offset: int
    storage_offset: int
    nbytes: int


@dataclass(frozen=True)
class Storage:
    """The bytes behind one or more parts; its index in the catalog is its identity.

    Attributes:
        nbytes: Its size.
        kind: Only `"streamable"` and `"produced"` storages stream. A step of the program writes a produced
            one, which has no content before.
        extents: Where its bytes lie in files: sorted by `storage_offset`, covering all bytes that a part
            reads. Empty if they lie in no file.
        sha256: The hash of the bytes; None if it is not known.
        phase: The address, modulo ALIGNMENT, at which a CPU computes on it. A tensor in a library's file that
            is used in place keeps the phase of the library's mapping, and so the library's last bits.
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

    Attributes:
        name: Empty for a plain tensor.
        dtype: torch's name without the prefix (`bfloat16`).
        shape: Its sizes.
        stride: Its strides, in elements.
        storage: The index of the storage.
        offset: Bytes from the start of the storage.
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
    """A parameter, buffer or constant that export lifted to an input, or a value that a forward keeps.

    Tied weights, and weights that are views of one another, are separate weights whose parts name one
    storage.

    Attributes:
        fqn: Its name in the model.
        role: `"value"` for what a forward computes and its backward reads.
        device: The device that the program was exported for.
        parts: Its tensors; a quantised weight has several.

    Example:
        >>> weight = program.payload.weights[0]
        >>> weight.fqn, weight.parts[0].dtype, weight.parts[0].shape
        ('0.weight', 'float32', (64, 64))
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
    """A read that needs only some slices on dimension 0 of a tensor: the units that an operand names.

    Attributes:
        view: The tensor as the operator is given it: a weight or a view of one. Its units do not overlap.
        operator: The operator's name, which says how the operand names units (`passes/sparse/contracts.py`).
        route: Equal for reads of one method that have the same operand.
        asked: The most units that a call of the exported sizes names.
        slices: The slices of a unit. If more than 1, the operator is given the tensor whose dimension 0 is
            the first two dimensions of `view` in one.
        tiles: Every call needs all units: tiles of a product that may be computed one after another.
        computed: The tensor that the operator is given in place of `view`, a slice at a time; None for
            `view`.

    Example:
        >>> from penstock.schedule.facts.model import Part, Pool, SparseRead
        >>> table = SparseRead(Part("", "float32", (100, 64), (64, 1), 0, 0), "aten.embedding", 0, asked=8)
        >>> table.unit(2), Pool(4096, 256, layout=(0,)).granules(table, 2)
        ((512, 768), (2, 3))
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
        """The index of the storage that is read."""
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
        """Return the bytes of a unit, counted from the start of the storage: start and stop.

        Args:
            number: The number of the unit.
        """
        start = self.view.offset + number * self.unit_stride
        return start, start + self.unit_nbytes


@dataclass(frozen=True)
class Pool:
    """Memory beside the arena, in which units come and go as calls ask for them.

    All reads of a storage that it serves have the same units.

    Attributes:
        nbytes: Its size at most.
        granule: Memory is taken and given back in multiples of these bytes, counted from offset 0. What two
            units share is counted once.
        layout: Where each storage begins in the pool's address space, in bytes; -1 if its units are not
            there.
        expected_ns: Nanoseconds that a pass of each trace is expected to wait for units, if all are asked for
            equally often; empty if nobody has estimated them.
        worst_ns: The same for a pass that finds no unit in the pool.
        tiles: Whether it serves reads by tiles.
        dense: Whether it serves reads that may ask for all units (`SparseRead.dense`).
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
        """Tell whether the pool serves `read`."""
        served = self.layout[read.storage] >= 0
        return served and (self.tiles or not read.tiles) and (self.dense or not read.dense)

    @property
    def storages(self) -> tuple[int, ...]:
        """The storages whose units are in the pool."""
        return tuple(s for s, place in enumerate(self.layout) if place >= 0)

    def whole(self, reads: Sequence[int], sparse: Sequence[SparseRead]) -> tuple[int, ...]:
        """Return all storages of a step: `reads`, from the arena, and what the pool serves of `sparse`."""
        return tuple(sorted({*reads, *(read.storage for read in sparse if self.has(read))}))

    def granules(self, read: SparseRead, number: int) -> tuple[int, int]:
        """Return the granules that hold a unit: the first, and the one behind the last.

        Args:
            read: A read that the pool serves.
            number: The number of the unit.
        """
        start, stop = read.unit(number)
        place = self.layout[read.view.storage]
        return (place + start) // self.granule, -(-(place + stop) // self.granule)

    def bytes_in(self, granules: tuple[int, int], storage: int, nbytes: int) -> tuple[int, int]:
        """Return the bytes of `storage`, of `nbytes`, in `granules`: the first, and one behind the last."""
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

    Attributes:
        name: The name of the node or kernel that reads.
        reads: Indices of storages, ascending. In the traces of a plan with a pool, without what the pool
            serves.
        lead_ns: Nanoseconds of compute since the step before, which reads no streamable storage.
        read_ns: Nanoseconds of the compute that reads `reads`.
        lead_work, read_work: The work from which these times are modelled.
        writes: Produced storages whose whole content is written during the read, ascending.
        sparse: Reads of storages in `reads` for which single units may do.
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

    Attributes:
        method: The name of the method.
        graph: The number that the method's probes carry.
        shape: The shape point (`batch=1,sequence=16`); empty for a static program.
        steps: The steps.
        tail_ns: Nanoseconds of compute after the last step.
        gap_ns: Nanoseconds between two calls.
        times: Whether the times are `"modelled"` or `"measured"`.
        tail_work: The work from which `tail_ns` is modelled.
        follows: The number of the method whose call comes before each call of this one; None if that is this
            one.
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
    """A leaf of a method's inputs: a tensor or a Python value.

    Attributes:
        name: The name of the input.
        dtype: torch's name of a tensor's dtype, or the name of a value's type.
        shape: Sizes, or names of symbols of the method.
        device: The device of a tensor.
        value: The repr of a Python value that export has made constant; None for any other.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    dtype: str
    shape: tuple[int | str, ...] = ()
    device: str = "cpu"
    value: str | None = None


@dataclass(frozen=True)
class Symbol:
    """A dynamic size of a method's inputs.

    Attributes:
        name: The name in the shapes of inputs.
        lower, upper: The range, both included; None: no limit.
        example: The size in the inputs that the method was exported with.
    """

    __pydantic_config__: ClassVar = STRICT
    name: str
    lower: int
    upper: int | None
    example: int


@dataclass(frozen=True)
class Method:
    """The inputs of a method.

    Attributes:
        name: The name of the method.
        graph: The number that the method's probes carry.
        inputs: The leaves in pytree order.
        symbols: The symbols in their shapes.
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

    Attributes:
        level: `"measured"`: the rates were measured, and trials agreed. `"doubtful"`: a rate is a guess, or
            its trials did not agree. `"assumed"`: none was measured, as in a preset.
        why: The reasons, in words.
    """

    level: Literal["measured", "doubtful", "assumed"]
    why: str

    @property
    def text(self) -> str:
        """Level and reasons in one phrase."""
        return f"{self.level}: {self.why}"


@dataclass(frozen=True)
class Hardware:
    """The machine that a plan assumes.

    With one copy of b bytes on its way, the link has `link_bytes_per_s` times b / (b +
    `link_in_flight_bytes`): the latter, over the rate, is the time from when a transfer may start until its
    bytes flow (Hockney's half-performance length, Parallel Computers, 1981, section 1.3.2). Copies that start
    early enough hide it.

    Attributes:
        name: The name of a preset, or of what was measured.
        flops_per_s: Floating-point operations per second.
        memory_bytes_per_s: The rate of the device's memory.
        link_bytes_per_s: The rate at which weights reach the arena while enough bytes are on their way at
            once.
        link_latency_ns: Nanoseconds of each transfer.
        link_in_flight_bytes: See above.
        memory_nbytes: All memory of the device; None if it is not known.
        disk_bytes_per_s: The rate of the disk behind the host of a device; None if there is none, or if it is
            not known.
        disk_latency_ns: Nanoseconds of each read of that disk.
        note: Where the figures come from.
        write_bytes_per_s: The rate of copies out of the arena; None if they are as fast as those into it.
        duplex: Whether the link carries both directions at once, each at its own rate.
        host_step_ns: Nanoseconds in which the calling thread launches one streamed step on a device: its
            waits, its copy and its events. 0 on a CPU, where the steps have that time.
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
        """Whether `note` says that figures of this hardware are doubtful."""
        return self.note.endswith(UNEVEN)

    def copy_ns(self, nbytes: int) -> int:
        """Return the nanoseconds that a transfer of `nbytes` into the arena takes, rounded up."""
        return self.link_latency_ns + -int(-nbytes * 1e9 // self.link_bytes_per_s)

    def write_ns(self, nbytes: int) -> int:
        """Return the nanoseconds that a transfer of `nbytes` out of the arena takes, rounded up."""
        rate = self.write_bytes_per_s or self.link_bytes_per_s
        return self.link_latency_ns + -int(-nbytes * 1e9 // rate)

    def moving_ns(self, transfer: Transfer) -> int:
        """Return the nanoseconds that `transfer` takes in its direction, rounded up."""
        nbytes = transfer.stop - transfer.start
        return self.copy_ns(nbytes) if transfer.direction == "in" else self.write_ns(nbytes)

    @property
    def link_fill_ns(self) -> int:
        """Nanoseconds from when a transfer may start until its bytes flow, if the link is idle."""
        return -int(-self.link_in_flight_bytes * 1e9 // self.link_bytes_per_s)

    def disk_ns(self, nbytes: int) -> int:
        """Return the nanoseconds in which the host's disk, of a known rate, reads `nbytes`; rounded up."""
        assert self.disk_bytes_per_s is not None
        return self.disk_latency_ns + -int(-nbytes * 1e9 // self.disk_bytes_per_s)


# Decisions.


@dataclass(frozen=True, order=True)
class Range:
    """Bytes of a layout, from `start` to `stop`; the latter is excluded."""

    __pydantic_config__: ClassVar = STRICT
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The bytes of the range."""
        return self.stop - self.start


@dataclass(frozen=True)
class Arena:
    """The facts of the memory that a plan fills, before any decision.

    Attributes:
        kind: In a `"paged"` arena, the address of a storage is its layout offset, and a range takes memory
            only while it is on the device. In a `"contiguous"` one, the plan chooses addresses, each
            congruent to the layout offset modulo the granule.
        backing: Whether memory is `"mapped"` from the weight files or `"anonymous"`.
        granule: Memory is filled and dropped in multiples of these bytes, counted from layout offset 0. A
            span is a run of granules, cut to its segment.
        layout: The offset at which each storage begins, in bytes; -1 for one that is never in the arena.
        segments: The ranges of the layout that hold bytes: one for each mapped file, or one for all.
    """

    __pydantic_config__: ClassVar = STRICT
    kind: ArenaKind
    backing: Backing
    granule: int
    layout: tuple[int, ...]
    segments: tuple[Range, ...]


@dataclass(frozen=True)
class Transfer:
    """One copy of a range into the arena, for the read of a step, or out of it.

    A copy out takes produced bytes to the spill file, from which another copy brings them back. Its step does
    not end before it is done, so that the bytes may leave with that step.

    Attributes:
        start, stop: The layout range.
        step: The step that reads the range, or at which it is written out.
        after: The copy may start once this step has ended. Less than `step`, and counted in the pass in which
            `step` runs: a negative value is step `n + after` of the pass before, which has n steps. If that
            is a pass of the same method, it is at least `step - n`: no dependency reaches back two passes.
        direction: `"in"` or `"out"`.
        link: The number of the link.
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
    """The layout range from `start` to `stop` leaves the device when step number `step` ends."""

    __pydantic_config__: ClassVar = STRICT
    start: int
    stop: int
    step: int


@dataclass(frozen=True)
class Schedule:
    """What streams in one pass of one method. A range that no transfer brings and no drop takes is resident.

    Attributes:
        graph: The number of the method.
        transfers: In issue order. Those with a negative `after` are on their way, or done, when a call
            begins.
        drops: By step.
        predicted_ns: The steady period. Methods whose calls come in turn share one: each has its part.
        lower_bound_ns: A period that no plan can beat (`bound/relaxation.py`); None if the solver found none
            in time.
        staged: Bytes of each transfer that the host does not hold; empty if it holds all. The disk reads them
            into a ring first, in issue order, as soon as earlier transfers have left room in the ring.
        staging_bytes: The size of that ring.
        boundary: What is on the device, or on its way, when a call of this method follows another, or one of
            the method that its trace follows. After any other call, only the resident ranges are there, and
            the rest is loaded in this order. None: the boundary of the plan.

    Example:
        >>> schedule = plan.schedules[0]
        >>> first = schedule.transfers[0]
        >>> first.direction, first.stop - first.start, schedule.moved_bytes("in")
        ('in', 16384, 65536)
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
        """Return the bytes that transfers in `direction` move in a pass."""
        return sum(t.stop - t.start for t in self.transfers if t.direction == direction)


@dataclass(frozen=True)
class HostTier:
    """The memory of a host, of `nbytes` with the staging ring, in which it holds the ranges `resident`."""

    __pydantic_config__: ClassVar = STRICT
    nbytes: int
    resident: tuple[Range, ...]


@dataclass(frozen=True)
class Decisions:
    """The decisions of a plan: which bytes are on the device when, for every method.

    Plans are made, stored and run as a `Plan` (`schedule/plan.py`), a subclass that can be written and drawn.

    Attributes:
        budget: Bytes that the arena, the pool and the storages outside of both may take together.
        arena: The arena's facts.
        arena_bytes: Its size.
        outside: Storages that are held whole in ordinary memory: all that are not streamable, and all others
            too if everything fits.
        addresses: The address of each storage in a contiguous arena, -1 for one outside; empty for a paged
            arena.
        resident: Ranges that never leave the device.
        boundary: Ranges on the device, or on their way, between calls; with `resident`, and in the order in
            which a cold start loads them. Each of several methods may have its own.
        wrap: Whether copies go on across calls (`"overlap"`) or join at the end of a call (`"barrier"`).
        schedules: One for each trace.
        traces: The traces that the plan was made for.
        hardware: The machine that it was made for.
        names, sizes: Names and bytes of the storages, for people; empty if nobody gave them.
        host: The memory of a host between disk and device; None if it holds all that streams.
        pool: The memory for units of what is read sparsely; None if all is read whole.

    Example:
        >>> [plan.names[s] for s in plan.reads_of(plan.traces[0].steps[0])], plan.confidence.level
        (['0.weight', '0.bias'], 'assumed')
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
        """The storages that a step writes: values that a forward keeps for its backward."""
        return frozenset(s for trace in self.traces for step in trace.steps for s in step.writes)

    def boundary_of(self, schedule: Schedule) -> tuple[Range, ...]:
        """Return the ranges on the device, or on their way, between two calls of a method.

        Args:
            schedule: The schedule of the method.
        """
        return self.boundary if schedule.boundary is None else schedule.boundary

    def reads_of(self, step: Step) -> tuple[int, ...]:
        """Return the storages that a step reads: from the arena, and by units.

        Args:
            step: A step of the plan's traces.
        """
        return self.pool.whole(step.reads, step.sparse) if self.pool else step.reads

    def expected_ns(self, number: int) -> int:
        """Return the nanoseconds that a pass is expected to take, with waits for units.

        Args:
            number: The position of its trace in `traces`.
        """
        waits = self.pool.expected_ns if self.pool else ()
        return self.schedules[number].predicted_ns + (waits[number] if waits else 0)

    @property
    def compute_ns(self) -> int:
        """Nanoseconds of one pass of each method with every weight in memory, summed."""
        return sum(trace.compute_ns for trace in self.traces)

    @property
    def predicted_ns(self) -> int:
        """Nanoseconds of one more pass of each method in the steady state, with waits for units, summed."""
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
        source = self.hardware.note.removesuffix(UNEVEN).removesuffix("; ")
        if not source.startswith(MEASURED):
            return Confidence("assumed", f"{source or 'figures that were given'}; none of it was measured")
        doubts = [UNEVEN] if self.hardware.uneven else []
        if self.written_bytes and self.hardware.write_bytes_per_s is None:
            doubts.append("writes are taken to be as fast as reads")
        if doubts:
            return Confidence("doubtful", "; ".join([*doubts, source]))
        modelled = any(trace.times == "modelled" for trace in self.traces)
        return Confidence("measured", source + "; times of compute follow from these rates" * modelled)

    @property
    def ratio(self) -> float | None:
        """The predicted time divided by the lower bound; None if there is no bound.

        At a ratio of 1.02, no plan can be more than 2 % faster.
        """
        bound = self.lower_bound_seconds
        if bound is None:
            return None
        return self.predicted_seconds / bound if bound else 1.0
