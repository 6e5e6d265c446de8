"""Numbers in a stranger's files, under right hashes: a sentence for each, no memory, and no process ends."""

import json
import re
import shutil
import subprocess
import warnings
from dataclasses import replace
from hashlib import sha256
from importlib import import_module

import pytest

pytest.importorskip("executorch", reason="executorch is not installed: pip install '.[executorch]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ExecuTorch's own, as it is imported
    import_module("executorch.exir")

from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from torch.export import export

from examples.demo.cgroup import make_group
from penstock.backends.executorch import read
from penstock.backends.executorch.files import PROGRAM
from penstock.schedule.facts.errors import PenstockError
from penstock.schedule.facts.validity import LARGEST_SIZE
from tests.backends.executorch.delegate.pte_models import Files, Mlp, rows, write_files
from tests.backends.executorch.delegate.pte_runs import Call, Program, Runner
from tests.backends.executorch.forging import fields, forge
from tests.engines import COMPILER, built
from tests.forked import run_forked

MOST = (1 << 63) - 1


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A program of two layers."""
    model = Mlp(layers=2).eval()
    return write_files(tmp_path_factory.mktemp("exported") / "files", {"forward": export(model, (rows(),))})


@pytest.fixture
def files(exported, tmp_path):
    """A copy to be forged."""
    shutil.copytree(exported.pte.parent, tmp_path / "copy")
    return Files(tmp_path / "copy/model.pte", (tmp_path / "copy/weights.ptd",))


@pytest.fixture
def runner(tmp_path):
    folder = built("executorch/run_pte", "build-delegate").parent
    return Runner(folder / "run_pte", folder / "libpenstock_executorch.so", tmp_path)


def states(*sizes, phase=0):
    """Adds states without values, which every plan keeps outside of its arena."""

    def change(tree):
        for nbytes in sizes:
            number = len(tree["storages"])
            tree["storages"].append(
                tree["storages"][0]
                | {"nbytes": nbytes, "kind": "mutable", "extents": [], "sha256": None, "phase": phase}
            )
            for plan in tree["plans"]:
                plan["arena"]["layout"].append(-1)
                plan["outside"].append(number)
                for field, value in (("addresses", -1), ("names", "x"), ("sizes", nbytes)):
                    if plan[field]:
                        plan[field].append(value)

    return change


def of_plan(change):
    """Changes the plan by which most streams, and leaves the payload no other."""

    def changed(tree):
        tree["plans"] = [min(tree["plans"], key=lambda plan: plan["budget"])]
        change(tree["plans"][0])

    return changed


def first_storage(**values):
    return lambda tree: tree["storages"][0].update(values)


def first_extent(**values):
    return lambda tree: tree["storages"][0]["extents"][0].update(values)


def arena(**values):
    return of_plan(lambda plan: plan["arena"].update(values))


def resident(stop):
    """A range that is to stay, in a segment of its size."""
    span = {"start": 0, "stop": stop}
    return of_plan(
        lambda plan: plan.update(resident=[span], boundary=[span], arena=plan["arena"] | {"segments": [span]})
    )


def tensor(**values):
    return lambda region: region["appended"][0].update(values)


NUMBER = r"\(expected a whole number from -?\d+ to \d+, got {}\): (export it|compile and plan) again"
PAYLOADS = {
    "a state of 2^63 - 11 bytes": (states(MOST - 10), NUMBER.format(MOST - 10)),
    "two of them at phase 63": (states(MOST - 10, MOST - 10, phase=63), NUMBER.format(MOST - 10)),
    "states of 2^63 bytes in all": (states(1 << 62, 1 << 62), NUMBER.format(1 << 62)),
    "states of 2^64 bytes in all": (states(*[1 << 62] * 4), NUMBER.format(1 << 62)),
    "a state of too many bytes by one": (states(LARGEST_SIZE + 1), NUMBER.format(LARGEST_SIZE + 1)),
    "a state of a tebibyte": (states(1 << 40), "weights take 10995\\d+ bytes of memory"),
    "thousands of large states": (
        states(*[LARGEST_SIZE] * 9000),
        "add up to more than 1125899906842624 bytes",
    ),
    "a size below 0": (states(-1), "a storage has a negative size"),
    "a size in floating point": (first_storage(nbytes=1e30), NUMBER.format(r"1e\+30")),
    "a size in text": (first_storage(nbytes="64"), NUMBER.format('"64"')),
    "a size that is true": (first_storage(nbytes=True), NUMBER.format("true")),
    "a size of many digits": (first_storage(nbytes=10**30), NUMBER.format(r"1e\+30")),
    "a phase of 2^63": (first_storage(phase=1 << 63), NUMBER.format(1 << 63)),
    "a phase of 2^40": (first_storage(phase=1 << 40), "a phase outside of 0 to 63"),
    "file number 2^32": (first_extent(file=1 << 32), "an extent names no entry"),
    "file number -1": (first_extent(file=-1), NUMBER.format(-1)),
    "an offset of -64": (first_extent(file_offset=-64), "an extent lies outside its entry"),
    "an offset of 2^50": (first_extent(file_offset=LARGEST_SIZE), "an extent lies outside its entry"),
    "a granule of 2^62": (arena(granule=1 << 62), NUMBER.format(1 << 62)),
    "a granule of a half": (arena(granule=0.5), NUMBER.format("0.5")),
    "a place behind the last segment": (
        arena(layout=[LARGEST_SIZE, -1, 0, -1]),
        "of the layout are in no segment",
    ),
    "segments that overlap": (
        arena(segments=[{"start": 0, "stop": 1 << 40}, {"start": 4096, "stop": 8192}]),
        "the segment from byte 4096 of the layout reaches into another",
    ),
    "an arena of 2^50 bytes": (of_plan(lambda plan: plan.update(arena_bytes=LARGEST_SIZE)), "weights take"),
    "a resident range of 64 TiB": (resident(1 << 46), "ran"),  # in contiguous memory, which has what it has
    "a resident range of 2^63 bytes": (resident(1 << 63), NUMBER.format(1 << 63)),
    "a storage outside of the arena twice": (
        of_plan(lambda plan: plan.update(outside=[1, 3, 3])),
        "storage 3 is outside the arena twice",
    ),
    "no such storage outside of the arena": (
        of_plan(lambda plan: plan.update(outside=[1 << 31])),
        "keeps a storage in memory that there is not",
    ),
    "a budget of 2^63": (of_plan(lambda plan: plan.update(budget=1 << 63)), NUMBER.format(1 << 63)),
    "graph number 2^32": (
        of_plan(lambda plan: plan["schedules"][0].update(graph=1 << 32)),
        NUMBER.format(1 << 32),
    ),
}
REGIONS = {
    "inputs of -1": (lambda region: region.update(inputs=-1, outputs=3), NUMBER.format(-1)),
    "inputs of 2^64 - 1": (
        lambda region: region.update(inputs=2 * MOST + 1, outputs=3),
        NUMBER.format(2 * MOST + 1),
    ),
    "graph number 2^32": (lambda region: region.update(graph=1 << 32), NUMBER.format(1 << 32)),
    "steps of 2^63": (lambda region: region.update(steps=[0, 1 << 63]), NUMBER.format(1 << 63)),
    "a tensor without items and of 2^93": (
        tensor(shape=[0, *[(1 << 31) - 1] * 3], dim_order=[0, 1, 2, 3], name="other"),
        r"shape: expected a tensor inside of its 16384 bytes, got \[0,2147483647,2147483647,2147483647\]",
    ),
    "a tensor of 17 dimensions": (
        tensor(shape=[1] * 17, dim_order=[*range(17)], name="other"),
        "shape: expected a tensor inside of its 16384",
    ),
    "a tensor of 300 dimensions": (
        tensor(shape=[1] * 300, dim_order=[k % 256 for k in range(300)], name="other"),
        r"\$.appended\[0\].dim_order",
    ),
    "an offset in floating point": (tensor(offset=1e30), NUMBER.format(r"1e\+30")),
}


@pytest.fixture
def forged(exported, tmp_path):
    """Every member, as files, and the sentence about it."""
    found = []
    for which, members in (("payload", PAYLOADS), ("region", REGIONS)):
        for name, (change, sentence) in members.items():
            folder = tmp_path / which / re.sub(r"\W", "-", name)
            shutil.copytree(exported.pte.parent, folder)
            forge(folder / "model.pte", **{which: fields(change)})
            found.append((sentence, Files(folder / "model.pte", (folder / "weights.ptd",))))
    return found


def test_numbers_in_a_pte(forged, runner):
    """All in one process, which is there at the end, and has taken no memory for any of them."""
    answers = runner(
        [Program(one) for _, one in forged], [Call([rows()], program=k) for k in range(len(forged))]
    )
    assert answers[-1].process_bytes < 200 << 20
    said = iter(runner.sentences())
    told = [next(said) if answer.error != "Error::Ok" else "ran" for answer in answers]
    assert [
        text for text, (sentence, _) in zip(told, forged, strict=True) if not re.search(sentence, text)
    ] == []


def test_python_reads_none_of_them(forged):
    for _, one in forged:
        with pytest.raises(PenstockError):
            read(one.pte)


def scratch(path, nbytes):
    """Changes what the code of all regions asks for as memory of its intermediate values."""
    pte = deserialize_pte_binary(path.read_bytes())
    named, renamed = pte.named_data, {}
    for key in [key for key in named.pte_data if key.startswith(PROGRAM)]:
        entry = named.pte_data.pop(key)
        inner = deserialize_pte_binary(bytes(named.buffers[entry.buffer_index]))
        inner.program.execution_plan[0].non_const_buffer_sizes = [0, nbytes]
        code = bytes(serialize_pte_binary(inner))
        named.buffers[entry.buffer_index] = code
        renamed[key] = PROGRAM + sha256(code).hexdigest()
        named.pte_data[renamed[key]] = entry
    for one in pte.program.backend_delegate_data:
        tree = json.loads(bytes(one.data).partition(b"\n")[2])
        text = json.dumps(tree | {"program": renamed[tree["program"]]}).encode()
        one.data = sha256(text).hexdigest().encode() + b"\n" + text
    path.write_bytes(bytes(serialize_pte_binary(pte, extract_delegate_segments=True, segment_alignment=4096)))


@pytest.mark.parametrize("nbytes", [1 << 30, 1 << 45, LARGEST_SIZE + 1, MOST])
def test_scratch_memory_that_there_is_not(files, runner, nbytes):
    """The system grants memory, and kills the process that writes more than its control group has."""
    scratch(files.pte, nbytes)
    with make_group(512 << 20) as group:
        if group is None:
            pytest.skip("no control group of memory can be made here")
        joined = runner.folder / "joined"
        joined.write_text(f'#!/bin/sh\necho $$ >{group.folder}/cgroup.procs && exec {runner.program} "$@"\n')
        joined.chmod(0o755)
        (answer,) = replace(runner, program=joined)([Program(files)], [Call([rows()])])
        assert group.kills == 0
    assert answer.error == "Error::OutOfResources"


PLANS = """
import ctypes, json, sys
from pathlib import Path
from penstock.native.library import Options, library, open_engine
from penstock.schedule.facts.errors import PenstockError
from tests.runtime.arena.native_arena import files_of, options_of, payload_of
from tests.native.test_native_pool import READ, on_pages, payload_for, plan_of, random_problem
from tests.runtime.stream.cases import one_case
from random import Random

MORE = {"start": 1 << 30, "stop": 1 << 40}

def overlap(payload, plan):
    plan["arena"]["segments"] = [{"start": 0, "stop": 1 << 40}, {"start": 4096, "stop": 8192}]

def share(payload, plan):
    plan["arena"]["segments"] = [{"start": 0, "stop": 200}, {"start": 300, "stop": 1 << 20}]

def between(payload, plan):
    plan["arena"]["segments"] = [{"start": 0, "stop": 40960}, MORE]

def produced(payload, plan):
    payload["storages"][0].update(kind="produced", extents=[])

def beyond(payload, plan):
    plan["arena"]["segments"][-1]["stop"] = 1 << 40

def negative(payload, plan):
    plan["schedules"][0]["transfers"][0]["after"] = -(1 << 63)

def tables(payload, plan):
    'A storage of a tebibyte, of which each byte is a unit.'
    plan["pool"].update(nbytes=1 << 20, layout=[0])
    payload["files"][0]["nbytes"] = 1 << 40
    payload["storages"] = [
        payload["storages"][0] | {"nbytes": 1 << 40, "phase": 0, "extents": [
            {"file": 0, "file_offset": 0, "storage_offset": 0, "nbytes": 1 << 40}]}
    ]
    plan["addresses"] = plan["arena"]["layout"] = [-1]
    view = {"name": "", "dtype": "uint8", "shape": [1 << 40], "stride": [1], "storage": 0, "offset": 0}
    sparse = {"view": view, "operator": "aten.embedding.default", "route": 0, "asked": 1}
    plan["traces"] = plan["traces"][:1]
    plan["traces"][0]["steps"] = [{"name": "s", "reads": [], "lead_ns": 0, "read_ns": 0, "sparse": [sparse]}]
    plan["schedules"] = plan["schedules"][:1]

@READ
def nothing(context, file, offset, address, nbytes):
    return 0

def tell(kind, change):
    options, source = Options(readers=1, read=ctypes.cast(nothing, ctypes.c_void_p)), None
    if kind == "units":
        pool, traces = on_pages(*random_problem(Random(1)))
        payload, plan = payload_for(pool, traces), plan_of(pool, traces)
    else:
        case = one_case(kind, folder=Path(sys.argv[1]) if kind == "mapped" else None)
        payload, plan = case.payload, case.plan
        if kind == "mapped":
            source = case._source()
            options = options_of(source)
            payload = payload_of(files_of(source), case.storages)
    facts, decisions = json.loads(payload), json.loads(plan.to_json())
    change(facts, decisions)
    engine = None
    try:
        engine = open_engine(json.dumps(facts).encode(), json.dumps(decisions), Path("nowhere"), options)
        status = library().ps_begin(engine, 0)
        return "ran" if status == 0 else library().ps_error(engine).decode()
    except PenstockError as error:
        return str(error)
    finally:
        if engine:
            library().ps_close(engine)
        if source:
            source.close()

for kind, change in (
    ("paged", share), ("paged", between),  ("paged", negative),
    ("units", tables), ("mapped", beyond), ("mapped", produced), ("paged", overlap),
):
    print(kind, change.__name__, tell(kind, change), flush=True)
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0], flush=True)
"""


@pytest.mark.usefixtures("native")
def test_plans_that_reach_beyond_memory(tmp_path):
    """An engine opens what no arena of its own can hold, in one process; mappings are of files here."""
    done = run_forked(PLANS, tmp_path)
    assert done.status == 0, done.out + done.err
    *told, most = done.out.splitlines()
    assert int(most) < 700 << 10
    expected = (
        "paged share the segment from byte 300 of the layout reaches into another",
        "paged between bytes 40960 to 49152 of the layout are in no segment",
        "paged negative a field is missing or has another type (expected a whole number from",
        "units tables weights take 35184373137408 bytes of memory",
        "mapped beyond segment 1 cannot be mapped: it ends at layout offset 1099511627776, behind its file",
        "mapped produced storage 0 cannot be mapped: it lies in no file",
        "paged overlap the segment from byte 4096 of the layout reaches into another",
    )
    for text, beginning in zip(told, expected, strict=True):
        assert text.startswith(beginning), text


LIBRARY = """
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
extern "C" int thrown = 0;
extern "C" int read_bytes(void *, int32_t, int64_t, void *address, int64_t nbytes) {
    std::memset(address, 1, nbytes);
    if (thrown == 1) throw std::bad_alloc();
    if (thrown == 2) throw std::runtime_error("the cable is out");
    if (thrown == 3) throw 3;
    return 0;
}
"""
READERS = """
import ctypes, sys
from pathlib import Path
from random import Random
from penstock.native.library import Options
from penstock.runtime.sparse.units import NativeUnits
from penstock.runtime.stream.native import NativeStreamer
from penstock.schedule.facts.errors import StreamError
from tests.native.test_native_memory import run_passes
from tests.native.test_native_pool import on_pages, payload_for, plan_of, random_problem
from tests.runtime.stream.cases import one_case

library = ctypes.CDLL(sys.argv[1])
thrown = ctypes.c_int.in_dll(library, "thrown")
options = Options(readers=2, read=ctypes.cast(library.read_bytes, ctypes.c_void_p))

def told(run):
    try:
        return run() or "ran"
    except StreamError as error:
        return str(error)

for kind in ("contiguous", "paged"):
    case = one_case(kind)
    streamer = NativeStreamer(Path("nowhere"), case.payload, case.plan, options)
    for thrown.value in (1, 2, 3, 0):
        print(kind, told(lambda: run_passes(streamer, 1)), flush=True)
    streamer.close()
    streamer.free()

pool, traces = on_pages(*random_problem(Random(1)))
streamer = NativeStreamer(Path("nowhere"), payload_for(pool, traces), plan_of(pool, traces), options)
units = NativeUnits(streamer, plan_of(pool, traces), [f"w{s}" for s in range(len(pool.layout))])
step = next(k for k, step in enumerate(traces[0].steps) if step.sparse)

def hold():
    streamer.begin(0)
    units.ask(0, step, [0])
    with units.hold(0, step, [0], alone=True):
        pass

for thrown.value in (1, 2, 3, 0):
    print("units", told(hold), flush=True)
streamer.close()
streamer.free()
"""


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """A library whose function for reads writes memory, and raises what it is told to."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    source = tmp_path_factory.mktemp("reading") / "reading.cpp"
    source.write_text(LIBRARY)
    command = [COMPILER, "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)]
    subprocess.run(command, check=True)
    return source.with_suffix(".so")


@pytest.mark.usefixtures("native")
def test_exceptions_in_the_threads_that_read(reading):
    """Whoever waits is told, and the next pass, for which reads work again, runs."""
    done = run_forked(READERS, reading)
    assert done.status == 0, done.out + done.err
    sentences = (
        "there is not enough memory: lower the budget or free some",
        "the cable is out",
        "an error of another library, which says nothing about it",
        "ran",
    )
    kinds = ("contiguous", "paged", "units")
    assert done.out.splitlines() == [f"{kind} {text}" for kind in kinds for text in sentences]


OVERFULL = """
import ctypes, json, os, sys
from pathlib import Path
from penstock.native.library import Options, library, open_engine
from tests.runtime.stream.cases import one_case

case = one_case("paged")
payload, plan = json.loads(case.payload), json.loads(case.plan.to_json())
payload["files"][0]["nbytes"] = payload["storages"][0]["nbytes"] = 1 << 30
payload["storages"][0]["extents"] = [{"file": 0, "file_offset": 0, "storage_offset": 0, "nbytes": 1 << 30}]
count = len(payload["storages"])
plan.update(arena_bytes=0, resident=[{"start": 0, "stop": 1 << 30}], outside=list(range(1, count)))
plan["arena"].update(layout=[0, *[-1] * (count - 1)], segments=[{"start": 0, "stop": 1 << 30}])
for schedule in plan["schedules"]:
    schedule.update(transfers=[], drops=[])
for storage in payload["storages"][1:]:
    storage["nbytes"], storage["extents"] = 0, []
read = ctypes.cast(ctypes.CDLL(sys.argv[1]).read_bytes, ctypes.c_void_p)
engine = open_engine(
    json.dumps(payload).encode(), json.dumps(plan), Path("nowhere"), Options(readers=1, read=read)
)
Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
print(library().ps_begin(engine, 0), library().ps_error(engine).decode(), flush=True)
os._exit(0)  # the end of an interpreter touches memory that a fork shares
"""


@pytest.mark.usefixtures("native")
def test_a_plan_that_fills_more_than_it_says(reading):
    with make_group(256 << 20) as group:
        if group is None:
            pytest.skip("no control group of memory can be made here")
        done = run_forked(OVERFULL, reading, group.folder)
        assert group.kills == 0
    assert re.match(r"4 weights take \d+ bytes of memory", done.out), done.out + done.err
