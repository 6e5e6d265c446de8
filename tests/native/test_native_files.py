"""The weight files that the native engine opens by itself, or is given, and files that change under it."""

import json
import os
import shutil

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.native.library import Options
from penstock.runtime.stream.native import NativeStreamer
from penstock.schedule.facts.errors import SourceError
from tests.engines import ENGINES

X = torch.ones(3, 1024)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).eval()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "m.penstock"
    penstock.compile(torch.export.export(model(), (X,)), path)
    return path


@pytest.fixture
def program(original, tmp_path):
    return penstock.open(shutil.copytree(original, tmp_path / "m.penstock"))


@pytest.fixture(scope="module")
def plan(original, native):
    """A plan for the native engine."""
    return penstock.open(original).plan("60%", arena="contiguous")


def open_alone(program, plan, payload=None):
    """Opens the engine as a program without Python does, which reads the files' stamps itself."""
    text = payload or program.payload.to_bytes()
    streamer = NativeStreamer(program.path, text, plan, Options(readers=1))
    streamer.close()
    streamer.free()


def test_lists_in_lists_in_lists(program, plan):
    """Copying them, or writing them out, would exhaust the stack."""
    deep = b"[" * 10**6 + b"]" * 10**6
    payload = program.payload.to_bytes().replace(b"{", b'{"probes": ' + deep + b", ", 1)
    payload = payload.replace(b'"probes": [],', b"", 1)
    with pytest.raises(
        penstock.PayloadError, match="the payload has lists or objects nested in more than 100"
    ):
        open_alone(program, plan, payload)


def with_other_weights(file):
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:begin] + data[begin:].translate(bytes((k + 1) % 256 for k in range(256))))


def with_another_header(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    names = data[8 : 8 + length].replace(b"weight", b"weigth")
    file.write_bytes(data[:8] + names + data[8 + length :])


def with_a_long_header(file):
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])


def with_a_byte_less(file):
    os.truncate(file, file.stat().st_size - 1)


def test_files_that_were_compiled_are_opened(program, plan):
    open_alone(program, plan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_other_weights, "sha256 of its sampled blocks"),
        (with_another_header, "sha256 of its header"),
        (with_a_long_header, "header"),
        (with_a_byte_less, "size"),
        (os.remove, "cannot be opened"),
    ],
)
def test_other_files_are_refused(program, plan, change, words):
    change(program.path / "weights.safetensors")
    with pytest.raises(SourceError, match=words):
        open_alone(program, plan)


def test_a_block_in_the_middle_is_sampled(program, plan):
    file = program.path / "weights.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little") + 8
    begin = header + json.loads(file.read_bytes()[8:header])["2.weight"]["data_offsets"][0]
    with file.open("r+b") as opened:
        opened.seek(begin + 64)
        opened.write(b"\xff" * 64)
    with pytest.raises(SourceError, match="sampled blocks"):
        open_alone(program, plan)


def test_a_path_outside_the_artifact_is_refused(program, plan):
    payload = program.payload.to_bytes().replace(b'"weights.safetensors"', b'"../weights.safetensors"')
    with pytest.raises(SourceError, match="not inside"):
        open_alone(program, plan, payload)


@pytest.mark.parametrize("arena", ["mapped", "contiguous"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_is_replaced_during_a_load_is_not_read(program, arena, engine, monkeypatch):
    """The files that were compared with their stamps stay open: another of the same name is not opened."""
    file = program.path / "weights.safetensors"
    other = shutil.copyfile(file, file.with_name("other"))
    with_other_weights(other)
    plan = program.plan("60%", arena=arena)
    to_json = type(plan).to_json

    def replaced(self):
        os.replace(other, file)
        return to_json(self)

    monkeypatch.setattr(type(plan), "to_json", replaced)
    with program.load(plan=plan, options=LoadOptions(engine=engine)) as module, torch.no_grad():
        if engine == "python":
            os.replace(other, file)
        for _ in range(2):
            assert torch.equal(module(X), model()(X))
    assert not other.exists()


@pytest.mark.usefixtures("native")
def test_descriptors_that_the_engine_was_given_stay_the_callers(program):
    before = len(os.listdir("/proc/self/fd"))
    with program.load("60%", options=LoadOptions(engine="native")) as module:
        assert len(os.listdir("/proc/self/fd")) > before
        del module
    assert len(os.listdir("/proc/self/fd")) == before
