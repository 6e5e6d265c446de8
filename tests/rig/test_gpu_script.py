"""`make gpu` runs from its first step to its last on the rig, and what goes wrong is a line."""

import io
import json
import os
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import (
    bits,
    copying,
    disk,
    hosting,
    isolation,
    llama,
    overlap,
    passes,
    peers,
    results,
    slabs,
    suite,
)
from benchmarks.gpu.isolation import ROOT, environment
from benchmarks.gpu.steps import NEED_STREAMS, STEPS, SkippedError
from benchmarks.gpu.target import Target, WrongResultError
from examples.demo.llama import Shape, make_meta_decoder
from penstock.runtime.device.accelerator import AcceleratorDevice
from tests.forked import run_forked
from tests.rig import machine
from tests.rig.building import build
from tests.rig.test_gpu_runs import ABSENT, ON_THE_RIG, hide
from tests.runtime.device.device_suite import CHECKS, FAULTS

STEP = f"""
import os, signal, sys
assert not sys.modules.keys() & {{*{ABSENT}}}
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
from benchmarks.gpu.__main__ import main, parse
signal.alarm(int(parse(sys.argv[1:]).limit))
sys.exit(main(sys.argv[1:]))
"""


class ForkedStep:
    """Stands for the process of a step. It is forked from one that has torch, and is over when it is made."""

    def __init__(self, command, *, env, stderr, **_):
        assert command[:3] == [sys.executable, "-m", "benchmarks.gpu"]
        done = run_forked(STEP, *command[3:], folder=ROOT, warnings="default", **env)
        stderr.write(done.err)
        self.returncode, self.stdout = done.status, io.StringIO(done.out)

    def wait(self):
        return self.returncode


@pytest.mark.nightly
def test_both_runs_on_a_gpu_are_tried_on_the_rig(tmp_path, monkeypatch, capsys):
    """All steps, but for the time that each would need to import torch; those below have real processes."""
    build()  # outside of the steps' limits
    first, second = tmp_path / "build" / "first.jsonl", tmp_path / "second.jsonl"
    hidden = hide(tmp_path / "hidden", "raise ModuleNotFoundError(__name__)", *ABSENT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([hidden, environment()["PYTHONPATH"]]))
    monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(Popen=ForkedStep, PIPE=subprocess.PIPE))
    begun = [*STEPS][:7]
    assert script.main([*ON_THE_RIG, "--only", ",".join(begun), "--results", str(first)]) == 0
    assert script.main([*ON_THE_RIG, "--continue", str(first), "--results", str(second)]) == 0
    printed, said = capsys.readouterr()
    lines = [json.loads(line) for line in printed.splitlines()]
    assert results.read_lines(first) + results.read_lines(second) == lines
    outcomes = [(line["step"], line["outcome"]) for line in lines if "outcome" in line]
    done = [(step, "done") for step in STEPS]
    assert outcomes == [*done[:7], done[0], *done[7:]], said  # a second run says that it has the same device
    table = said.rpartition("## machine: done, ")[2]  # the second run's is of all steps
    assert [part.partition(":")[0] for part in table.split("\n## ")[1:]] == [*STEPS][1:]
    found = defaultdict(list)
    for line in lines:
        if "outcome" not in line:
            found[line.pop("step")].append(line)
    assert list(found) == ["check", *STEPS]
    assert [line["missing"] for line in found["check"]] == [[], []]
    assert found["machine"][0]["product"] == f"rig, {machine.MEMORY} bytes"
    assert found["machine"][0]["measures"] is False
    assert found["suite"] == [{"checks": len(CHECKS), "faults": len(FAULTS), "failed": 0}]
    assert len(found["copies"]) == 3 + len(copying.PIECES_MIB)
    assert [line["share"] for line in found["overlap"]] == list(overlap.SHARES)
    assert len(found["bits"]) == 4 * (len(bits.ALIGNMENTS) + 1)
    assert [(line["tokens"], line["share"]) for line in found["llama"]] == [
        (tokens, share) for tokens in llama.TOKENS for share in llama.SHARES
    ]
    assert len(found["peers"]) == len(llama.TOKENS) * (len(peers.PEERS) + 1)
    assert [line["share"] for line in found["host"]] == list(hosting.SHARES)
    assert len(found["disk"]) == 2 * len(disk.SHARES)
    _check(line for step in found.values() for line in step)
    backend, ahead = found["inductor"]
    assert (backend["what"], backend["equal"], backend["misses"]) == ("torch.compile", True, 0)
    assert backend["bytes_moved"] > 0
    assert ahead == {
        "what": "AOTInductor",
        "refused": "method 'forward' is for rig:0, and code of AOTInductor runs on cpu, cuda, xpu, mps only",
    }


def test_both_runs_are_tried_on_a_simulated_device(tmp_path, monkeypatch, capsys):
    """The steps that are quick there, and those that cannot run there."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(Popen=ForkedStep, PIPE=subprocess.PIPE))
    here = ["--device", "sim:h200", *ON_THE_RIG[2:]]
    both = "machine,suite,copies,overlap,host,disk,peers,inductor,streams,closing"
    assert script.main([*here, "--only", "machine,suite,copies", "--results", str(first)]) == 0
    assert script.main([*here, "--only", both, "--continue", str(first), "--results", str(second)]) == 0
    lines = results.read_lines(first) + results.read_lines(second)
    said = capsys.readouterr().err
    done = both.split(",")
    done.insert(3, "machine")
    assert [line["step"] for line in lines if line.get("outcome") == "done"] == done, said
    assert lines[1]["product"] == "sim:h200"
    found = defaultdict(list)
    for line in lines:
        found[line["step"]].append(line)
    assert {step for step in found if "skipped" in found[step][0]} == {*NEED_STREAMS}
    assert [line["share"] for line in found["host"][:-1]] == list(hosting.SHARES)
    assert len(found["disk"][:-1]) == 2 * len(disk.SHARES)
    _check(lines)


def _check(lines):
    """Every figure of equality is right, nothing was a miss, and what is held is within its budget."""
    for line in lines:
        assert line.get("equal", True) is True, line
        assert line.get("misses", 0) == 0, line
        if "held_bytes" in line:
            assert 0 < line["held_bytes"] <= line["budget"] <= line["weights"]
        assert all(value > 0 for name, value in line.items() if name.endswith("_bytes_per_s")), line


def test_a_peer_that_fails_is_a_line_and_the_next_goes_on(late, tmp_path, monkeypatch):
    def crowded(module, where):
        raise torch.OutOfMemoryError("rig out of memory.\nTried to allocate 2.00 GiB")

    def absent(module, where):
        raise SkippedError("it is of another device")

    def moved(module, where):
        module.to(where)

    offloads = {"torch, crowded": crowded, "torch, absent": absent, "nowhere": moved, "torch": moved}
    monkeypatch.setattr(peers, "PEERS", offloads)
    lines = []
    with pytest.raises(
        WrongResultError, match=r"peers failed: torch, crowded for 1 tokens; torch, crowded for 512 tokens$"
    ):
        peers.run(Target("rig", 0.0005, tmp_path), lambda **line: lines.append(line))
    for tokens, found in zip(llama.TOKENS, (lines[:5], lines[5:]), strict=True):
        crowd, other, missing, whole, within = found
        said = "OutOfMemoryError: rig out of memory."
        assert crowd == {"peer": "torch, crowded", "tokens": tokens, "failed": said}
        assert other == {"peer": "torch, absent", "tokens": tokens, "skipped": "it is of another device"}
        assert missing == {"peer": "nowhere", "tokens": tokens, "skipped": "nowhere is not installed"}
        assert (whole["peer"], whole["tokens"], whole["equal"]) == ("torch", tokens, True)
        assert within["within"] is True
        assert 0 < within["driver_bytes"] <= whole["peak_driver_bytes"]


def test_each_test_of_cuda_that_fails_is_a_line(tmp_path, monkeypatch):
    tests = tmp_path / "test_three.py"
    tests.write_text("def test_one(): pass\ndef test_two(): assert 1 == 2\ndef test_three(gone): pass\n")
    monkeypatch.setattr(suite, "CUDA_TESTS", tests)
    lines = []
    assert suite.run_tests(lambda **line: lines.append(line)) == 2
    two, three, counts = lines
    assert (two["test"].partition("::")[2], two["reason"]) == ("test_two", "assert 1 == 2")
    assert three["test"].endswith("::test_three")
    assert "fixture 'gone' not found" in three["reason"]
    assert counts == {"tests": 1, "tests_failed": 2, "status": 1}
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    assert suite.run_tests(lambda **line: lines.append(line)) == 0
    assert lines[-1] == {"skipped": "pytest and hypothesis are not there to run test_three.py"}


def test_two_streams_are_timed_before_the_host_waits_for_either():
    done = []

    def timed(stream, enqueue):
        enqueue()
        done.append(f"the last event of {stream}")
        return lambda: done.append(f"a wait for {stream}") or len(done)

    target = SimpleNamespace(timed=timed)
    first, second = (("copies", lambda: done.append("copies")), ("kernels", lambda: done.append("products")))
    seconds = copying.beside(target, first, second)  # type: ignore[arg-type]
    order = ["products", "the last event of kernels", "copies", "the last event of copies"]
    assert done == [*order, "a wait for kernels", "a wait for copies"]
    assert seconds == (6, 5)


def test_a_kernel_without_huge_pages_ends_no_step(monkeypatch):
    monkeypatch.setattr(slabs, "_ADVICE", {True: 9999})
    assert slabs.map_memory(8192, huge=True).fill_(1).sum() == 8192


def test_wrong_bits_fail_a_step(late, tmp_path, monkeypatch):
    """A mutant of the device gives other bytes, and the steps that compare outputs say so."""

    def copy(self, stream, target, moves, label):
        inner(self, stream, target, moves, label)
        self.fill(stream, target, moves[-1].target, moves[-1].target + 2, 0)

    inner = AcceleratorDevice.copy
    monkeypatch.setattr(AcceleratorDevice, "copy", copy)
    target = Target("rig", 0.0005, tmp_path)
    for measure in (overlap.measure, bits.measure, passes.run_streams, passes.run_closing, passes.run_graphs):
        lines = []
        with torch.no_grad(), pytest.raises(WrongResultError):
            measure(target, lambda lines=lines, **figures: lines.append(figures))
        assert lines[-1]["equal"] is False


def test_a_decoder_makes_its_angles_where_its_tokens_are(late):
    decoder = make_meta_decoder(Shape(128, 1, 256)).to_empty(device="rig").requires_grad_(False)
    for weight in decoder.parameters():
        weight.fill_(0.01)
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="rig")
    assert decoder(tokens).device == tokens.device
    assert "a pageable copy to the device" not in machine.blocked()
