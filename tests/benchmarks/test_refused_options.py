"""What benchmarks cannot measure is refused before anything is written, in a sentence."""

import pytest

from benchmarks.calls.pipeline import main as pipeline
from benchmarks.disk import depth
from benchmarks.disk.__main__ import application as disk
from benchmarks.experts import __main__ as experts
from benchmarks.experts import mixture, rows
from benchmarks.zoo import __main__ as zoo
from tests.benchmarks.in_process import CliRunner, invoke, words_of

REFUSED = [
    (disk, "--size much", "not a size"),
    (disk, "--models gpt", "'gpt' is none of linears, llama"),
    (disk, "--size 900TiB", "choose a smaller --size"),
    (disk, "--no-pack", "--no-pack takes one of --budgets"),
    (depth.main, "--size 4MiB --budget 100% --tokens 1 --rounds 1", "nothing streams within 100% of 4MiB"),
    (experts.main, "--ways units,magic", "magic: choose among"),
    (experts.main, "--routings always", "always: choose among"),
    (experts.main, "--model huge", "--model huge is none of olmoe"),
    (experts.main, "--layers 7 --routings recorded", "300 tokens of 6 layers with 8 experts each"),
    (experts.main, "--model qwen3-30b --tokens 300", "recorded_routes.py records routes"),
    (experts.main, "--layers 300 --routings zipf", "MiB of memory and there are"),
    (pipeline, "--cap much", "cap 'much' is not a size"),
    (pipeline, "--pixels 100", "100 is not a multiple of 16"),
    (pipeline, "--hardware RTX4090", "did you mean 'rtx4090'"),
    (rows.main, "--ways magic", "--ways takes some of penstock"),
    (rows.main, "--rows 8720 --rounds 2", "no row comes twice"),
    (zoo.main, "--only Elman", "Elman"),
    (zoo.main, "--lowering none", "none"),
]


@pytest.mark.parametrize(("command", "options", "said"), REFUSED)
def test_what_cannot_be_measured_is_refused(command, options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "qwen3-30b" in options:
        monkeypatch.setattr(mixture, "RESULTS", tmp_path)
    words = options.split()
    if command is experts.main:
        words += ["--folder", str(tmp_path)]
    done = CliRunner().invoke(command, words) if command is disk else invoke(command, *words)
    assert done.exit_code == 2
    assert said in words_of(done)
    assert not list(tmp_path.iterdir())
