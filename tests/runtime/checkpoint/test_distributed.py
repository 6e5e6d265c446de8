"""Checkpoints of torch.distributed: their chunks become the tensors, and no code of their files runs."""

import copy
import os
import pickle
import resource
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import penstock
from penstock.runtime.checkpoint.convert import convert
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import Reading, read_runs


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.second(self.first(x).relu())


X = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mlp().eval()


def save(state, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process only
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    return folder


def save_chunks(state, cuts, folder):
    """As several ranks write it: a file for each chunk, what `cuts` does not name in one."""
    folder.mkdir()
    tensors, places = {}, {}
    for name, value in state.items():
        chunks = cuts.get(name, [((0,) * value.dim(), tuple(value.shape))])
        for number, (offsets, sizes) in enumerate(chunks):
            index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            file = folder / f"__{number}_{name}.distcp"
            with file.open("wb") as opened:
                opened.write(b"\0" * 7)  # ranges begin anywhere
                torch.save(value[index].clone(), opened)
            info = _StorageInfo(file.name, 7, file.stat().st_size - 7)
            places[MetadataIndex(name, offsets, number)] = info
        tensors[name] = TensorStorageMetadata(
            TensorProperties(value.dtype),
            value.shape,
            [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
        )
    write_metadata(folder, Metadata(tensors, {}, places))
    return folder


def write_metadata(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


ROWS = {"first.weight": [((0, 0), (20, 32)), ((20, 0), (44, 32))]}
COLUMNS = {"second.weight": [((0, 40), (32, 24)), ((0, 0), (32, 40))]}
GRID = {"first.weight": [((0, 0), (20, 10)), ((0, 10), (20, 22)), ((20, 0), (44, 30)), ((20, 30), (44, 2))]}


@pytest.mark.parametrize("cuts", [{}, ROWS, COLUMNS, GRID, ROWS | COLUMNS])
def test_bind_compile_and_convert_assemble_the_chunks(model, tmp_path, cuts):
    folder = save_chunks(model.state_dict(), cuts, tmp_path / "checkpoint")
    bound = penstock.bind(penstock.fake_export(Mlp, (X,)), folder)
    program = penstock.compile(penstock.fake_export(Mlp, (X,)), tmp_path / "a.penstock", weights=folder)
    with torch.no_grad(), program.load("100%") as module:
        assert torch.equal(bound.module()(X), model(X))
        assert torch.equal(module(X), model(X))
    convert(folder, tmp_path / "new.safetensors")
    found = load_file(tmp_path / "new.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("form", SerializationFormat)
def test_what_torch_writes_with_names_that_are_nested(model, tmp_path, form):
    state = {"model": model.state_dict(), "optim": [torch.ones(2)], "one": torch.tensor(3)}
    state |= {"step": 7} if form is SerializationFormat.TORCH_SAVE else {}
    folder = save(state, tmp_path / "checkpoint", serialization_format=form)
    exported = penstock.fake_export(Mlp, (X,))
    bound = penstock.bind(exported, folder, rename=lambda fqn: f"model.{fqn}", ignore=["optim*", "one"])
    with torch.no_grad():
        assert torch.equal(bound.module()(X), model(X))
    with pytest.raises(penstock.SourceError, match=r"2 tensors of .*\.metadata are no weights .*optim"):
        penstock.bind(exported, folder, rename=lambda fqn: f"model.{fqn}")
    with pytest.raises(penstock.SourceError, match=r"3 of .* are not in .*rename="):
        penstock.bind(exported, folder)


def test_in_place_is_refused_with_what_to_do(model, tmp_path):
    folder = save_chunks(model.state_dict(), ROWS, tmp_path / "checkpoint")
    exported = penstock.fake_export(Mlp, (X,))
    with pytest.raises(penstock.SourceError, match=r"distcp is no safetensors file.*penstock convert"):
        penstock.compile(exported, tmp_path / "a.penstock", weights=folder, pack=False)


def test_any_region_is_read_by_its_own_bytes_only(tmp_path, monkeypatch):
    value = torch.arange(6 * 7 * 5).reshape(6, 7, 5).to(torch.int32)
    cuts = {"a": [((0, 0, 0), (6, 3, 5)), ((0, 3, 0), (2, 4, 5)), ((2, 3, 0), (4, 4, 5))]}
    checkpoint = open_checkpoint(save_chunks({"a": value}, cuts, tmp_path / "checkpoint"))
    for region in [((0, 6), (0, 7), (0, 5)), ((1, 5), (2, 6), (0, 5)), ((0, 6), (0, 7), (1, 2))]:
        reading = Reading(checkpoint.tensors["a"], region)
        runs = list(reading.runs())
        assert sum(nbytes for _, _, nbytes in runs) == reading.nbytes
        data = b"".join(bytes(chunk) for chunk in reading.chunks(checkpoint.files))
        expected = value[tuple(slice(*one) for one in region)].contiguous()
        assert data == expected.numpy().tobytes()


class Code:
    def __reduce__(self):
        return (os.system, ("echo this must not run",))


class Dotted:
    """Reaches through an admitted class to what it is made of."""

    def __reduce__(self):
        return (getattr, (torch.Size, "__init__"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Code(), r"it names (posix|nt)\.system"),
        ({"a": Code()}, r"it names (posix|nt)\.system"),
        (Dotted(), r"it names builtins\.getattr"),
        (Metadata({"a": nn.Linear}), r"it names torch\.nn\.modules\.linear\.Linear"),
        (torch.Size([3]), r"\.metadata is not part of a checkpoint that can be trusted: it cannot be read"),
        (Metadata({}, {}, {}), "holds no tensors"),
    ],
)
def test_metadata_is_data(tmp_path, capfd, content, message):
    write_metadata(tmp_path, content)
    with pytest.raises(penstock.SourceError, match=message):
        open_checkpoint(tmp_path)
    assert "this must not run" not in capfd.readouterr().out


def first_info(metadata):
    return next((k, v) for k, v in metadata.storage_data.items() if k.fqn == "first.weight")


def forget(metadata):
    del metadata.storage_data[first_info(metadata)[0]]


def info_change(**values):
    return lambda metadata: first_info(metadata)[1].__dict__.update(values)


def chunk_change(number, **values):
    def change(metadata):
        metadata.state_dict_metadata["first.weight"].chunks[number].__dict__.update(values)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (info_change(relative_path="../secret"), r"names '\.\./secret', which is outside its folder"),
        (info_change(relative_path="/etc/passwd"), "which is outside its folder"),
        (
            info_change(relative_path="gone.distcp"),
            r"gone\.distcp, which holds .*'first\.weight', is missing",
        ),
        (info_change(offset=1 << 40), "has been truncated"),
        (info_change(length=-1), "no size of a tensor"),
        (info_change(transform_descriptors=["zstd"]), r"stored as \['zstd'\]"),
        (forget, r"does not say where the chunk of tensor 'first\.weight' at \[0, 0\] is"),
        (chunk_change(1, sizes=torch.Size([43, 32])), r"tensor 'first\.weight' leave a hole"),
        (chunk_change(0, sizes=torch.Size([21, 32])), r"'first\.weight' at \[0, 0\] and \[20, 0\] overlap"),
        (chunk_change(1, sizes=torch.Size([45, 32])), r"of shape \[64, 32\] has a chunk of \[45, 32\]"),
        (chunk_change(1, sizes=torch.Size([44])), r"of shape \[64, 32\] has a chunk of \[44\]"),
        (
            lambda m: m.state_dict_metadata["first.weight"].properties.__dict__.update(dtype=torch.int32),
            r"at \[0, 0\] is F32 \[20, 32\] where I32 \[20, 32\] was expected",
        ),
        (
            lambda m: m.state_dict_metadata["first.weight"].properties.__dict__.update(
                dtype=torch.complex128
            ),
            r"it names torch\.complex128",
        ),
    ],
)
def test_metadata_that_lies_is_refused_by_name(model, tmp_path, change, message):
    folder = save_chunks(model.state_dict(), ROWS, tmp_path / "checkpoint")
    (tmp_path / "secret").write_bytes(b"secret")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    changed = copy.deepcopy(metadata)
    change(changed)
    write_metadata(folder, changed)
    with pytest.raises(penstock.SourceError, match=message):
        open_checkpoint(folder)


def test_files_that_are_cut_short_or_hold_code_are_refused(model, tmp_path, capfd):
    folder = save_chunks(model.state_dict(), ROWS, tmp_path / "checkpoint")
    file = folder / "__1_first.weight.distcp"
    intact = file.read_bytes()
    file.write_bytes(intact[:-1])
    with pytest.raises(penstock.SourceError, match=r"__1_first\.weight\.distcp .*truncated"):
        open_checkpoint(folder)
    file.write_bytes(bytes(len(intact)))
    with pytest.raises(penstock.SourceError, match=r"__1_first\.weight\.distcp is not a safetensors file"):
        open_checkpoint(folder)
    with file.open("wb") as opened:
        opened.write(bytes(7))
        torch.save(Code(), opened)
        opened.write(bytes(len(intact)))
    with pytest.raises(penstock.SourceError, match=r"__1_first\.weight\.distcp cannot be read without"):
        open_checkpoint(folder)
    assert "this must not run" not in capfd.readouterr().out


def test_two_formats_in_one_folder_are_refused(model, tmp_path):
    folder = save_chunks(model.state_dict(), {}, tmp_path / "checkpoint")
    save_file(model.state_dict(), folder / "model.safetensors")
    with pytest.raises(penstock.SourceError, match=r"holds \.metadata and safetensors files"):
        penstock.bind(penstock.fake_export(Mlp, (X,)), folder)


def test_chunks_of_more_ranks_than_files_may_be_open(tmp_path):
    names = [tmp_path / str(number) for number in range(200)]
    for number, name in enumerate(names):
        name.write_bytes(bytes([number]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    try:
        runs = ((number, 0, 1) for number in [*range(200), *range(200)])
        assert b"".join(read_runs(runs, names)) == bytes(range(200)) * 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
