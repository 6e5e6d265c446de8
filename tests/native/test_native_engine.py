"""The native engine: what it refuses, and modules that run on it.

What it shares with Python's streamer is tested over both in tests/runtime/stream/test_engines.py.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.native.library import Options
from penstock.runtime.stream.native import NativeStreamer
from penstock.schedule.facts.errors import PayloadError, PlanError, StreamError
from penstock.schedule.facts.model import Drop, Part, Range
from tests.runtime.stream.cases import one_case

pytestmark = pytest.mark.usefixtures("native")


def open_native(case):
    return NativeStreamer(Path("nowhere"), case.payload, case.plan, Options(readers=1))


def test_calls_that_cannot_be_are_refused():
    with one_case().streamer("native") as streamer:
        streamer.begin(0)
        with pytest.raises(StreamError, match="no step 99"):
            streamer.acquire(0, 99)
        with pytest.raises(StreamError, match="no schedule for graph 7"):
            streamer.begin(7)
        for storage in (-1, 6):
            with pytest.raises(StreamError, match=f"storage {storage} is not in the arena"):
                streamer.view(Part("", "uint8", (1,), (1,), storage, 0))
        assert streamer.view(Part("", "uint8", (1,), (1,), 5, 0)).shape == (1,)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p: replace(p, resident=(Range(1 << 40, 2 << 40),)), PayloadError, "are in no segment"),
        (lambda p: replace(p, schedules=()), PayloadError, "has no schedule"),
        (
            lambda p: replace(p, arena=replace(p.arena, layout=p.arena.layout[1:])),
            PayloadError,
            "no such shape",
        ),
        (lambda p: replace(p, addresses=p.addresses[1:]), PayloadError, "one address for each"),
        (lambda p: replace(p, addresses=(1, *p.addresses[1:])), PayloadError, "storage 0 has no room"),
        (lambda p: replace(p, addresses=(1 << 40, *p.addresses[1:])), PayloadError, "storage 0 has no room"),
        (lambda p: with_drop(p, Drop(0, 64, 77)), PayloadError, "no step 77"),
        (lambda p: with_drop(p, Drop(64, 64, 0)), PayloadError, "reaches from byte 64 to 64"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_a_byte_is_read(change, error, words):
    case = one_case()
    case.plan = change(case.plan)
    with pytest.raises(error, match=words):
        open_native(case)
    assert case.read_bytes == 0


def with_drop(plan, drop):
    schedule = replace(plan.schedules[0], drops=(drop,))
    return replace(plan, schedules=(schedule, *plan.schedules[1:]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[:-1], "the payload is not JSON"),
        (lambda text: text.replace(b'"extents"', b'"extends"'), "a field is missing"),
        (lambda text: text.replace(b'"nbytes": ', b'"nbytes": -'), "negative size|outside its file"),
        (lambda text: text.replace(b'"file": 0', b'"file": 7'), "names no file"),
        (lambda text: text.replace(b'"file_offset": ', b'"file_offset": 9999999'), "outside its file"),
    ],
)
def test_a_payload_that_cannot_be_is_refused(spoil, words):
    case = one_case()
    with pytest.raises(PayloadError, match=words):
        NativeStreamer(Path("nowhere"), spoil(case.payload), case.plan, Options(readers=1))


def test_an_unknown_engine_and_a_device_without_one_are_refused(tmp_path):
    model = torch.nn.Linear(64, 64)
    program = penstock.compile(torch.export.export(model, (torch.ones(1, 64),)), tmp_path / "m.penstock")
    with pytest.raises(StreamError, match="no engine 'fast': choose auto, native or python"):
        program.load(budget="100%", options=LoadOptions(engine="fast"))
    with pytest.raises(StreamError, match="on a CPU, not on sim"):
        program.load(budget="100%", device="sim", options=LoadOptions(engine="native"))


def test_reads_of_what_has_left_fault_in_no_paged_arena(tmp_path):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    program = penstock.compile(torch.export.export(model, (torch.ones(1, 256),)), tmp_path / "m.penstock")
    with pytest.raises(PlanError, match="in a paged arena: leave check_reads=True out"):
        program.load(budget="50%", options=LoadOptions(arena="paged", engine="native", check_reads=True))
