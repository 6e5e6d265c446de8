"""The runs of `make gpu`: their time, what they write at once, what they continue, what they refuse."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import isolation, results
from benchmarks.gpu.isolation import ROOT, environment
from benchmarks.gpu.steps import STEPS

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
    arguments = ["--device", "cuda:7", "--patience", "20", "--only", "machine,copies", "--results", str(path)]
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
def test_a_step_that_crashes_is_a_line(tmp_path):
    hidden = hide(tmp_path / "hidden", "import os\nos.abort()", "torch")
    status, lines, said = run([*ON_THE_RIG, "--only", "machine"], hidden)
    assert status == 1
    assert lines[1]["reason"].startswith("it was killed by SIGABRT: ")
    assert "Fatal Python error: Aborted" in said


@pytest.mark.nightly
def test_what_python_prints_before_a_step_is_not_taken_for_lines(tmp_path, monkeypatch, capsys):
    said = "Welcome to this machine\n3\n{}\n"
    monkeypatch.setenv("PYTHONPATH", hide(tmp_path / "hidden", f"print({said!r}, end='')", "sitecustomize"))
    (line,) = isolation.run("machine", ["--device", "cuda:7"], 60)
    assert (line["step"], line["outcome"]) == ("machine", "failed")
    assert line["reason"].startswith("StreamError: there is no device 'cuda:7' here")
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.nightly
def test_a_step_that_hangs_is_killed_and_says_where_it_was(tmp_path):
    hidden = hide(tmp_path / "hidden", "import threading\nthreading.Event().wait()", "torch")
    patience = str(5 / STEPS["machine"].seconds)
    status, lines, said = run(["--patience", patience, "--only", "machine"], hidden)
    assert status == 1
    assert lines[1]["reason"] == "it was killed after its 5 s"
    assert "torch.py" in said


def test_without_time_the_last_steps_say_so(capsys):
    assert script.main(["--device", "rig", "--minutes", "0", "--only", "llama,peers"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    left = "0 s are left, and it may take {} s: give --continue to a new run"
    assert lines[1:] == [
        {"step": step, "outcome": "failed", "reason": left.format(STEPS[step].seconds)}
        for step in ("llama", "peers")
    ]


def test_limits_fit_two_runs():
    limits, first = [step.seconds for step in STEPS.values()], [*STEPS].index("llama") + 1
    assert sum(limits[:first]) <= 250
    assert sum(limits[first:]) <= 250


def test_a_step_may_take_what_earlier_ones_have_left(monkeypatch):
    now, limits = 0.0, dict[str, float]()

    def run(name, arguments, seconds):
        nonlocal now
        limits[name] = seconds
        now += 10
        yield {"step": name, "outcome": "done"}

    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(script, "seconds_since_start", lambda: 20.0)
    monkeypatch.setattr(isolation, "run", run)
    steps = {"machine": 45, "copies": 30, "llama": 100, "peers": 75}
    monkeypatch.setattr(
        script.steps, "STEPS", {name: replace(STEPS[name], seconds=limit) for name, limit in steps.items()}
    )
    assert script.main(["--device", "rig", "--minutes", "2.5"]) == 0
    assert limits == {"machine": 45, "copies": 65, "llama": 110, "peers": 100}


def test_only_results_of_the_same_device_are_continued(tmp_path, monkeypatch, capsys):
    first, here = tmp_path / "first.jsonl", {"product": "NVIDIA H200, 150 bytes", "scale": 1.0}
    monkeypatch.setattr(script, "seconds_since_start", lambda: 1.0)  # this process may be old
    monkeypatch.setattr(
        isolation, "run", lambda name, *_: iter([{"step": name, **here}, {"step": name, "outcome": "done"}])
    )
    for product, scale, run in (
        ("NVIDIA H200, 149 bytes", 1.0, ["machine", "suite"]),  # another driver holds more
        ("NVIDIA H100, 80 bytes", 1.0, ["machine"]),
        ("NVIDIA H200, 150 bytes", 0.5, ["machine"]),
    ):
        lines = [{"step": "machine", "product": product, "scale": scale}]
        lines += [{"step": step, "outcome": "done"} for step in ("machine", "copies")]
        first.write_text("".join(json.dumps(line) + "\n" for line in lines))
        status = script.main(["--only", "suite,copies", "--continue", str(first)])
        printed, said = capsys.readouterr()
        assert status == (0 if "suite" in run else 2)
        assert list(dict.fromkeys(json.loads(line)["step"] for line in printed.splitlines())) == [
            "check",
            *run,
        ]
        if status:
            card = f"{product.partition(',')[0]} at scale {scale:g}"
            assert said == f"{first} is of {card}, and this is NVIDIA H200 at scale 1: begin anew\n"


def test_the_time_of_a_script_before_exec_counts():
    asked = "from benchmarks.gpu.__main__ import seconds_since_start as age; print(age())"
    command = ["bash", "-c", 'sleep 1; exec "$@"', "run.sh", sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=True)
    assert 1 <= float(done.stdout) < 60


@pytest.mark.parametrize("ahead", [-1e6, 1e6])
def test_a_clock_that_began_at_another_time_costs_no_run(monkeypatch, ahead):
    there = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: there(clock) + ahead)
    before = time.process_time()
    assert before <= script.seconds_since_start() <= time.process_time()


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


def test_an_older_torch_is_said_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr(script, "version", lambda _: "2.9.1a0+nv25")
    assert script.main([]) == 2
    (line,) = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert (line["torch"], line["missing"]) == ("2.9.1a0+nv25", ["torch>=2.11"])


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


def test_its_help_names_every_step(capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in STEPS)
    assert "examples:\n" in said
