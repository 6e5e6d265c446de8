"""The payload of the golden file, written out."""

from dataclasses import replace

from penstock.schedule.facts.model import (
    Arena,
    Drop,
    Extent,
    Hardware,
    Input,
    Method,
    Part,
    Pool,
    Range,
    Schedule,
    SparseRead,
    Step,
    Storage,
    Symbol,
    Trace,
    Transfer,
    Weight,
    WeightFile,
    Work,
)
from penstock.schedule.payload.codec import Payload, ProbeOrder, ProgramFile
from penstock.schedule.plan import Plan

HARDWARE = Hardware("toy", 1e12, 2.5e10, 1.2e9, 20_000, note="an example")
ROWS = SparseRead(Part("", "bfloat16", (64, 32), (32, 1), 0, 0), "aten.embedding.default", 0, 32)
TRACE = Trace(
    method="forward",
    graph=0,
    shape="batch=2",
    steps=(
        Step("embed", (0,), 0, 700, Work(), Work(8, 4096), sparse=(ROWS,)),
        Step("project", (1,), 150, 3_000, Work(64, 128), Work(8192, 4224)),
        Step("head", (0,), 90, 700),
    ),
    tail_ns=40,
    gap_ns=1_000,
    times="measured",
    tail_work=Work(16, 64),
)
PLAN = Plan(
    budget=12_304,
    arena=Arena("paged", "mapped", 4096, (4096, 8192, -1), (Range(4096, 12_288),)),
    arena_bytes=8_192,
    outside=(2,),
    addresses=(),
    resident=(Range(4096, 8192),),
    boundary=(Range(4096, 8192),),
    wrap="overlap",
    schedules=(Schedule(0, (Transfer(8192, 12_288, 1, 0),), (Drop(8192, 12_288, 1),), 27_000),),
    traces=(TRACE,),
    hardware=HARDWARE,
)
POOLED = replace(
    PLAN,
    budget=16_400,
    traces=(replace(TRACE, steps=(replace(TRACE.steps[0], reads=()), *TRACE.steps[1:])),),
    pool=Pool(4096, 4096, (0, -1, -1), (20_000,), (640_000,)),
)
PAYLOAD = Payload(
    lowering="inductor",
    program=ProgramFile("program.pt2", "ab" * 32, "cpu linux x86_64 AVX2"),
    torch="2.13.0",
    files=(
        WeightFile("weights.safetensors", 12_400, 1_700_000_000_000_000_000, 2**63, "01" * 32, "23" * 32),
        WeightFile("weights.ptd", 16, 0, 0, "", "", "named", "penstock.storage." + "89" * 32),
    ),
    storages=(
        Storage(4096, "streamable", (Extent(0, 128, 0, 1024), Extent(0, 1152, 1024, 3072)), "45" * 32),
        Storage(4096, "streamable", (Extent(0, 4288, 0, 4096),), "67" * 32),
        Storage(16, "mutable", (Extent(1, 0, 0, 16),)),
    ),
    weights=(
        Weight("embedding.weight", "parameter", "cpu", (Part("", "bfloat16", (64, 32), (32, 1), 0, 0),)),
        Weight("head.weight", "parameter", "cpu", (Part("", "bfloat16", (64, 32), (32, 1), 0, 0),)),
        Weight(
            "projection.weight",
            "parameter",
            "cpu",
            (
                Part("data", "int8", (32, 96), (96, 1), 1, 0),
                Part("scale", "float32", (1, 256), (1, 1), 1, 3072),
            ),
        ),
        Weight("gr\u00f6\u00dfe", "buffer", "cuda:0", (Part("", "int64", (2,), (1,), 2, 0),)),
    ),
    methods=(
        Method(
            "forward",
            0,
            (Input("tokens", "int64", ("batch", 16)), Input("scale", "float", value="0.5")),
            (Symbol("batch", 1, None, 2),),
        ),
    ),
    traces=(TRACE,),
    probes=(ProbeOrder(0, (-1, 2, 4), (2, 3, -1), (0, -1)),),
    hardware=HARDWARE,
    plans=(PLAN, POOLED),
)
BYTES = PAYLOAD.to_bytes()


def read_whole(trace):
    """The trace as versions before 9 have it."""
    return replace(trace, steps=tuple(replace(step, sparse=()) for step in trace.steps))


WHOLE = replace(
    PAYLOAD,
    traces=(read_whole(TRACE),),
    probes=(replace(PAYLOAD.probes[0], units=()),),
    plans=(replace(PLAN, traces=(read_whole(TRACE),)),),
)
"""The payload without reads by units, as versions before 9 have it."""
