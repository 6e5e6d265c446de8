"""The vocabulary of the schedule: frozen dataclasses without torch, and without behaviour beyond lookups.

Facts (weights, storages, traces) come from the passes, and decisions (plans) from the planner. A payload
holds these classes: `payload/` reads and writes them as JSON, and `docs/payload.md` specifies every
field. All offsets are in bytes, all ranges are half-open, and all times are integer nanoseconds.
`catalog.py` has the weights, and `units.py` what is read of them by slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from penstock.schedule.facts.catalog import ALIGNMENT as ALIGNMENT
from penstock.schedule.facts.catalog import IN_ARENA as IN_ARENA
from penstock.schedule.facts.catalog import STRICT as STRICT
from penstock.schedule.facts.catalog import Extent as Extent
from penstock.schedule.facts.catalog import FileKind as FileKind
from penstock.schedule.facts.catalog import Kind as Kind
from penstock.schedule.facts.catalog import Part as Part
from penstock.schedule.facts.catalog import Role as Role
from penstock.schedule.facts.catalog import Storage as Storage
from penstock.schedule.facts.catalog import Weight as Weight
from penstock.schedule.facts.catalog import WeightFile as WeightFile
from penstock.schedule.facts.units import Computed as Computed
from penstock.schedule.facts.units import Pool as Pool
from penstock.schedule.facts.units import SparseRead as SparseRead

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
