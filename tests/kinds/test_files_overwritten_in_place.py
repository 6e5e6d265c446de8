"""A file that is overwritten in place can get its old size and time back, and never its old ctime.

It is not taken for the file before. A file of which nothing but the ctime has changed is.
"""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

import penstock
from penstock import LoadOptions
from penstock.integrations import apply, load
from penstock.native.library import Options
from penstock.runtime.artifact import relink
from penstock.runtime.cache import Cache
from penstock.runtime.checkpoint import stored_tensor
from penstock.runtime.checkpoint.convert import convert
from penstock.runtime.files.artifact_files import SAMPLE_BYTES, sample_offsets
from penstock.runtime.files.safetensors_file import read_header
from penstock.runtime.stream.native import NativeStreamer
from penstock.schedule.facts.errors import SourceError
from tests.engines import ENGINES
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 3]])
X = torch.ones(2, 1024)
COMPARED = "is not as it was left: all of its weights are compared"

TOUCHES = {
    "rights": lambda file: file.chmod(0o640),
    "another name": lambda file: os.link(file, file.with_suffix(".link")),
    "renamed and back": lambda file: file.rename(file.with_suffix(".old")).rename(file),
}


def with_its_time(file, change):
    """Change a file and put its time back; the system's clock of ctimes goes on in steps of milliseconds."""
    before = file.stat()
    change()
    while True:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        if file.stat().st_ctime_ns != before.st_ctime_ns:
            break
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def overwrite(file, data, offset=0):
    def write():
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(data)

    with_its_time(file, write)


def overwrite_between_samples(file):
    header = read_header(file)
    blocks = range(header.data_start // SAMPLE_BYTES + 1, header.file_nbytes // SAMPLE_BYTES)
    free = next(k for k in blocks if k * SAMPLE_BYTES not in sample_offsets(header))
    overwrite(file, b"\0\0\x80\x3f" * 64, free * SAMPLE_BYTES)


def touch(file, how):
    with_its_time(file, lambda: TOUCHES[how](file))


def kept(cache):
    """The files in a cache that are large, and their inodes: none may be written again, and none may come."""
    files = [file for file in Cache(cache).weights.glob("*/*") if file.suffix != ".json"]
    return {file: file.stat().st_ino for file in files}


# Artifacts that use files in place.


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 512), nn.Linear(512, 1024)] * 2
    return nn.Sequential(*map(models.twin, layers)).requires_grad_(False)


@pytest.fixture
def file(model, tmp_path):
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def artifact(model, file, tmp_path):
    exported = torch.export.export(model, (X,))
    return penstock.compile(exported, tmp_path / "a.penstock", weights=file, pack=False).path


def test_an_artifact_refuses_a_file_of_other_bytes_between_its_samples(artifact, file):
    overwrite_between_samples(file)
    with pytest.raises(
        SourceError, match=rf"^{file} is not the file that was compiled: the sha256 of a weight"
    ):
        penstock.open(artifact)


@pytest.mark.parametrize("how", TOUCHES)
def test_an_artifact_compares_a_touched_file_once_and_stays_what_it_was(artifact, file, model, how, said):
    digest = penstock.open(artifact).digest
    touch(file, how)
    said()
    program = penstock.open(artifact)
    assert f"{file} {COMPARED}" in said()
    with program.load("100%") as module:
        assert torch.equal(module(X), model(X))
    penstock.open(artifact)
    assert COMPARED not in said()
    assert program.digest == digest
    program.verify(strict=True, digest=digest)


def test_an_artifact_that_says_nothing_of_ctimes_compares_its_files_once(artifact, file, said):
    """As one of an older penstock, and one whose file of them is damaged."""
    (seen,) = (
        set(artifact.iterdir())
        - {artifact / name for name in ("payload.json", "program.zip")}
        - {artifact / "payload.json.sha256"}
    )
    for damaged in (b"", b"[1]", b"{", b"\xff", None):
        seen.unlink() if damaged is None else seen.write_bytes(damaged)
        said()
        penstock.open(artifact)
        assert COMPARED in said()
        penstock.open(artifact)
        assert COMPARED not in said()
    overwrite_between_samples(file)
    seen.unlink()
    with pytest.raises(SourceError, match="is not the file that was compiled"):
        penstock.open(artifact)


def test_a_file_that_was_overwritten_before_load_is_refused(artifact, file):
    program = penstock.open(artifact)
    overwrite_between_samples(file)
    with pytest.raises(SourceError, match="is not the file that was compiled"):
        program.load("100%")


@pytest.fixture(params=["in place", "packed"])
def program(request, artifact, model, tmp_path):
    if request.param == "in place":
        return penstock.open(artifact)
    return penstock.compile(torch.export.export(model, (X,)), tmp_path / "packed")


@pytest.mark.parametrize("arena", ["mapped", "contiguous"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_is_overwritten_in_use_ends_the_next_pass(program, model, engine, arena):
    file = program.path / program.payload.files[0].path
    with program.load(plan=program.plan("80%", arena=arena), options=LoadOptions(engine=engine)) as module:
        assert torch.equal(module(X), model(X))
        for how in TOUCHES:
            touch(file, how)
            assert torch.equal(module(X), model(X))
        overwrite_between_samples(file)
        with pytest.raises(SourceError, match=rf"{file} has been changed while in use"):
            module(X)


def test_a_program_without_python_compares_a_touched_file(artifact, file, native):
    program = penstock.open(artifact)
    plan, payload = program.plan("60%", arena="contiguous"), program.payload.to_bytes()

    def opened():
        streamer = NativeStreamer(artifact, payload, plan, Options(readers=1))
        streamer.close()
        streamer.free()

    opened()
    touch(file, "rights")
    opened()
    overwrite_between_samples(file)
    with pytest.raises(
        SourceError, match=rf"^{file} is not the file that was compiled: the sha256 of a weight"
    ):
        opened()


def test_relinking_compares_and_remembers_the_ctime(artifact, file, said):
    touch(file, "rights")
    relink(artifact)
    said()
    penstock.open(artifact)
    assert COMPARED not in said()
    touch(file, "rights")
    penstock.open(artifact)
    assert COMPARED in said()
    overwrite_between_samples(file)
    with pytest.raises(SourceError, match="has changed since it was compiled"):
        relink(artifact)


def read_and(monkeypatch, change):
    """Let a file change once, behind the first piece that is read of it."""
    read, changes = stored_tensor.read_exactly, [change]

    def reading(*arguments):
        found = read(*arguments)
        if changes:
            changes.pop()()
        return found

    monkeypatch.setattr(stored_tensor, "read_exactly", reading)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "distributed"])
@pytest.mark.parametrize("to", ["convert", "compile"])
def test_what_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch, kind, to):
    """A conversion of one half of the old file and one of the new would be neither."""
    old, new = ({f"{k}.weight": torch.full((64, 64), v + k) for k in range(2)} for v in (1.0, 3.0))
    if kind == "distributed":
        for name, state in (("old", old), ("new", new)):
            with pytest.warns(UserWarning, match="torch.distributed"):
                dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / name))
        source, (file,), (other,) = (
            tmp_path / "old",
            *((tmp_path / n).glob("*.distcp") for n in ("old", "new")),
        )
    else:
        suffix = "safetensors" if kind == "safetensors" else "bin"
        for name, state in (("old", old), ("new", new)):
            path = tmp_path / f"{name}.{suffix}"
            save_file(state, path) if kind == "safetensors" else torch.save(state, path)
        source = file = tmp_path / f"old.{suffix}"
        other = tmp_path / f"new.{suffix}"
    data = other.read_bytes()
    assert len(data) == file.stat().st_size
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    exported = torch.export.export(layers, (torch.ones(1, 64),))
    for number, (change, values) in enumerate(
        [(lambda: touch(file, "rights"), old), (lambda: overwrite(file, data), new)]
    ):
        read_and(monkeypatch, change)
        target = tmp_path / f"{number}.safetensors"
        if to == "convert":
            convert(source, target)
            found = {name: stored_values(target, name) for name in values}
            assert all(torch.equal(found[name], values[name]) for name in values)
        else:
            program = penstock.compile(exported, tmp_path / f"{number}.penstock", weights=source)
            layers.load_state_dict(values)
            with program.load("100%") as module, torch.no_grad():
                assert torch.equal(module(torch.ones(1, 64)), layers(torch.ones(1, 64)))
        monkeypatch.undo()


def stored_values(file, name):
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


# Models of libraries.

ONE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}


def save(folder, seed):
    model = models.llama(**ONE)
    torch.manual_seed(seed)
    nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.fixture
def two(tmp_path):
    """The folder of a model, its file, and the bytes of another one's."""
    return tmp_path / "one", save(tmp_path / "one", 1), save(tmp_path / "two", 2).read_bytes()


def logits(folder, cache, **options):
    with load(folder, "1GB", cache=cache, **options) as model:
        return model(IDS).logits


def expected(folder, **options):
    return models.frozen(LlamaForCausalLM.from_pretrained(folder, **options))(IDS).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_load_gives_the_values_of_the_file_as_it_is(two, tmp_path, dtype):
    """Converted into the cache, or used in place by a program that is in the cache."""
    folder, file, data = two
    options = {} if dtype is None else {"dtype": dtype}
    before = expected(folder, **options)
    assert torch.equal(logits(folder, tmp_path / "cache", **options), before)
    overwrite(file, data)
    after = expected(folder, **options)
    assert not torch.equal(before, after)
    for _ in range(2):
        assert torch.equal(logits(folder, tmp_path / "cache", **options), after)
    large = kept(tmp_path / "cache")
    for how in TOUCHES:
        touch(file, how)
        assert torch.equal(logits(folder, tmp_path / "cache", **options), after)
    assert kept(tmp_path / "cache") == large


def test_a_model_that_runs_on_the_old_conversion_does_not_keep_the_new_one_from_being_made(two, tmp_path):
    folder, file, data = two
    options = {"dtype": torch.bfloat16, "cache": tmp_path / "cache"}
    with load(folder, "1GB", **options) as model:
        before = model(IDS).logits
        overwrite(file, data)
        after = expected(folder, dtype=torch.bfloat16)
        assert torch.equal(logits(folder, tmp_path / "cache", dtype=torch.bfloat16), after)
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_touched_file_is_compared_once_and_nothing_is_written(two, tmp_path, dtype, said):
    folder, file, _ = two
    options = {} if dtype is None else {"dtype": dtype}
    wanted = logits(folder, tmp_path / "cache", **options)
    large = kept(tmp_path / "cache")
    said()
    for how in TOUCHES:
        touch(file, how)
        for compared in (True, False):
            assert torch.equal(logits(folder, tmp_path / "cache", **options), wanted)
            log = said()
            assert ("compared" in log) == (compared and dtype is not None)
            assert "writing" not in log
    assert kept(tmp_path / "cache") == large


def test_a_conversion_that_a_file_changes_under_is_made_of_one_file(two, tmp_path, monkeypatch):
    folder, file, data = two
    read_and(monkeypatch, lambda: touch(file, "rights"))
    wanted = expected(folder, dtype=torch.bfloat16)
    assert torch.equal(logits(folder, tmp_path / "cache", dtype=torch.bfloat16), wanted)
    monkeypatch.undo()
    read_and(monkeypatch, lambda: overwrite(file, data))
    with pytest.raises(SourceError, match="was written to while it was being converted"):
        logits(folder, tmp_path / "other", dtype=torch.bfloat16)
    monkeypatch.undo()
    wanted = expected(folder, dtype=torch.bfloat16)
    assert torch.equal(logits(folder, tmp_path / "other", dtype=torch.bfloat16), wanted)


def test_apply_gives_the_values_that_the_model_has(two, tmp_path):
    folder, file, data = two
    for _ in range(2):
        model = models.frozen(LlamaForCausalLM.from_pretrained(folder))
        wanted = model(IDS).logits.clone()
        with apply(model, "1GB", cache=tmp_path / "cache") as applied:
            assert applied.components["LlamaForCausalLM"].weights == [file]
            assert torch.equal(model(IDS).logits, wanted)
        del model
        overwrite(file, data)


def test_apply_refuses_a_file_that_was_overwritten_before_the_first_call(two, tmp_path):
    folder, file, data = two
    copy = shutil.copyfile(file, tmp_path / "copy")
    model = models.frozen(LlamaForCausalLM.from_pretrained(folder))
    wanted = model(IDS).logits.clone()
    with apply(model, "1GB", cache=tmp_path / "cache"):
        overwrite(file, data)
        with pytest.raises(SourceError, match=rf"^{file} has been changed since LlamaForCausalLM was loaded"):
            model(IDS)
        overwrite(file, copy.read_bytes())
        assert torch.equal(model(IDS).logits, wanted)


class Wrapped(nn.Module):
    """As an adapter wraps a layer, whose weight has another name from then on."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer

    def forward(self, x):
        return self.base_layer(x)


def test_a_touched_file_serves_weights_that_have_got_other_names(two, tmp_path):
    folder, file, _ = two
    model = models.frozen(LlamaForCausalLM.from_pretrained(folder))
    wanted = model(IDS).logits.clone()
    with apply(model, "1GB", cache=tmp_path / "cache") as applied:
        model(IDS)
        mlp = model.model.layers[0].mlp
        mlp.up_proj = Wrapped(mlp.up_proj)
        touch(file, "rights")
        applied.idle()
        assert torch.equal(model(IDS).logits, wanted)
        mlp.up_proj = mlp.up_proj.base_layer
    assert torch.equal(model(IDS).logits, wanted)


def test_a_quantised_model_has_the_values_of_its_files_as_they_are(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    files, wanted = [], []
    for seed in (1, 2):
        save(tmp_path / "plain", seed)
        config = TorchAoConfig(
            Int8WeightOnlyConfig(set_inductor_config=False), include_input_output_embeddings=False
        )
        made = LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
        with torch.no_grad():
            made.model.norm.weight.mul_(seed)
        made.save_pretrained(tmp_path / str(seed))
        files.append(tmp_path / str(seed) / "model.safetensors")
        wanted.append(models.frozen(made)(IDS).logits)
    folder, cache = tmp_path / "1", tmp_path / "cache"
    assert torch.equal(logits(folder, cache), wanted[0])
    overwrite(files[0], files[1].read_bytes())
    assert torch.equal(logits(folder, cache), wanted[1])
    large = kept(cache)
    touch(files[0], "rights")
    assert torch.equal(logits(folder, cache), wanted[1])
    assert kept(cache) == large
