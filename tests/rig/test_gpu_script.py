"""`make gpu` runs from its first step to its last on the rig, and what goes wrong is a line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import bits, copying, disk, hosting, isolation, llama, overlap, passes, peers, results
from benchmarks.gpu.isolation import ROOT, environment
from benchmarks.gpu.steps import NEED_STREAMS, STEPS, SkippedError
from benchmarks.gpu.target import Target, WrongResultError
from penstock.demo.llama import Shape, make_meta_decoder
from penstock.runtime.device.accelerator import AcceleratorDevice
from tests.forked import run_forked
from tests.rig import machine
from tests.rig.building import build
from tests.runtime.device.device_suite import CHECKS, FAULTS

ON_THE_RIG = ("--device", "rig", "--scale", "0.0005", "--patience", "20")


def hide(folder: Path, how: str, *packages: str) -> str:
    """A folder for PYTHONPATH in which these packages are files that do not import."""
    folder.mkdir()
    for package in packages:
        (folder / f"{package}.py").write_text(f"{how}\n")
    return str(folder)


def run(arguments: Sequence[str], hidden: str = "") -> tuple[int, list[dict[str, Any]], str]:
    """The script's exit status, its lines, and what it printed on its standard error."""
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    surroundings = environment()
    surroundings["PYTHONPATH"] = os.pathsep.join([hidden, surroundings["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=surroundings, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


ABSENT = ("pytest", "hypothesis", "typer")
"""What need not be there."""

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

    def __init__(self, command: Sequence[str], *, env: dict[str, str], stderr: Any, **_: object) -> None:
        assert command[:3] == [sys.executable, "-m", "benchmarks.gpu"]
        done = run_forked(STEP, *command[3:], folder=ROOT, warnings="default", **env)
        stderr.write(done.err)
        self.returncode, self.stdout = done.status, io.StringIO(done.out)

    def wait(self) -> int:
        return self.returncode


def test_both_runs_on_a_gpu_are_tried_on_the_rig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All steps, but for the time that each would need to import torch; those below have real processes."""
    build()  # outside of the steps' limits
    first, second = tmp_path / "build" / "first.jsonl", tmp_path / "second.jsonl"
    monkeypatch.setenv(
        "PYTHONPATH", hide(tmp_path / "hidden", "raise ModuleNotFoundError(__name__)", *ABSENT)
    )
    monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(Popen=ForkedStep, PIPE=subprocess.PIPE))
    begun = [*STEPS][:7]
    assert script.main([*ON_THE_RIG, "--only", ",".join(begun), "--results", str(first)]) == 0
    assert script.main([*ON_THE_RIG, "--continue", str(first), "--results", str(second)]) == 0
    printed, said = capsys.readouterr()
    lines = [json.loads(line) for line in printed.splitlines()]
    assert results.read_lines(first) + results.read_lines(second) == lines
    outcomes = [(line["step"], line["outcome"]) for line in lines if "outcome" in line]
    assert outcomes == [(step, "done") for step in STEPS], said
    table = said.rpartition("## machine: done, ")[2]  # the second run's is of all steps
    assert [part.partition(":")[0] for part in table.split("\n## ")[1:]] == [*STEPS][1:]
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if "outcome" not in line:
            found[line.pop("step")].append(line)
    assert list(found) == ["check", *STEPS]
    assert [line["missing"] for line in found["check"]] == [[], []]
    assert found["machine"][0]["product"] == f"rig, {machine.MEMORY} bytes"
    assert found["machine"][0]["measures"] is False
    assert found["suite"] == [{"checks": len(CHECKS), "faults": len(FAULTS), "failed": 0}]
    _check_copies(found["copies"])
    _check_overlap(found["overlap"])
    _check_bits(found["bits"])
    _check_passes(found)
    _check_llama(found)
    _check_host_and_disk(found)
    backend, ahead = found["inductor"]
    assert (backend["what"], backend["equal"], backend["misses"]) == ("torch.compile", True, 0)
    assert backend["bytes_moved"] > 0
    assert ahead == {
        "what": "AOTInductor",
        "refused": "method 'forward' is for rig:0, and code of AOTInductor runs on cpu, cuda, xpu, mps only",
    }


def test_both_runs_are_tried_on_a_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps that are quick there, and those that cannot run there."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(Popen=ForkedStep, PIPE=subprocess.PIPE))
    here = ["--device", "sim:h200", *ON_THE_RIG[2:]]
    both = "machine,suite,copies,overlap,host,disk,peers,inductor,streams,closing"
    assert script.main([*here, "--only", "machine,suite,copies", "--results", str(first)]) == 0
    assert script.main([*here, "--only", both, "--continue", str(first), "--results", str(second)]) == 0
    lines = results.read_lines(first) + results.read_lines(second)
    said = capsys.readouterr().err
    assert [line["step"] for line in lines if line.get("outcome") == "done"] == both.split(","), said
    assert lines[1]["product"] == "sim:h200"
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["step"]].append(line)
    assert {step for step in found if "skipped" in found[step][0]} == {*NEED_STREAMS}
    _check_host_and_disk({step: found[step][:-1] for step in ("host", "disk")})


def _check_copies(lines: list[dict[str, Any]]) -> None:
    locking, *copies, small, huge = lines
    assert (small["huge"], huge["huge"]) == (False, True)
    assert all(line["equal"] and line["touch_s_a_gib"] > 0 for line in (small, huge))
    assert locking["nbytes"] == int(copying.TRANSFER * 0.0005) // 4096 * 4096
    assert locking["seconds_a_gib"] > locking["seconds"] > 0
    assert len(copies) == len(copying.PIECES_MIB)
    for line in copies:
        assert line["equal"] is True
        assert line["pieces"] == -(-locking["nbytes"] // line["piece_bytes"])
        # An operation of the rig takes a millisecond, and the record of an event is one.
        assert line["bytes_per_s"] == pytest.approx(locking["nbytes"] / (line["pieces"] + 1) * 1e3)
        assert line["bytes_per_s_under_products"] == line["bytes_per_s"]
        assert line["products_s"] == line["products_under_copies_s"] == (copying.PRODUCTS + 1) / 1e3


def _check_overlap(lines: list[dict[str, Any]]) -> None:
    assert [line["share"] for line in lines] == list(overlap.SHARES)
    transfers = [line["transfers"] for line in lines]
    assert transfers == sorted(transfers, reverse=True)
    assert min(transfers) > 0
    for line in lines:
        assert line["equal"] is True
        assert line["copying_ms"] == 2 * line["transfers"]  # a copy, and the record behind it
        assert 0 < line["both_ms"] <= min(line["copying_ms"], line["computing_ms"])
        assert line["hidden"] == line["both_ms"] / min(line["copying_ms"], line["computing_ms"])
        assert line["computing_ms"] < line["ms"]


def _check_bits(lines: list[dict[str, Any]]) -> None:
    keys = [(line["bias"], line["tokens"], line.get("alignment")) for line in lines]
    assert sorted(keys[:12]) == [
        (bias, tokens, alignment)
        for bias in (False, True)
        for tokens in (1, 512)
        for alignment in bits.ALIGNMENTS
    ]
    assert sorted(keys[12:]) == [(bias, tokens, None) for bias in (False, True) for tokens in (1, 512)]
    assert all(line["equal"] is True for line in lines)


def _check_passes(found: dict[str, list[dict[str, Any]]]) -> None:
    assert [(line["share"], line["wrap"]) for line in found["streams"]] == [
        (share, wrap) for share in (0.0, 0.5) for wrap in ("overlap", "barrier")
    ]
    assert all(line["equal"] is True and line["misses"] == 0 for line in found["streams"])
    assert [line["share"] for line in found["closing"]] == [0.0, 0.5, 1.0]
    assert all(line["equal"] is True and line["overwritten_bytes"] > 0 for line in found["closing"])
    graphed = {"captured": False, "equal_after_a_broken_capture": True, "equal": True}
    assert found["graphs"] == [{"share": s, **graphed, "equal_after_closing": None} for s in (0.0, 0.5)]


def _check_llama(found: dict[str, list[dict[str, Any]]]) -> None:
    assert [(line["tokens"], line["share"]) for line in found["llama"]] == [
        (tokens, share) for tokens in llama.TOKENS for share in llama.SHARES
    ]
    for line in found["llama"]:
        assert line["equal"] is True
        assert line["misses"] == 0
        assert 0 < line["held_bytes"] <= line["budget"] <= line["weights"]
        assert line["driver_bytes"] >= line["held_bytes"]
        assert line["over_limit"] == line["seconds"] / max(line["resident_s"], line["copying_s"])
        assert line["over_prediction"] == line["seconds"] / line["predicted_s"]
        assert (line["copying_s"] > 0) == (line["share"] < 1)
    assert [line["share"] for line in found["replay"]] == list(llama.SHARES)
    assert all(line["equal"] is True and line["captured"] is False for line in found["replay"])
    assert [(line["tokens"], line["peer"], line.get("penstock", False)) for line in found["peers"]] == [
        (tokens, *run)
        for tokens in llama.TOKENS
        for run in [
            ("accelerate", False),
            ("accelerate", True),
            *((peer, False) for peer in [*peers.PEERS][1:]),
        ]
    ]
    for line in found["peers"]:
        if line["peer"] == "accelerate":
            assert line["equal"] is True
            assert line["seconds"] > 0
            assert line["peak_driver_bytes"] > 0
            assert line.get("within") in (None, line.get("driver_bytes", 0) <= line["peak_driver_bytes"])
        else:
            assert line["skipped"] == "diffusers copies on streams of cuda and xpu alone"


def _check_host_and_disk(found: dict[str, list[dict[str, Any]]]) -> None:
    assert [line["share"] for line in found["host"]] == list(hosting.SHARES)
    resident, *streamed = found["host"]
    assert resident["streamed_steps"] == 0
    for line in streamed:
        assert line["equal"] is True
        assert line["streamed_steps"] > 0
        added = line["call_processor_us"] - resident["call_processor_us"]
        assert line["call_processor_us_a_streamed_step"] == added / line["streamed_steps"]
    assert [(line["share"], line["cached"]) for line in found["disk"]] == [
        (share, cached) for share in disk.SHARES for cached in (False, True)
    ]
    for line in found["disk"]:
        assert line["equal"] is True
        assert line["misses"] == 0
        assert 0 < line["pinned_bytes"] <= line["host_memory"] == line["weights"] // 2
        assert line["staged_bytes_per_s"] == line["staged_bytes"] / line["seconds"] > 0


def test_a_step_that_fails_is_a_line_and_the_next_goes_on(tmp_path: Path) -> None:
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


def test_a_peer_that_fails_is_a_line_and_the_next_goes_on(
    late: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(module: Any, where: torch.device) -> None:
        raise torch.OutOfMemoryError("rig out of memory.\nTried to allocate 2.00 GiB")

    def absent(module: Any, where: torch.device) -> None:
        raise SkippedError("it is of another device")

    def moved(module: Any, where: torch.device) -> None:
        module.to(where)

    offloads = {"torch, crowded": crowded, "torch, absent": absent, "nowhere": moved, "torch": moved}
    monkeypatch.setattr(peers, "PEERS", offloads)
    lines: list[dict[str, Any]] = []
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


def test_a_step_that_crashes_is_a_line(tmp_path: Path) -> None:
    hidden = hide(tmp_path / "hidden", "import os\nos.abort()", "torch")
    status, lines, said = run([*ON_THE_RIG, "--only", "machine"], hidden)
    assert status == 1
    assert lines[1]["reason"].startswith("it was killed by SIGABRT: ")
    assert "Fatal Python error: Aborted" in said


def test_what_python_prints_before_a_step_is_not_taken_for_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "Welcome to this machine\n3\n{}\n"
    monkeypatch.setenv("PYTHONPATH", hide(tmp_path / "hidden", f"print({said!r}, end='')", "sitecustomize"))
    (line,) = isolation.run("machine", ["--device", "cuda:7"], 60)
    assert (line["step"], line["outcome"]) == ("machine", "failed")
    assert line["reason"].startswith("StreamError: there is no device 'cuda:7' here")
    assert capsys.readouterr().err.startswith(said)


def test_two_streams_are_timed_before_the_host_waits_for_either() -> None:
    done: list[str] = []

    def timed(stream: Any, enqueue: Any) -> Any:
        enqueue()
        done.append(f"the last event of {stream}")
        return lambda: done.append(f"a wait for {stream}") or len(done)

    target: Any = SimpleNamespace(timed=timed)
    first, second = (("copies", lambda: done.append("copies")), ("kernels", lambda: done.append("products")))
    seconds: Any = copying.beside(target, first, second)  # type: ignore[arg-type]
    order = ["products", "the last event of kernels", "copies", "the last event of copies"]
    assert done == [*order, "a wait for kernels", "a wait for copies"]
    assert seconds == (6, 5)


def test_a_step_that_hangs_is_killed_and_says_where_it_was(tmp_path: Path) -> None:
    hidden = hide(tmp_path / "hidden", "import threading\nthreading.Event().wait()", "torch")
    patience = str(5 / STEPS["machine"].seconds)
    status, lines, said = run(["--patience", patience, "--only", "machine"], hidden)
    assert status == 1
    assert lines[1]["reason"] == "it was killed after its 5 s"
    assert "torch.py" in said


def test_without_time_the_last_steps_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--device", "rig", "--minutes", "0", "--only", "llama,peers"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    left = "0 s are left, and it may take {} s: give --continue to a new run"
    assert lines[1:] == [
        {"step": step, "outcome": "failed", "reason": left.format(STEPS[step].seconds)}
        for step in ("llama", "peers")
    ]


def test_limits_fit_two_runs() -> None:
    limits = [step.seconds for step in STEPS.values()]
    assert sum(limits[:7]) <= 260
    assert sum(limits[7:]) <= 260


def test_the_time_of_a_script_before_exec_counts() -> None:
    asked = "from benchmarks.gpu.__main__ import seconds_since_start as age; print(age())"
    command = ["bash", "-c", 'sleep 1; exec "$@"', "run.sh", sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=True)
    assert 1 <= float(done.stdout) < 60


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_run_keeps_its_lines_and_is_continued(tmp_path: Path) -> None:
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
    assert [line["step"] for line in lines] == ["check", *[*STEPS][1:]]
    assert [line["step"] for line in results.read_lines(first)[3:]] == ["check", *[*STEPS][1:]]
    assert "## machine: done\n" in said
    assert "## copies: failed 0 s are left" in said


def test_what_is_missing_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_an_older_torch_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_wrong_arguments_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert words in capsys.readouterr().err


def test_its_help_names_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in STEPS)
    assert "examples:\n" in said


def test_wrong_bits_fail_a_step(late: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the device gives other bytes, and the steps that compare outputs say so."""

    def copy(self: Any, stream: Any, target: torch.Tensor, moves: Any, label: object) -> None:
        inner(self, stream, target, moves, label)
        self.fill(stream, target, moves[-1].target, moves[-1].target + 2, 0)

    inner = AcceleratorDevice.copy
    monkeypatch.setattr(AcceleratorDevice, "copy", copy)
    target = Target("rig", 0.0005, tmp_path)
    for measure in (overlap.measure, bits.measure, passes.run_streams, passes.run_closing, passes.run_graphs):
        lines: list[dict[str, Any]] = []
        with torch.no_grad(), pytest.raises(WrongResultError):
            measure(target, lambda lines=lines, **figures: lines.append(figures))
        assert lines[-1]["equal"] is False


def test_a_decoder_makes_its_angles_where_its_tokens_are(late: None) -> None:
    decoder = make_meta_decoder(Shape(128, 1, 256)).to_empty(device="rig").requires_grad_(False)
    for weight in decoder.parameters():
        weight.fill_(0.01)
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="rig")
    assert decoder(tokens).device == tokens.device
    assert "a pageable copy to the device" not in machine.blocked()
