"""Random facts to plan: storages, traces, machines and arenas, as hypothesis strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from penstock.schedule.facts.model import Arena, Extent, Hardware, Step, Storage, Trace, WeightFile
from penstock.schedule.facts.problem import Problem, first_uses
from penstock.schedule.space.layout import mapped_arena, packed_arena

GRANULE = 64


@dataclass(frozen=True, kw_only=True)
class RandomProblem(Problem):
    """A problem, and how generous its budget is, as a share in 0..1."""

    share: float = 0.0

    def budget(self, floor_bytes):
        """A budget between the floor and all bytes that there are."""
        total = sum(s.nbytes for s in self.storages)
        return floor_bytes + int(self.share * max(0, total - floor_bytes))


def equal_problem(n, compute, *, unit=64 * 64):
    """n equal weights, each read once a pass; copying one takes 1 us, computing `compute` us."""
    storages = tuple(Storage(unit, "streamable") for _ in range(n))
    steps = tuple(Step(f"block.{k}", (k,), 0, round(compute * 1000)) for k in range(n))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="paged", granule=GRANULE, alignment=GRANULE)
    return RandomProblem(storages, traces, arena, hardware=machine(unit * 1e6))


def machine(link_bytes_per_s, *, latency_ns=0, in_flight=0):
    return Hardware("toy", 1e12, 1e11, link_bytes_per_s, latency_ns, in_flight)


def hardwares():
    return st.builds(
        lambda rate, latency, in_flight, launch: replace(
            machine(rate, latency_ns=latency, in_flight=in_flight), host_step_ns=launch
        ),
        st.sampled_from([1e7, 1e8, 1e9, 3e9, 7.7e10]),
        st.sampled_from([0, 0, 1, 100, 2_000]),
        st.sampled_from([0, 0, 1, 5_000, 20_000]),
        st.sampled_from([0, 0, 10, 3_000]),
    )


def storage_lists(max_size=12):
    """Sizes from nothing to some granules, some of them off 64 bytes, seldom one that may not be streamed."""
    sizes = st.one_of(
        st.integers(0, 3), st.integers(1, 4 * GRANULE), st.sampled_from([GRANULE, 8 * GRANULE, 40 * GRANULE])
    )
    kinds = st.sampled_from(["streamable"] * 7 + ["mutable", "returned", "inlined"])
    phases = st.sampled_from([0, 0, 0, 8, 24, 40, 9])
    return st.lists(st.builds(Storage, sizes, kinds, phase=phases), min_size=1, max_size=max_size)


@st.composite
def trace_of(draw, storages, graph=0, max_steps=14):
    """Steps that read one to a few of the storages; without any to read there are no steps."""
    readable = [s for s, storage in enumerate(storages) if storage.kind == "streamable" and storage.nbytes]
    times = st.sampled_from([0, 0, 1, 10, 300, 5_000])
    reads = st.sets(st.sampled_from(readable), min_size=1, max_size=3) if readable else st.nothing()
    count = draw(st.integers(1, max_steps)) if readable else 0
    steps = tuple(
        Step(f"step.{k}", tuple(sorted(draw(reads))), draw(times), draw(times)) for k in range(count)
    )
    return Trace(f"method{graph}", graph, "", steps, draw(times), draw(times), "modelled")


@st.composite
def storages_and_traces(draw, methods=1):
    """Storages, and as many traces; in half of the draws calls of several methods come in turn."""
    storages = tuple(draw(storage_lists()))
    traces = tuple(draw(trace_of(storages, graph)) for graph in range(methods))
    if methods > 1 and all(trace.steps for trace in traces) and draw(st.booleans()):
        traces = tuple(replace(trace, follows=(trace.graph - 1) % methods) for trace in traces)
    return storages, traces


def in_files(storages, gap=0):
    """The storages laid out in two files, every one from its phase on."""
    ends = [128, 64]
    placed = []
    for index, storage in enumerate(storages):
        file = index % 2 if len(storages) > 4 else 0
        start = -(-ends[file] // 64) * 64 + storage.phase
        ends[file] = start + storage.nbytes + gap
        extents = (Extent(file, start, 0, storage.nbytes),) if storage.nbytes else ()
        placed.append(replace(storage, extents=extents))
    files = tuple(WeightFile(f"weights-{i}", end, 0, 0, "", "") for i, end in enumerate(ends))
    return tuple(placed), files


@st.composite
def problems(draw, kind="any", methods=1):
    """`kind` is "paged", "contiguous", or "any" of both; a paged arena may be mapped."""
    storages, traces = draw(storages_and_traces(methods))
    if kind == "any":
        kind = draw(st.sampled_from(["paged", "contiguous"]))
    granule = draw(st.sampled_from([GRANULE, GRANULE, 4 * GRANULE]))
    arena: Arena | None
    if kind == "paged" and draw(st.booleans()):
        storages, files = in_files(storages)
        arena = mapped_arena(storages, files, granule=granule, page=GRANULE)
    elif kind == "paged":
        arena = packed_arena(storages, traces, kind="paged", granule=granule, alignment=GRANULE)
    else:
        arena = packed_arena(storages, traces, kind="contiguous", granule=GRANULE, alignment=GRANULE)
    assert arena is not None
    read = first_uses(storages, traces)
    keep = (
        draw(st.sets(st.sampled_from(read), max_size=2)) if read and draw(st.integers(0, 3)) == 0 else set()
    )
    wrap = draw(st.sampled_from(["overlap", "overlap", "barrier"]))
    share = draw(st.floats(0, 1, allow_nan=False))
    return RandomProblem(
        storages, traces, arena, frozenset(keep), hardware=draw(hardwares()), wrap=wrap, share=share
    )
