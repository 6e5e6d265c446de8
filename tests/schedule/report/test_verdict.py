"""The verdict: whether streaming pays, what beats it, what limits it, and what makes it twice as fast."""

import re
from dataclasses import replace

import pytest

from penstock.schedule.facts.hardware import PRESETS, host_beside
from penstock.schedule.facts.model import UNEVEN, Input, Method, Symbol
from penstock.schedule.facts.sizes import format_time, parse_size
from penstock.schedule.facts.validity import check_machine
from penstock.schedule.report.comparison import REST, other_policies, replayed_ns
from penstock.schedule.report.drawing import cards_of, terms_of
from penstock.schedule.report.verdict import limit_of, tokens_of, verdict
from tests.schedule.clock.test_launches import tiny_plan
from tests.schedule.report.report_plans import plan_behind_a_disk
from tests.schedule.report.test_whatif import GB, plan_for


def test_a_decoder_on_a_slow_link_is_beaten_by_its_host():
    plan = plan_for(2 * GB)
    pays, limit, helps = verdict(plan, {"forward": 1})
    rate = 1e9 / plan.predicted_ns
    fast, near = pays.split("; ")
    assert fast == (
        f"Streaming does not pay here: calls of forward with 1 token make {rate:.3g} tokens a second within "
        "50% (1.86 GiB)"
    )
    assert re.fullmatch(r"their time is at most [\d.]+ % above the best possible\.", near)
    other, twice = helps.split("; ")
    assert other.startswith("Letting the host (desktop) compute what does not fit would be ")
    assert other.endswith(" times as fast")
    assert limit.startswith("The link limits it: ")
    assert "25 GB/s" in limit
    assert twice.endswith(", or a link of 50 GB/s.")
    given = re.search(r"a budget of about (\S+ \S+),", twice)
    assert given
    faster = plan_for(parse_size(given[1]))
    assert faster.predicted_ns == pytest.approx(plan.predicted_ns / 2, rel=0.02)


def test_much_compute_hides_copying():
    pays, limit, twice = verdict(plan_for(2 * GB, flops=4e12), {})
    assert pays.startswith("Streaming is as good as any other way here: forward makes ")
    assert limit.startswith("Compute limits it: ")
    assert twice.startswith("Only faster compute makes it twice as fast")


def test_streaming_pays_where_nothing_else_is_as_fast():
    plan = replace(plan_for(3 * GB), hardware=replace(PRESETS["rtx4090"], name="mine"))
    assert REST not in other_policies(plan)  # whose host is not known
    pays, *_ = verdict(plan, {})
    best = min(other_policies(plan).values()) / plan.predicted_ns
    assert pays.startswith(f"Streaming pays here, {best:.3g} times as fast as any other way: forward makes ")
    assert " passes a second within 75% (2.79 GiB); their time is " in pays
    doubtful = replace(plan, hardware=replace(plan.hardware, note=f"measured; {UNEVEN}"))
    assert verdict(doubtful, {})[0] == pays.replace("Streaming pays", "Streaming probably pays")


def test_one_slot_is_limited_by_memory():
    """Copies and compute take as long as each other and must take turns."""
    plan = plan_for(GB // 10 + (3 << 20), flops=6.6e11)
    assert limit_of(plan) == "memory"
    assert any(one.startswith("Memory limits it: ") for one in verdict(plan, {}))


def test_what_fits_does_not_stream():
    plan = plan_for(4 * GB)
    first, second = verdict(plan, {})
    assert re.fullmatch(
        r"Everything fits: forward makes [\d.]+ passes a second within 100% \(3\.73 GiB\)\.", first
    )
    assert second == "Nothing streams, so compute alone sets the time, and only faster compute helps."


def test_a_disk_behind_a_small_host_limits():
    plan = plan_behind_a_disk()
    assert limit_of(plan) == "disk"
    sentences = verdict(plan, {})
    assert any(one.startswith("The disk limits it: of ") for one in sentences)
    assert "wice as fast takes a host that holds about " in sentences[-1]


@pytest.mark.parametrize("wrap", ["overlap", "barrier"])
def test_the_thread_that_launches_limits_tiny_steps(wrap):
    plan = tiny_plan(8, budget=4, launch_ns=500, wrap=wrap)
    assert limit_of(plan) == "host"
    pays, limit, helps = verdict(plan, {})
    assert limit == "The calling thread limits it: launching the streamed steps takes 2.5 us, compute 800 ns."
    assert pays.endswith("; their time is the best possible.")
    again = f"A call that is captured and replayed as a graph takes {format_time(replayed_ns(plan))} a pass."
    assert (helps == again) == (wrap == "barrier")
    assert ("larger batches" in helps.lower()) == ("wrap='barrier'" in helps) == (wrap == "overlap")
    assert ("What limits it", "The calling thread", "it launches the steps that stream") in cards_of(plan)
    assert limit_of(replace(plan, hardware=replace(plan.hardware, host_step_ns=0))) != "host"


def test_a_slow_pass_and_a_missing_bound_are_said_plainly():
    plan = plan_for(2 * GB, hardware=replace(PRESETS["laptop"], link_bytes_per_s=1e9))
    (schedule,) = plan.schedules
    unbounded = replace(plan, schedules=(replace(schedule, lower_bound_ns=None),))
    sentences = verdict(unbounded, {"forward": 2})
    assert re.search(r"calls of forward with 2 tokens take [\d.]+ s a token within", sentences[0]) is not None
    assert sentences[0].endswith(
        "; their time may be above the best possible: the solver found no bound in time."
    )


@pytest.mark.parametrize("flops", [0, 4e11, 4e12])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 1])
@pytest.mark.parametrize("name", ["rtx4090", "t4", "laptop"])
def test_a_verdict_has_three_sentences_at_most(name, share, flops):
    sentences = verdict(plan_for(int(4 * GB * share), flops=flops, hardware=PRESETS[name]), {"forward": 1})
    assert len(sentences) == (2 if share == 1 else 3)
    for one in sentences:
        assert re.fullmatch(r"[A-Z].*[^.]\.", one)
        assert not re.search(r"\. [A-Z]", one)


@pytest.mark.parametrize(
    ("note", "level", "why"),
    [
        (
            "a preset, from public figures",
            "assumed",
            "a preset, from public figures; none of it was measured",
        ),
        ("", "assumed", "figures that were given; none of it was measured"),
        (f"measured on this machine; {UNEVEN}", "doubtful", f"{UNEVEN}; measured on this machine"),
        (
            "measured on this machine",
            "measured",
            "measured on this machine; times of compute follow from these rates",
        ),
    ],
)
def test_a_plan_says_how_far_its_times_can_be_trusted(note, level, why):
    plan = plan_for(2 * GB)
    plan = replace(plan, hardware=replace(plan.hardware, note=note))
    assert (plan.confidence.level, plan.confidence.why) == (level, why)
    assert ("Rates", f"{level}: {why}") in [*terms_of(plan)]


@pytest.mark.parametrize(
    ("name", "host"), [("rtx4090", "desktop"), ("gh200", "grace"), ("h100", "server"), ("laptop", None)]
)
def test_a_device_has_a_host_of_its_own(name, host):
    found = host_beside(PRESETS[name])
    assert (found.name if found else None) == host
    if found:
        check_machine(found)
    assert host_beside(replace(PRESETS["rtx4090"], name="cuda:0")) is None


def test_tokens_are_those_of_the_exported_call():
    ids = Input("decoder_input_ids", "int64", (2, "s0"))
    image = Input("pixel_values", "float32", (1, 3, 8, 8))
    methods = (Method("generate", 0, (image, ids), (Symbol("s0", 1, None, 7),)), Method("see", 1, (image,)))
    assert tokens_of(methods) == {"generate": 14}
