"""How arenas fail: shrinking files, plans that do not fit, reads of what was dropped."""

import os
import signal
from dataclasses import replace

import pytest

from penstock.runtime.arena.kinds import open_arena
from penstock.runtime.system.memory import HUGE_PAGE, PAGE
from penstock.schedule.facts.errors import PlanError, SourceError, StreamError
from penstock.schedule.facts.model import Range
from tests.engines import ENGINES, ROOT
from tests.forked import run_forked
from tests.runtime.arena.arena_weights import KINDS, LARGE, SMALL, content, over_engines


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weights", "checked"), [("python", False), *((engine, True) for engine in ENGINES)], indirect=["weights"]
)
def test_a_file_that_shrinks_raises_and_holds_nothing(weights, kind, checked, monkeypatch):
    arena = weights.open(kind)
    before = weights.paths[0].stat()
    os.truncate(weights.paths[0], HUGE_PAGE + 5)
    if not checked:  # as when it shrinks between the check and the read
        monkeypatch.setattr(weights.source, "check_unchanged", lambda file: None)
    with pytest.raises(SourceError, match=r"truncated while in use|could not be read into a mapping"):
        arena.fill(0, LARGE)
    assert arena.held_bytes == 0
    if kind != "contiguous":
        assert arena.mapped_bytes() == 0
    weights.paths[0].write_bytes(weights.content[0])
    os.utime(weights.paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    arena.fill(0, LARGE)
    assert content(arena, weights, 2) == weights.bytes_of(2)
    arena.close()


@over_engines
def test_a_file_that_loses_part_of_a_page_is_noticed(weights):
    # The kernel maps the last page all the same, with zeros for the bytes that are gone.
    arena = weights.open("mapped")
    os.truncate(weights.paths[1], SMALL - 10)
    arena.fill(weights.segments[1].start, weights.segments[1].stop)
    with pytest.raises(SourceError, match="truncated while in use"):
        arena.check()
    arena.close()


@over_engines
def test_a_file_that_shrank_is_named_as_shrunk_when_it_is_populated(weights):
    arena = weights.open("mapped")
    os.truncate(weights.paths[0], PAGE)
    with pytest.raises(SourceError, match="truncated while in use"):
        arena.fill(0, LARGE)
    arena.close()


CHILD = """
import ctypes, sys
from pathlib import Path
from penstock.runtime.system.memory import HUGE_PAGE
from tests.runtime.arena.arena_weights import Weights
weights = Weights(Path(sys.argv[1]))
arena = weights.open(sys.argv[2], debug=sys.argv[3] == "debug")
arena.fill(2 * HUGE_PAGE, 4 * HUGE_PAGE)
arena.drop(2 * HUGE_PAGE, 3 * HUGE_PAGE)
for granule in 3, 2:
    offset = granule * HUGE_PAGE + HUGE_PAGE // 2
    found = ctypes.string_at(arena._memory.address + offset, 1)
    print(found == weights.content[0][offset : offset + 1], flush=True)
"""


@pytest.mark.parametrize(("kind", "debug"), [("mapped", True), ("anonymous", True), ("mapped", False)])
def test_a_read_of_a_dropped_granule_faults_when_debugging(tmp_path, kind, debug):
    done = run_forked(CHILD, tmp_path, kind, "debug" if debug else "plain", folder=ROOT)
    # Without the debug mode the granule comes back from the file: right, but unplanned.
    assert done.out.split() == (["True"] if debug else ["True", "True"]), done.err
    assert done.status == (-signal.SIGSEGV if debug else 0), done.err


def test_plans_that_do_not_fit_the_files_are_refused(weights):
    weights.layout = (160, *weights.layout[1:])
    with pytest.raises(PlanError, match=r"storage 0 lies at byte 160 .* expected 0 modulo 64"):
        weights.open("anonymous")
    weights.layout = (192, *weights.layout[1:])
    with pytest.raises(PlanError, match=r"storage 0 cannot be mapped at layout offset 192: .*got base 64"):
        weights.open("mapped")
    for weights.engine, kind in zip(ENGINES, ("anonymous", "mapped"), strict=False):
        with pytest.raises(PlanError, match="two storages lie at layout offset"):
            weights.open(kind)


def test_a_storage_at_the_beginning_has_its_phase_too(weights):
    weights.layout = (0, *weights.layout[1:])
    weights.storages = (replace(weights.storages[0], phase=32), *weights.storages[1:])
    with pytest.raises(PlanError, match=r"storage 0 lies at byte 0 .* expected 32 modulo 64"):
        weights.open("anonymous")


@over_engines
def test_a_segment_that_begins_before_its_file_is_refused(weights):
    small = weights.segments[1]
    weights.layout = (*weights.layout[:-1], weights.layout[-1] + PAGE)
    weights.segments = (weights.segments[0], Range(small.start, small.stop + PAGE))
    with pytest.raises(
        PlanError, match=rf"segment 1 .* begins at layout offset {small.start}, before its file"
    ):
        weights.open("mapped")


@over_engines
def test_ranges_inside_a_page_are_refused(weights):
    arena = weights.open("mapped")
    with pytest.raises(PlanError, match="begins or ends inside a page"):
        arena.fill(0, PAGE + 1)
    arena.close()


def test_memory_that_is_not_there_is_a_stream_error(weights):
    plan = weights.plan("contiguous", addresses=(0, -1, -1, 1 << 60))
    with pytest.raises(StreamError, match=r"bytes of address space.*lower the budget"):
        open_arena(plan, weights.storages, weights.source)
