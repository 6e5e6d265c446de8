"""What is remembered of the machine: for how long, of what, and never trusted blindly."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from penstock import LoadOptions
from penstock.runtime.machine import calibrate, figures
from penstock.runtime.machine.calibrate import FACTOR, PASSES, Sightings, seen_compute
from penstock.runtime.machine.figures import (
    DISK_MOST,
    HOUR,
    WEEK,
    Measurement,
    Subject,
    Trials,
    forget,
    measured,
    measurements,
    noted,
    recall,
    this_machine,
)
from penstock.runtime.stream.engine import Counters
from penstock.schedule.facts.model import UNEVEN

STEADY, WIDE = Trials((1.0, 1.01, 1.02)), Trials((1.0, 2.0, 4.0))


class Clock:
    def __init__(self):
        self.now = 1_800_000_000.0

    def time(self):
        return self.now


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "hardware.json"


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(figures, "time", SimpleNamespace(time=found.time))
    return found


def memory():
    return Subject("memory", this_machine())


def test_a_figure_is_taken_once_and_kept_with_all_that_is_known_of_it(cache, clock):
    subject = Subject("reads", this_machine(), "/w.safetensors", "abc", "ext4 on /dev/vda", "past")
    first = measured(subject, lambda: Trials((1e9, 2e9, 1.5e9), waited=0.05))
    assert measured(subject, lambda: pytest.fail("it is known")) == first
    assert (first.median, first.trials, first.waited, first.taken_at) == (1.5e9, 3, 0.05, int(clock.now))
    (entry,) = json.loads(cache.read_text())["measurements"]
    assert entry["subject"]["machine"]["torch"] == torch.__version__
    assert entry["subject"]["where"] == "ext4 on /dev/vda"
    assert entry["spread"] == first.spread > 0


def test_the_file_is_read_when_it_has_changed_and_not_each_time(cache, clock, monkeypatch):
    reads, real = list[str](), figures.decode
    monkeypatch.setattr(figures, "decode", lambda *given: reads.append(given[-1]) or real(*given))
    first = measured(memory(), lambda: STEADY)
    assert [recall(memory()) for _ in range(3)] == [first] * 3
    assert reads == [str(cache)]
    cache.write_text(cache.read_text().replace("1.01", "1.02"))  # by another program, in place
    found = recall(memory())
    assert found is not None
    assert (found.median, len(reads)) == (1.02, 2)


@pytest.mark.parametrize(("trials", "seconds"), [(STEADY, WEEK), (WIDE, HOUR), (Trials((1.0,), 0.4), HOUR)])
def test_a_figure_expires_and_a_doubtful_one_soon(cache, clock, trials, seconds):
    first = measured(memory(), lambda: trials)
    assert (noted("", (), [first, None]) == UNEVEN) == (seconds == HOUR)
    clock.now += seconds - 1
    assert recall(memory()) == first
    clock.now += 1
    assert recall(memory()) is None
    clock.now -= seconds + 1  # a clock that was put back
    assert recall(memory()) is None


def test_another_machine_is_measured_for_itself(cache, monkeypatch):
    measured(memory(), lambda: STEADY)
    for field, value in (("processor", "another"), ("cores", 3), ("threads", 99), ("torch", "1.0")):
        machine = replace(this_machine(), **{field: value})
        assert recall(Subject("memory", machine)) is None
        measured(Subject("memory", machine), lambda: WIDE)
    known = recall(memory())
    assert known is not None
    assert known.median == STEADY.median
    assert len(figures.measurements()) == 5


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", "\udcff", '{"AMD EPYC, 2 threads": [1.0, 2.0]}', "[" * 99_999]
)
def test_a_file_that_makes_no_sense_is_measured_over(cache, damage):
    measured(memory(), lambda: WIDE)
    cache.write_bytes(damage.encode(errors="surrogateescape"))
    assert recall(memory()) is None
    assert measured(memory(), lambda: STEADY).median == STEADY.median
    assert recall(memory())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("median", 0.0),
        ("median", -1.0),
        ("median", "1.0"),
        ("spread", -0.1),
        ("trials", 0),
        ("taken_at", "today"),
        ("extra", 1),
    ],
)
def test_a_figure_that_makes_no_sense_is_taken_again(cache, field, value):
    measured(memory(), lambda: STEADY)
    known = json.loads(cache.read_text())
    known["measurements"][0][field] = value
    cache.write_text(json.dumps(known))
    assert recall(memory()) is None


def test_a_later_version_of_the_file_counts_as_none(cache):
    measured(memory(), lambda: STEADY)
    cache.write_text(cache.read_text().replace('"version": 1', '"version": 2'))
    assert recall(memory()) is None


def test_a_folder_that_cannot_be_written_is_not_missed(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(blocked))
    for trials in (STEADY, WIDE):
        assert measured(memory(), lambda trials=trials: trials).median == trials.median
    assert blocked.read_text() == ""


def test_what_is_forgotten_is_taken_again_and_the_rest_stays(cache):
    products = Subject("products", this_machine(), "float32")
    measured(memory(), lambda: STEADY)
    measured(products, lambda: STEADY)
    forget(lambda one: one.subject.quantity == "memory")
    assert recall(memory()) is None
    assert recall(products)


def test_what_has_expired_goes_when_something_else_is_remembered(cache, clock):
    measured(memory(), lambda: STEADY)
    clock.now += WEEK
    assert figures.measurements()
    measured(Subject("products", this_machine(), "float32"), lambda: STEADY)
    assert [one.subject.quantity for one in figures.measurements()] == ["products"]


def test_of_files_the_newest_figures_are_remembered_and_of_the_machine_all(cache, clock, monkeypatch):
    monkeypatch.setattr(figures, "MOST_FILES", 3)
    machine = measured(memory(), lambda: STEADY)
    for number in range(5):
        clock.now += 1
        measured(Subject("reads", this_machine(), f"/{number}.safetensors", f"{number}"), lambda: STEADY)
    stored = [entry["subject"]["what"] for entry in json.loads(cache.read_text())["measurements"]]
    assert stored == ["", "/2.safetensors", "/3.safetensors", "/4.safetensors"]
    assert recall(memory()) == machine


def test_every_doubt_says_why(cache):
    steady = Measurement(memory(), 1e9, 0.1, 0.05, 9, 0)
    assert list(steady.doubts()) == []
    assert list(replace(steady, spread=0.6).doubts()) == ["varied by 60% between 9 trials"]
    assert list(replace(steady, waited=0.4).doubts()) == ["waited for a processor 40% of the time"]
    disk = replace(steady, subject=Subject("reads", this_machine(), cache="past"), median=495e9)
    assert disk.median > DISK_MOST
    assert list(disk.doubts()) == ["faster than any disk, so a cache answered"]
    late = replace(steady, subject=Subject("answer", this_machine(), cache="past"), median=1e5, spread=2.9)
    assert list(late.doubts()) == []  # plans take care of some that are late
    assert list(replace(late, spread=3.2).doubts()) == ["varied by 320% between 9 trials"]
    warm = replace(disk, subject=Subject("mapping", this_machine(), cache="warm"))
    assert list(warm.doubts()) == []  # the page cache may be as fast as that


# What a load sees corrects what is remembered; on a clock that the tests hold.


MS = 1_000_000


class Load:
    """A load of an artifact whose passes take what the test says."""

    def __init__(self, stack, plan, monkeypatch):
        program = stack.open()
        self.plan, self.counters, self.now = plan, Counters(), 0
        self.watched = Sightings(program.path, program.payload, plan, lambda: self.counters)
        self.leaves = [stack.tokens]
        monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter_ns=lambda: self.now))

    def runs(self, compute_ns, *, stall_ns=0, nbytes=0, leaves=None, passes=PASSES):
        """A first pass that counts for nothing, and then `passes` equal ones."""
        for number in range(passes + 1):
            with self.watched.watching(0, self.leaves if leaves is None else leaves):
                self.now += round(compute_ns + stall_ns) if number else 10**12
                self.counters.stall_ns += round(stall_ns)
                self.counters.bytes_moved += nbytes


@pytest.fixture
def program(stack, monkeypatch, tmp_path):
    """A program, and nothing remembered but steady rates of compute by which a pass takes some 20 ms."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (stack.path / "weights.safetensors").read_bytes()
    measured(Subject("products", this_machine(), "float32"), lambda: Trials((1e11,) * 3))
    measured(Subject("memory", this_machine()), lambda: Trials((1.5e9,) * 3))
    return stack.open()


@pytest.fixture
def load(stack, program, monkeypatch):
    return lambda plan: Load(stack, plan, monkeypatch)


def compute(plan):
    return plan.traces[0].compute_ns


def quantities():
    return sorted(one.subject.quantity for one in measurements())


def test_compute_as_expected_corrects_nothing(program, load):
    plan = program.plan("45%")
    assert compute(plan) > 10 * MS
    before = measurements()
    load(plan).runs(compute(plan) * 1.9)
    load(plan).runs(compute(plan) / 1.9)
    assert measurements() == before
    assert program.plan("45%") == plan


def test_the_next_plan_assumes_the_compute_that_a_load_saw(program, load):
    plan = program.plan("45%")
    load(plan).runs(compute(plan) * 34, stall_ns=7 * MS)
    corrected = program.plan("45%")
    assert compute(corrected) == pytest.approx(34 * compute(plan), rel=1e-3)
    assert corrected.predicted_seconds >= compute(corrected) / 1e9
    assert "compute of a pass of forward took" in corrected.hardware.note
    assert corrected.hardware.flops_per_s == plan.hardware.flops_per_s
    # Later loads that agree leave it, one that does not corrects it again.
    load(corrected).runs(compute(corrected) * 1.5)
    assert program.plan("45%") == corrected
    load(corrected).runs(compute(plan))
    assert compute(program.plan("45%")) == pytest.approx(compute(plan), rel=1e-3)


def test_only_the_first_passes_after_the_first_count(program, load):
    plan = program.plan("45%")
    once = load(plan)
    once.runs(compute(plan) * 34, passes=PASSES - 1)
    assert seen_compute(program.path, "forward") is None
    with once.watched.watching(0, once.leaves):
        once.now += compute(plan) * 34
    assert seen_compute(program.path, "forward").trials == PASSES
    once.runs(compute(plan) * 1000)
    assert seen_compute(program.path, "forward").median == compute(plan) * 34


def test_a_pass_that_fails_is_not_counted(program, load):
    plan = program.plan("45%")
    once = load(plan)

    def fail():
        with once.watched.watching(0, once.leaves):
            once.now += compute(plan) * 34
            raise ValueError("mine")

    for _ in range(2 * PASSES):
        with pytest.raises(ValueError, match="mine"):
            fail()
    assert seen_compute(program.path, "forward") is None


def test_calls_of_other_sizes_say_nothing_of_the_trace(program, load):
    plan = program.plan("45%")
    load(plan).runs(compute(plan) * 34, leaves=[torch.zeros(9, 7, dtype=torch.long)])
    assert seen_compute(program.path, "forward") is None


def test_passes_that_differ_widely_are_believed_for_an_hour_and_told_of(program, load, monkeypatch):
    plan = program.plan("45%")
    once = load(plan)
    for factor in (9, 3, 4, 6, 20, 40):
        with once.watched.watching(0, once.leaves):
            once.now += factor * compute(plan)
    note = program.plan("45%").hardware.note
    assert note.endswith(f" in a load; {UNEVEN}")
    assert note.count(UNEVEN) == 1
    seen = seen_compute(program.path, "forward")
    assert not seen.is_fresh(seen.taken_at + HOUR)


def test_compute_that_is_faster_than_the_machine_has_the_machine_measured_again(program, load):
    plan = program.plan("45%")
    load(plan).runs(compute(plan) / (FACTOR + 1))
    assert "products" not in quantities()
    assert "memory" not in quantities()
    assert compute(program.plan("45%")) == pytest.approx(compute(plan) / (FACTOR + 1), rel=1e-3)
    assert {"products", "memory"} <= set(quantities())


def arrival_of(plan, program):
    return [one for one in measurements() if one.subject.quantity in ("reads", "mapping")]


def test_weights_that_arrive_faster_or_slower_than_remembered_are_measured_again(program, load):
    plan = program.plan("45%")
    slow = replace(plan, hardware=replace(plan.hardware, link_bytes_per_s=1e9))
    copying = slow.hardware.copy_ns(64 << 20)
    latencies = len(plan.schedules[0].transfers) * plan.hardware.link_latency_ns
    for runs in (
        {"compute_ns": compute(plan), "stall_ns": 1.9 * copying, "nbytes": 64 << 20},
        {"compute_ns": compute(plan), "stall_ns": copying / 1.9, "nbytes": 64 << 20},
    ):
        load(slow).runs(**runs)
        assert arrival_of(plan, program)
    for stall_ns, nbytes in ((2.1 * (copying + latencies), 64 << 20), (0, 256 << 20)):
        load(slow).runs(compute(plan), stall_ns=stall_ns, nbytes=nbytes)
        assert not arrival_of(plan, program)
        program.plan("45%")  # which measures it again
        assert arrival_of(plan, program)


def test_loads_watch_their_passes_on_the_machine_that_was_measured(program, stack, monkeypatch):
    concluded = []
    monkeypatch.setattr(Sightings, "_conclude", lambda self, graph, passes: concluded.append(len(passes)))

    def passes(**options):
        with program.load(**options) as module:
            for _ in range(PASSES + 3):
                module(stack.tokens)

    passes(budget="45%", options=LoadOptions(check_reads=True))
    passes(budget="45%", device="sim:h200")
    passes(plan=program.plan("45%", hardware="laptop", arena="contiguous"))
    assert concluded == []
    passes(budget="45%")
    assert concluded == [PASSES]
    passes(budget="100%")
    assert concluded == [PASSES] * 2


def test_a_program_without_an_artifact_remembers_nothing(program, load, tmp_path):
    plan = program.plan("45%")
    once = load(plan)
    once.watched = Sightings(tmp_path, program.payload, plan, lambda: once.counters)
    once.runs(compute(plan) * 34)
    assert recall(Subject("pass", this_machine(), "forward")) is None
    assert "pass" not in quantities()
