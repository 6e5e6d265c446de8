"""The native engine under ThreadSanitizer and AddressSanitizer, in a program of its own: `make sanitize`.

They compile the engine twice, which takes a minute, so they stand aside in `make test`.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.hunt import scaled
from tests.native.test_native_pool import on_pages, payload_for, plan_of
from tests.runtime.stream.cases import KINDS, one_case
from tests.schedule.sparse.test_units_resident import random_problem

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.sanitize
SANITIZERS = {"thread": "thread", "address": "address,undefined"}


@pytest.fixture(scope="module", params=SANITIZERS)
def driver(request, tmp_path_factory):
    """The engine and its driver, compiled with a sanitizer."""
    compiler = shutil.which("g++")
    assert compiler, "g++ is missing: scripts/install-compiler installs it"
    program = tmp_path_factory.mktemp("sanitized") / request.param
    folders = (ROOT / "native", ROOT / "native" / "sparse", ROOT / "tests" / "native")
    sources = [path for folder in folders for path in sorted(folder.glob("*.cpp"))]
    flags = [
        "-std=c++17",
        "-g",
        "-O1",
        f"-fsanitize={SANITIZERS[request.param]}",
        "-fno-sanitize-recover=all",
    ]
    subprocess.run([compiler, *flags, "-pthread", "-o", str(program), *map(str, sources)], check=True)
    return program


def write(case, folder):
    """The files that the driver reads, as its arguments."""
    reads = [
        f"{trace.graph} {k} {s} {case.storages[s].nbytes} {extent.file} {extent.file_offset}"
        for trace in case.traces
        for k, step in enumerate(trace.steps)
        for s in step.reads
        for extent in case.storages[s].extents
    ]
    for number, file in enumerate(case.files):
        bytes_of = [(31 * number + 7 * k + k // 251) % 256 for k in range(file.nbytes)]
        (folder / file.path).write_bytes(bytes(bytes_of))
    (folder / "payload").write_bytes(case.payload)
    (folder / "plan").write_text(case.plan.to_json())
    (folder / "reads").write_text("\n".join(reads))
    return [str(folder / name) for name in ("payload", "plan", "reads")]


def run(*command):
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_sanitizer_finds_anything(driver, kind, wrap, tmp_path):
    arguments = write(one_case(kind, wrap=wrap), tmp_path)
    for seed in range(scaled(10)):
        maps = [str(tmp_path)] if kind in ("mapped", "adaptive") else []
        run(driver, *arguments, seed, *maps)


def test_no_sanitizer_finds_anything_in_a_pool(driver, tmp_path):
    for seed in range(scaled(10)):
        pool, traces = on_pages(*random_problem(Random(seed)))
        storages = json.loads(payload_for(pool, traces))["storages"]
        starts = [one["extents"][0]["file_offset"] for one in storages]
        lines = [
            f"{trace.graph} {k} {one.storage} {one.count} {one.unit_stride} {one.unit_nbytes} "
            f"{one.view.offset} {starts[one.storage] + one.view.offset}"
            for trace in traces
            for k, step in enumerate(trace.steps)
            for one in step.sparse
        ]
        (tmp_path / "payload").write_bytes(payload_for(pool, traces))
        (tmp_path / "plan").write_text(plan_of(pool, traces).to_json())
        (tmp_path / "reads").write_text("\n".join(lines))
        run(driver, "units", *(tmp_path / name for name in ("payload", "plan", "reads")), seed)
