"""The scripts that users start from: each runs, and says what it found."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script as from a shell, and returns what it printed."""

    def run_script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as Inductor is imported
@pytest.mark.usefixtures("compiler")
def test_a_module_runs_under_torch_compile(run):
    torch._dynamo.reset()
    assert "bytes moved in 3 passes" in run("torch_compile.py", "50%")
    torch._dynamo.reset()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's exporter of itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_onnx_model_streams_under_onnxruntime(run):
    printed = run("onnxruntime_host.py")
    assert "10 sessions, 3 passes, equal bit for bit" in printed
    assert "0 misses" in printed


@pytest.mark.timeout(300)
def test_a_model_is_planned_for_hardware_that_is_not_here(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    printed = run("plan_for_other_hardware.py", tmp_path / "config.json", tmp_path / "plan.html")
    assert all(f"{name} within" in printed for name in ("l4", "rtx4090", "h200"))
    assert "<html" in (tmp_path / "plan.html").read_text()


def test_a_pipeline_carries_the_passes(run):
    printed = run("own_pipeline.py")
    assert "['fold_additions_of_zero', 'mark_reads']" in printed
    assert "in the order [0, 1]" in printed


def test_every_example_is_short_and_says_how_to_run_it():
    scripts = sorted(EXAMPLES.glob("[!_]*.py"))
    tests = Path(__file__).read_text()
    for script in scripts:
        text = script.read_text()
        assert f"python examples/{script.name}" in text, script
        assert len(text.splitlines()) <= 90, script
        assert f'"{script.name}"' in tests, script


def test_what_an_example_lacks_is_a_command(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SystemExit, match=r"needs onnxruntime.*: pip install '\.\[onnx\]'"):
        run("onnxruntime_host.py")
