"""penstock-run, which runs without Python: the same bits at every rung of the ladder, and what it refuses."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock.runtime.files.artifact_files import PAYLOAD, digest_line
from tests.runtime.compiled_models import WIDTH, decoder_arguments, odd_arguments


@pytest.fixture(scope="session")
def laddered(compiled, tmp_path_factory):
    """Copies of the compiled artifacts, with ladders."""
    folder = tmp_path_factory.mktemp("laddered")
    copies = {name: shutil.copytree(one.program.path, folder / name) for name, one in compiled.items()}
    return {name: penstock.open(copy, trust=True).write_ladder() for name, copy in copies.items()}


@pytest.fixture
def inputs(tmp_path):
    path = tmp_path / "inputs.safetensors"
    save_file(dict(zip(("x", "image", "rows"), odd_arguments(), strict=True)), path)
    return path


def test_outputs_are_those_of_plain_aotinductor_at_every_rung(run, compiled, laddered, inputs):
    program, expected = laddered["odd"], compiled["odd"].expected
    assert len(program.payload.plans) > 2
    for plan in program.payload.plans:
        asked = ["--budget", plan.budget + 1, "--input", inputs, "--output", "out.safetensors", "--force"]
        done = run(program.path, *asked, "--passes", 3, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        facts = json.loads(done.stdout)
        assert facts["plan_budget"] == plan.budget
        assert facts["peak_bytes"] <= plan.budget
        assert facts["misses"] == 0
        assert len(facts["pass_seconds"]) == 3
        assert (facts["bytes_moved"] > 0) == (plan.streamed_bytes > 0)
        found = load_file(inputs.with_name("out.safetensors"))
        assert found.keys() == expected.keys() == facts["outputs"].keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("method", "length"), [("prefill", 5), ("decode", 1)])
def test_each_method_of_several_runs(run, laddered, tmp_path, method, length):
    tokens, positions = decoder_arguments(length)
    save_file({"tokens": tokens, "positions": positions}, tmp_path / "in.safetensors")
    arguments = ["--method", method, "--input", "in.safetensors", "--output", "out.safetensors"]
    done = run(laddered["decoder"].path, "--budget", "60%", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "output output: float32" in done.stdout
    fresh = laddered["decoder"].load("60%")  # whose caches are as empty as the program's
    with fresh, torch.inference_mode():
        expected = fresh.call(method, tokens, positions)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["output"], expected)


def test_what_a_killed_run_left_beside_the_output_goes_and_what_is_being_written_stays(
    run, laddered, inputs, tmp_path
):
    names = (".out.tmp-00000001", ".out.tmp-00000002", ".other.tmp-00000001", ".out.tmp-notes", ".out.tmp-1")
    stale, live, *others = (tmp_path / name for name in names)
    for path in (stale, live, *others):
        path.touch()
    with live.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = run(laddered["odd"].path, "--budget", "60%", "--input", inputs, "--output", "out")
        assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir() if "tmp-" in path.name} == {*names[1:]}


def test_machine_code_runs_for_whoever_trusts_it_alone(run, laddered):
    done = run(laddered["decoder"].path, "--budget", "60%", trust=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "holds machine code, which runs with your rights: give --trust" in done.stderr


def test_it_is_linked_to_no_python(runner):
    linked = subprocess.run(["readelf", "-d", runner], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in linked
    assert "libpython" not in linked
    assert "libtorch_python" not in linked


@pytest.mark.parametrize(
    "case",
    [
        (["--budget", "100"], 2, "the budget of 100 bytes is below the lowest plan of"),
        (["--budget", "much"], 2, "the budget 'much' is not a size"),
        (["--budget", "0.5"], 2, "is not a size"),
        ([], 2, "give an artifact and --budget"),
        (["--budget"], 2, "--budget needs a value"),
        (["--budget", "50%", "--passes", "0"], 2, "--passes 0 is not a number above 0"),
        (["--budget", "50%", "--fast"], 2, "there is no option --fast"),
        (["--budget", "50%", "--method", "decode"], 2, "there is no method 'decode': choose one of forward"),
        (["--budget", "50%"], 2, "the inputs lack the tensor x"),
        (["--budget", "50%", "--input", "none.safetensors"], 4, "could not be opened"),
        (
            ["--budget", "50%", "--input", "long.safetensors"],
            2,
            "x.shape[0]: expected 5, a static size, got 6",
        ),
        (["--budget", "50%", "--input", "flat.safetensors"], 2, "input x: expected 2 dimensions, got 1"),
        (["--budget", "50%", "--input", "double.safetensors"], 2, "input x: expected float32, got float64"),
        (["--budget", "50%", "--input", "more.safetensors"], 2, "must be x, image, rows and nothing else"),
        (["--budget", "50%", "--input", "cut.safetensors"], 4, "lies outside of it"),
        (["--budget", "50%", "--output", "inputs.safetensors"], 4, "inputs.safetensors exists"),
    ],
)
def test_wrong_options_and_inputs_are_one_sentence(run, laddered, inputs, tmp_path, case):
    arguments, status, words = case
    given = load_file(inputs)
    for name, x in {
        "long": torch.zeros(6, WIDTH),
        "flat": torch.zeros(5),
        "double": given["x"].double(),
    }.items():
        save_file({**given, "x": x}, tmp_path / f"{name}.safetensors")
    save_file({**given, "y": given["x"].clone()}, tmp_path / "more.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(inputs.read_bytes()[:-8])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run(laddered["odd"].path, *arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert (done.stderr.count("\n"), done.stdout) == (1, "")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _make_sparse(payload):
    """Says of what the first step of every trace reads that units of it may do."""
    parts = [part for weight in payload["weights"] for part in weight["parts"]]
    for trace in (*payload["traces"], *(trace for plan in payload["plans"] for trace in plan["traces"])):
        step = trace["steps"][0]
        part = next(part for part in parts if part["storage"] == step["reads"][0])
        step["sparse"] = [{"view": part, "operator": "aten.embedding.default", "route": 0, "asked": 1}]


def damaged(folder, change):
    """Changes one file of an artifact; `payload` and `plan` have a right hash afterwards."""
    path, program, weights = folder / PAYLOAD, folder / "program.zip", folder / "weights.safetensors"
    payload = json.loads(path.read_bytes())
    if change == "digest":
        path.write_bytes(path.read_bytes().replace(b'"penstock"', b'"pentsock"'))
        return
    if change == "program":
        program.write_bytes(program.read_bytes().replace(b"outputs", b"stuptuo"))
    elif change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif change == "weights":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))
    elif change == "plan":
        for plan in payload["plans"]:
            plan["addresses"] = [1 << 40 for _ in plan["addresses"]]
            plan["arena"]["layout"] = [1 << 40 for _ in plan["arena"]["layout"]]
    elif change == "sparse":
        _make_sparse(payload)
    else:
        payload |= {
            "version": {"version": 99},
            "torch": {"torch": "2.0.0"},
            "rungs": {"plans": []},
            "lowering": {"lowering": "eager"},
            "machine": {"program": {**payload["program"], "machine": "cpu linux x86_64 AMX_TILE AVX1024"}},
        }[change]
    data = json.dumps(payload).encode()
    path.write_bytes(data)
    (folder / f"{PAYLOAD}.sha256").write_bytes(digest_line(data))


@pytest.mark.parametrize(
    "case",
    [
        ("digest", 3, "is not what was written: its sha256 differs"),
        ("version", 3, "has version 99, and this program reads version"),
        ("torch", 3, "was compiled by torch 2.0.0, and this is torch"),
        ("machine", 3, "for a processor with"),
        ("program", 3, "is not the one compiled"),
        ("truncated", 4, "is not the file that was compiled"),
        ("weights", 4, "is not the file that was compiled"),
        ("plan", 3, "no room in the arena"),
        ("rungs", 2, "has no plans, and there is no planner here: compile it with --ladder"),
        ("lowering", 2, "compile it with --lowering inductor"),
    ],
)
def test_a_damaged_artifact_is_refused_before_it_runs(run, laddered, inputs, tmp_path, case):
    change, status, words = case
    folder = shutil.copytree(laddered["odd"].path, tmp_path / "damaged")
    damaged(folder, change)
    done = run(folder, "--budget", "50%", "--input", inputs, "--output", "out.safetensors")
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out.safetensors").exists()


def test_reads_that_could_be_by_units_are_whole(run, compiled, laddered, inputs, tmp_path):
    folder = shutil.copytree(laddered["odd"].path, tmp_path / "sparse")
    damaged(folder, "sparse")
    done = run(folder, "--budget", "50%", "--input", inputs, "--output", "out.safetensors")
    assert (done.returncode, done.stderr) == (0, "")
    found, expected = load_file(tmp_path / "out.safetensors"), compiled["odd"].expected
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_interrupt_ends_it_and_leaves_nothing_behind(runner, laddered, inputs, tmp_path):
    command = [
        runner,
        laddered["odd"].path,
        "--trust",
        "--budget",
        "60%",
        "--input",
        inputs,
        "--passes",
        "999999",
    ]
    environment = {"PATH": os.defpath, "TMPDIR": str(tmp_path)}
    before = set(tmp_path.iterdir())
    running = subprocess.Popen(
        [*command, "--output", tmp_path / "out.safetensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    while set(tmp_path.iterdir()) == before and running.poll() is None:
        time.sleep(0.01)  # torch's libraries are loaded first, in seconds where it is built for CUDA
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (130, "", "")
    assert set(tmp_path.iterdir()) == before


def test_help_and_version_of_the_options_need_no_artifact(run):
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Exit status: 0 on success" in done.stdout
