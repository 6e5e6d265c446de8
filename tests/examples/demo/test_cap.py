"""Part one: runs in processes of their own, under a cap that is enforced."""

import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest

from examples.demo import cap, cgroup, llama, processes
from penstock.schedule.facts.errors import StreamError
from tests.examples.demo.screens import CONSOLE, MIB, capture


def test_plain_and_streamed_runs_make_the_same_logits(prepared):
    plain = processes.run_child(CONSOLE, prepared, "plain")
    streamed = processes.run_child(CONSOLE, replace(prepared, kind="streamed", budget=4 * MIB), "streamed")
    assert plain.result is not None
    assert streamed.result is not None
    assert plain.result.digest == streamed.result.digest
    assert plain.result.tokens == streamed.result.tokens
    assert len(plain.result.tokens) == len(llama.make_prompt(prepared.vocabulary)) + cap.TOKENS
    assert streamed.result.moved > 0 == plain.result.moved
    assert streamed.result.misses == 0
    assert plain.peak > 8 * MIB


def test_a_run_that_fails_of_itself_is_no_kill(prepared, tmp_path):
    broken = replace(prepared, kind="streamed", artifact=str(tmp_path / "none.penstock"))
    with pytest.raises(StreamError, match=r"the broken run: .*none\.penstock"):
        processes.run_child(CONSOLE, broken, "the broken run")


def test_an_address_space_limit_refuses_the_plain_run(prepared, monkeypatch):
    monkeypatch.setattr(processes, "make_group", lambda _: nullcontext(None))
    ending, kind = processes.run_capped(CONSOLE, prepared, 2 * MIB, "plain")
    assert ending.result is None
    assert ending.failure == "memory refused"
    assert kind == "address-space limit, plain run only"


@pytest.mark.nightly
def test_under_a_real_cap_the_plain_model_is_killed_and_penstock_finishes(tmp_path):
    with cgroup.make_group(MIB) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
    smallest = cap.measure_smallest_cap()
    runs = cap.run_three(CONSOLE, tmp_path, smallest + 48 * MIB, cap=smallest)
    assert runs.holds
    assert runs.cap_kind.startswith("memory cgroup")
    assert runs.plain.failure == "killed by the kernel"
    assert runs.streamed.result is not None
    assert 0 < runs.streamed.peak <= runs.cap < runs.weight_bytes
    text = capture(lambda console: cap.print_runs(console, runs))
    assert "killed by the kernel" in text
    assert runs.reference.result is not None
    assert text.count(runs.reference.result.digest[:16]) == 2
    assert "GB/s" in text


def test_a_child_ends_with_its_demo(prepared, monkeypatch):
    started = []

    def interrupt(process, _):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        processes.run_child(CONSOLE, prepared, "plain")
    assert started[0].returncode == -signal.SIGKILL
