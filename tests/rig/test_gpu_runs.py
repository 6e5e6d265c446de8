"""`make gpu` on the rig: all steps, what goes wrong, and what it continues and refuses."""

import io
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
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
)
from benchmarks.gpu.isolation import ROOT, environment
from benchmarks.gpu.steps import NEED_STREAMS, STEPS
from benchmarks.gpu.target import Target, WrongResultError
from penstock.runtime.device.accelerator import AcceleratorDevice
from tests.forked import run_forked
from tests.hunt import nightly_but
from tests.rig import machine
from tests.rig.building import build
from tests.runtime.device.device_suite import CHECKS, FAULTS

ON_THE_RIG = ("--device", "rig", "--scale", "0.0005", "--patience", "20")


def hide(folder, how, *packages):
    """A folder for PYTHONPATH in which these packages are files that do not import."""
    folder.mkdir()
    for package in packages:
        (folder / f"{package}.py").write_text(f"{how}\n")
    return str(folder)


def run(arguments, hidden=""):
    """The script's exit status, its lines, and what it printed on its standard error."""
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    surroundings = environment()
    surroundings["PYTHONPATH"] = os.pathsep.join([hidden, surroundings["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=surroundings, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


ABSENT = ("pytest", "hypothesis", "typer")
"""What need not be there."""


def test_a_step_that_fails_is_a_line_and_the_next_goes_on(tmp_path):
    path = tmp_path / "gpu.jsonl"
    path.write_text('{"step": "of another day"}')
    arguments = [
        "--device",
        "cuda:7",
        "--patience",
        "20",
        "--only",
        "machine,copies",
        "--results",
        str(path),
    ]
    hidden = hide(tmp_path / "hidden", "raise ModuleNotFoundError(__name__)", *ABSENT)
    status, lines, said = run(arguments, hidden)
    assert status == 1
    assert [line["step"] for line in lines] == ["check", "machine", "copies"]
    for line in lines[1:]:
        assert line["outcome"] == "failed"
        assert line["reason"].startswith("StreamError: there is no device 'cuda:7' here")
    assert "Traceback" in said
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == [{"step": "of another day"}, *lines]
    assert {*tmp_path.iterdir()} == {path, Path(hidden)}


@pytest.mark.nightly
def test_a_step_that_hangs_is_killed_and_says_where_it_was(tmp_path):
    hidden = hide(tmp_path / "hidden", "import threading\nthreading.Event().wait()", "torch")
    patience = str(5 / STEPS["machine"].seconds)
    status, lines, said = run(["--patience", patience, "--only", "machine"], hidden)
    assert status == 1
    assert lines[1]["reason"] == "it was killed after its 5 s"
    assert "torch.py" in said


def test_limits_fit_two_runs():
    limits, first = [step.seconds for step in STEPS.values()], [*STEPS].index("llama") + 1
    assert sum(limits[:first]) <= 250
    assert sum(limits[first:]) <= 250


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_run_keeps_its_lines_and_is_continued(tmp_path):
    number, first, surroundings = tmp_path / "step", tmp_path / "first.jsonl", environment()
    hangs = f"import os, signal\nopen({str(number)!r}, 'w').write(f'{{os.getpid()}} ')\nsignal.pause()"
    hidden = hide(tmp_path / "hidden", hangs, "torch")
    surroundings["PYTHONPATH"] = os.pathsep.join([hidden, surroundings["PYTHONPATH"]])
    command = [sys.executable, "-m", "benchmarks.gpu", "--results", str(first), "--patience", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=surroundings) as process:
        assert process.stdout
        process.stdout.readline()
        wait_until(lambda: number.exists() and number.read_text().endswith(" "))
        process.kill()
    step = Path("/proc") / number.read_text().strip() / "cmdline"  # empty once it has ended
    wait_until(lambda: not step.exists() or not step.read_bytes())
    with first.open("a") as file:
        file.write(
            '{"step": "machine", "outcome": "done"}\n{"step": "suite", "outcome": "failed"}\n{"step": "co'
        )
    assert [line["step"] for line in results.read_lines(first)] == ["check", "machine", "suite"]
    status, lines, said = run(["--continue", str(first), "--minutes", "0", "--results", str(first)])
    assert status == 1
    assert [line["step"] for line in lines] == ["check", *STEPS]
    assert [line["step"] for line in results.read_lines(first)[3:]] == ["check", *STEPS]
    assert "## machine: done\n" in said
    assert "## copies: failed 0 s are left" in said


def test_what_is_missing_is_said_before_anything_runs(monkeypatch, capsys):
    there = script.find_spec
    for gone, what in ({"pydantic"}, script.CARRIED), ({"scipy", "accelerate"}, "scipy"):
        monkeypatch.setattr(
            script, "find_spec", lambda name, gone=gone: None if name in gone else there(name)
        )
        assert script.main([]) == 2
        (line,) = (json.loads(text) for text in capsys.readouterr().out.splitlines())
        assert line["missing"] == sorted(gone - {"accelerate"})
        assert line["torch"] == torch.__version__
        assert line["left_out"] == ({"accelerate": "peers"} if "accelerate" in gone else {})
        assert f"carry the wheels of {what} and" in line["do"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "copies,steps"], "there is no step steps: choose from machine, suite"),
        (["--continue", "/none"], "--continue is the results file of a run, and there is no file /none"),
        (["--results", "/"], "--results is a file to append to, got the folder /"),
        (["--scale", "2"], "--scale is a share of the full sizes, above 0 and at most 1, got 2.0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert words in capsys.readouterr().err


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


COMPARING = [overlap.measure, bits.measure, passes.run_streams, passes.run_closing, passes.run_graphs]


@pytest.mark.parametrize("measure", nightly_but([passes.run_streams], COMPARING))
def test_wrong_bits_fail_a_step(late, tmp_path, monkeypatch, measure):
    """A mutant of the device gives other bytes, and the steps that compare outputs say so."""

    def copy(self, stream, target, moves, label):
        inner(self, stream, target, moves, label)
        self.fill(stream, target, moves[-1].target, moves[-1].target + 2, 0)

    inner = AcceleratorDevice.copy
    monkeypatch.setattr(AcceleratorDevice, "copy", copy)
    lines = []
    with torch.no_grad(), pytest.raises(WrongResultError):
        measure(Target("rig", 0.0005, tmp_path), lambda **figures: lines.append(figures))
    assert lines[-1]["equal"] is False
