"""What pictures are drawn from, against the plan itself; the files that are written; the terminal."""

import base64
import gzip
import hashlib
import itertools
import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.facts.errors import PlanError
from penstock.schedule.facts.model import Step, Storage, Trace
from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import floor, make_plan
from penstock.schedule.report.drawing import page_data, save_report, save_timeline
from penstock.schedule.report.pictures import copies_of, resident_of, stays_of, storage_ranges, views_of
from penstock.schedule.space.layout import packed_arena
from tests.schedule.report.report_plans import UNIT, corpus_plan, equal_plan
from tests.schedule.traces import machine, problems

# What is drawn.


@settings(max_examples=60)
@given(problems(), st.data())
def test_every_byte_that_a_step_reads_is_drawn_once_and_nothing_is_drawn_twice(problem, data):
    lowest = floor(problem).upper_bytes
    plan = make_plan(problem, max(1, problem.budget(lowest)))
    trace = plan.traces[0]
    views = views_of(plan, 0)
    copies = copies_of(plan, plan.schedules[0], views.passes)
    check_copies(plan, copies, views)
    stays = stays_of(plan, 0, copies)
    n = len(trace.steps)
    always = [r for _, r in resident_of(plan)]
    places = storage_ranges(plan)
    for k, step in enumerate(trace.steps):
        there = always + [
            stay.range for stay in stays for at in (k, k + n) if copies[stay.copy].step <= at <= stay.until
        ]
        there.sort()
        assert all(a.stop <= b.start for a, b in itertools.pairwise(there))
        for s in step.reads:
            place = places[s]
            assert place is not None
            if s not in plan.outside:
                covered = sum(max(0, min(r.stop, place.stop) - max(r.start, place.start)) for r in there)
                assert covered == place.nbytes == problem.storages[s].nbytes


def check_copies(plan, copies, views):
    """Copies have the bytes and the times of their transfers, each transfer once and in order."""
    transfers = plan.schedules[0].transfers
    assert [i for c in copies for i in range(c.first, c.last)] == list(range(len(transfers)))
    for c in copies:
        some = transfers[c.first : c.last]
        assert (some[0].start, some[-1].stop) == (c.range.start, c.range.stop)
        assert sum(t.stop - t.start for t in some) == c.range.nbytes
        copying = sum(plan.hardware.copy_ns(t.stop - t.start) for t in some)
        for times in views.passes:
            assert times.transfers[c.last - 1][1] - times.transfers[c.first][0] == copying


def test_neighbouring_transfers_are_one_copy_only_while_they_follow_each_other():
    plan = corpus_plan("llama-3.1-8b, decode", "rtx4090", "paged", 0.3)
    copies = copies_of(plan, plan.schedules[0], views_of(plan, 0).passes)
    assert len(copies) < len(plan.schedules[0].transfers)
    assert sum(c.range.nbytes for c in copies) == plan.streamed_bytes


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_the_steady_view_takes_what_is_predicted(kind):
    for units in (1.5, 3, 5.5):
        plan = equal_plan(kind=kind, units=units)
        views = views_of(plan, 0)
        assert views.steady.period_ns == plan.schedules[0].predicted_ns
        assert views.first.begins[0] == 0
        assert views.first.period_ns >= plan.traces[0].compute_ns


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_sizes_of_storages_are_found_without_the_catalog(kind):
    storages = tuple(Storage(n, "streamable") for n in (100, 640, 64, 1000))
    steps = tuple(Step(f"s{k}", (k,), 0, 100) for k in range(4))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind=kind, granule=64, alignment=64)
    plan = make_plan(Problem(storages, traces, arena, hardware=machine(1e9)), 1100)
    known = storage_ranges(plan)
    guessed = storage_ranges(replace(plan, sizes=()))
    assert [r.nbytes for r in known if r] == [100, 640, 64, 1000]
    for one, other in zip(known, guessed, strict=True):
        assert one is not None
        assert other is not None
        assert one.start == other.start
        assert 0 <= other.stop - one.stop < 64


def test_the_table_says_where_a_weight_lives_and_why():
    plan = equal_plan(kind="contiguous")
    data = page_data(plan, [f"w{s}" for s in range(8)])
    weights, uses = data["weights"], data["methods"][0]["uses"]
    assert [weight["name"] for weight in weights] == [f"w{s}" for s in range(8)]
    for s in range(8):
        assert (weights[s]["resident"], uses[s]["streamed"]) in {(UNIT, 0), (0, UNIT)}
        stays = "stays, so it is never copied" in uses[s]["why"]
        assert stays == (uses[s]["streamed"] == 0) == (uses[s]["lives"] == "resident")
        assert uses[s]["why"].startswith("read once a pass; ")
        assert uses[s]["first"] == s
    part = [use["why"] for use in page_data(equal_plan(), ["w"] * 8)["methods"][0]["uses"]]
    assert all(
        re.search(r"3\d % stays, the rest is copied while the step before runs; its", why) for why in part
    )


def test_the_table_explains_what_never_streams():
    storages = (*(Storage(UNIT, "streamable") for _ in range(3)), Storage(10, "mutable"))
    steps = (Step("a", (0,), 0, 10), Step("b", (1,), 0, 10))
    traces = (Trace("forward", 0, "", steps, 0, 0, "modelled"),)
    arena = packed_arena(storages, traces, kind="paged", granule=64, alignment=64)
    plan = make_plan(Problem(storages, traces, arena, hardware=machine(1e9)), 3 * UNIT)
    data = page_data(plan, "abcd")
    why = [use["why"] for use in data["methods"][0]["uses"]]
    assert why[0] == "read once a pass; all weights fit, so that nothing streams"
    assert why[2] == "forward does not read it"
    assert why[3] == "the program writes or returns it, so it never streams"
    assert [use["lives"] for use in data["methods"][0]["uses"]] == ["outside"] * 2 + ["not read", "outside"]
    assert data["addresses"] == 0


# Files.


@pytest.mark.parametrize("save", [save_report, save_timeline])
def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path, save):
    plan = equal_plan()
    target = tmp_path / "out"
    save(plan, target)
    written = target.read_bytes()
    with pytest.raises(PlanError, match="out exists"):
        save(plan, str(target))
    assert target.read_bytes() == written
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing" / "file")
    with pytest.raises(PlanError, match="nowhere exists"):
        save(plan, tmp_path / "nowhere")
    with pytest.raises(PlanError, match="missing is not a folder"):
        save(plan, tmp_path / "missing" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nowhere", "out"]


def test_the_page_asks_for_nothing(tmp_path):
    save_report(equal_plan(), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "$" not in page.split("<style>")[0]
    assert "default-src 'none'" in page
    # The charts' library says in a comment where it comes from.
    assert set(re.findall(r"https?://[\w./-]*", page)) == {"https://github.com/leeoniya/uPlot"}
    assert not re.search(r"<link(?! rel=\"icon\" href=\"data:,\")|<img|@import|url\(|\ssrc=|fetch\(", page)


def test_the_library_of_the_page_is_the_one_that_its_authors_publish(tmp_path):
    vendor = resources.files("penstock.schedule.report.page") / "vendor"
    said = Path(__file__).parents[3] / "schedule/report/page/vendor/README.md"  # which no wheel holds
    listed = [line.split() for line in said.read_text().splitlines() if line.startswith("    ")]
    assert len(listed) == 3
    for digest, name in listed:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest
    save_report(equal_plan(), tmp_path / "plan.html")
    # Copies of it, such as a page, carry its licence.
    assert (vendor / "LICENSE.txt").read_text() in (tmp_path / "plan.html").read_text()


def test_a_name_cannot_end_the_data(tmp_path):
    names = ["</script><script>alert(1)</script>", "<!--", *"cdefgh"]
    save_report(replace(equal_plan(), names=names), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("</script>") == 2
    packed = page.split('id="plan-data">')[1].split("</script>")[0]
    data = json.loads(gzip.decompress(base64.b64decode(packed, validate=True)))
    assert [weight["name"] for weight in data["weights"]] == names
