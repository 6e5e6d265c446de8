"""Binding: a program that was never built runs with a checkpoint's own bytes."""

import json
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock

WIDTH = 64


class Model(nn.Module):
    """Tied ends, a buffer that is computed and one that is stored."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(WIDTH).float().add(1).rsqrt(), persistent=False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, tokens):
        x = self.embed(tokens) * self.steps + self.shift
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


TOKENS = torch.arange(8).reshape(1, 8)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """Two shards and an index, as libraries write them: the tied weight once."""
    folder = tmp_path_factory.mktemp("checkpoint")
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = list(state)
    places = {name: f"model-{1 + (k > 4)}.safetensors" for k, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: state[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def fake(device="cpu"):
    return penstock.fake_export(Model, (TOKENS,), device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("form", ["index", "torch.save", "state_dict in a mapping"])
def test_a_program_for_any_device_runs_with_the_values_of_a_checkpoint(
    model, checkpoint, tmp_path, device, form
):
    files = checkpoint
    if form != "index":
        files = tmp_path / "model.pt"
        state = model.state_dict()
        torch.save(state if form == "torch.save" else {"state_dict": state}, files)
    bound = penstock.bind(fake(device), files)
    program = penstock.compile(bound, tmp_path / "model.penstock")
    with torch.no_grad(), program.load("60%", device="sim:t4") as module:
        assert torch.equal(module(TOKENS), model(TOKENS))
        assert module.stats.bytes_moved > 0


def test_bound_values_are_the_files_own_and_writing_to_them_does_not_reach_it(model, checkpoint):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    bound = penstock.bind(fake(), checkpoint)
    with torch.no_grad():
        assert torch.equal(bound.module()(TOKENS), model(TOKENS))
        bound.state_dict["layers.0.weight"].zero_()
    assert bound.state_dict["head.weight"].data_ptr() == bound.state_dict["embed.weight"].data_ptr()
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    fresh = penstock.bind(fake(), checkpoint)
    assert torch.equal(fresh.state_dict["layers.0.weight"], model.layers[0].weight)


def test_a_fake_program_refers_to_a_checkpoint_in_place(model, checkpoint, tmp_path):
    program = penstock.compile(fake("cuda"), tmp_path / "model.penstock", weights=checkpoint, pack=False)
    size = sum(path.stat().st_size for path in (tmp_path / "model.penstock").glob("*.safetensors"))
    assert size <= 8192  # the computed buffer, in a block of its own
    for device in ("cpu", "sim:h100"):
        with torch.no_grad(), program.load("60%", device=device) as module:
            assert torch.equal(module(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"layers.9.weight": "x"}}, r"rename= has 'layers\.9\.weight', which is no weight"),
        ({"rename": lambda fqn: None}, r"rename= makes None of .*, expected the name of a tensor"),
        ({"rename": ["shift"]}, r"rename= is \['shift'\], expected a table or a function"),
        ({"ignore": ["zzz*"]}, r"ignore= has 'zzz\*', which matches no tensor"),
    ],
)
def test_names_and_patterns_that_match_nothing_are_refused(checkpoint, options, message):
    with pytest.raises(penstock.SourceError, match=message):
        penstock.bind(fake(), checkpoint, **options)


class Code:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("layers.2.bias"),
            r"1 of the program's weights are not in .*: layers\.2\.bias",
        ),
        (lambda state: state.update(extra=torch.zeros(3)), r"1 tensors of .* are no weights of .*: extra; "),
        (
            lambda state: state.update({"shift": torch.zeros(WIDTH + 1)}),
            r"shift is float32 \[64\] in the program and .* is float32 \[65\]",
        ),
        (
            lambda state: state.update({"shift": torch.zeros(WIDTH, dtype=torch.float16)}),
            r"shift is float32 \[64\] in the program and .* is float16 \[64\]",
        ),
    ],
)
def test_what_does_not_belong_to_the_program_is_refused_by_name(model, tmp_path, change, message):
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(penstock.SourceError, match=message):
        penstock.bind(fake(), tmp_path / "model.safetensors")
    if "extra" in state:
        penstock.bind(fake(), tmp_path / "model.safetensors", ignore=["ex*"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Code()}, r"cannot be read without running code in it \(it calls print\): load it"),
        ([torch.zeros(3)], "holds a list, expected a state dict"),
        ({"a": 3}, "holds int 'a' in its state dict, expected tensors"),
        ({"a": torch.zeros(4, 4).t()}, "is not dense, or of the dtype torch.float32"),
    ],
)
def test_files_of_torch_save_that_are_no_state_dicts_are_refused(tmp_path, capfd, content, message):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(penstock.SourceError, match=message):
        penstock.bind(fake(), tmp_path / "model.pt")
    assert "this must not run" not in capfd.readouterr().out


def test_a_file_that_is_cut_short_is_refused(tmp_path, model):
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(penstock.SourceError, match=r"is not a file that torch\.save wrote"):
        penstock.bind(fake(), path)


def pack_again(path, method=zipfile.ZIP_STORED, order="little"):
    """Write the zip as another program than torch lays it out."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records.items():
            own = order.encode() if name.endswith("/byteorder") else data
            new.writestr(name, own, compress_type=method if "/data/" in name else zipfile.ZIP_STORED)


def test_values_that_are_not_where_torch_works_them_out_to_be_are_refused(tmp_path, model):
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        torch.save(model.state_dict(), tmp_path / "model.pt")
        pack_again(tmp_path / "model.pt", method)
        torch.load(tmp_path / "model.pt")
        with pytest.raises(penstock.SourceError, match=r"model\.pt is not where torch\.save puts it"):
            penstock.bind(fake(), tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    pack_again(tmp_path / "model.pt", order="big")
    with pytest.raises(penstock.SourceError, match="big-endian"):
        penstock.bind(fake(), tmp_path / "model.pt")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_floating_point_tensors_are_cast_where_that_is_asked(tmp_path, stored):
    torch.manual_seed(1)
    reference = Model().eval()
    state = {name: value.to(stored) for name, value in reference.state_dict().items()}
    state["head.weight"] = state["embed.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    reference.load_state_dict(state)  # converts as torch does
    with pytest.raises(penstock.SourceError, match=r"is float32 .* is \w*float.*cast it \(cast=True\)"):
        penstock.bind(fake(), tmp_path / "model.safetensors")
    bound = penstock.bind(fake(), tmp_path / "model.safetensors", cast=True)
    program = penstock.compile(
        fake(), tmp_path / "a.penstock", weights=tmp_path / "model.safetensors", cast=True
    )
    with torch.no_grad(), program.load("100%") as module:
        assert torch.equal(bound.module()(TOKENS), reference(TOKENS))
        assert torch.equal(module(TOKENS), reference(TOKENS))
    program.verify()


def test_what_cannot_be_cast_is_refused(model, checkpoint, tmp_path):
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state | {"shift": torch.zeros(WIDTH, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(penstock.SourceError, match=r"shift is float32 .* is int64 \[64\]: .* program$"):
        penstock.bind(fake(), tmp_path / "model.safetensors", cast=True)
    for options in ({"weights": checkpoint, "pack": False}, {}):
        with pytest.raises(penstock.PassError, match="cast=True converts"):
            penstock.compile(fake(), tmp_path / "a.penstock", cast=True, **options)


def test_a_tie_is_compared_after_casting(model, tmp_path):
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    state["head.weight"] = state["head.weight"].float()
    save_file(state, tmp_path / "model.safetensors")
    penstock.bind(fake(), tmp_path / "model.safetensors", cast=True)
    state["head.weight"] = state["head.weight"] + 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(penstock.SourceError, match="is tied to another"):
        penstock.bind(fake(), tmp_path / "model.safetensors", cast=True)


class Buffers(nn.Module):
    """One that is a view of a parameter, one that is computed and has two names."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Identity()
        self.register_buffer("rows", self.layer.weight.detach()[2:4], persistent=False)
        self.register_buffer("scale", torch.arange(8).float(), persistent=False)
        self.other.register_buffer("scale", self.scale, persistent=False)

    def forward(self, x):
        return self.layer(x) * self.scale + self.rows.sum() + self.other.scale


@pytest.mark.parametrize("stale", [torch.zeros(8), torch.zeros(8).half(), torch.zeros(3)])
def test_buffers_that_are_not_saved_are_views_of_the_checkpoint_or_computed(tmp_path, stale):
    torch.manual_seed(3)
    model, x, path = Buffers(), torch.ones(1, 8), tmp_path / "model.safetensors"
    save_file(model.state_dict() | {"scale": stale}, path)  # as older libraries wrote them
    exported = penstock.fake_export(Buffers, (x,))
    bound = penstock.bind(exported, path)
    assert bound.constants["scale"].data_ptr() == bound.constants["other.scale"].data_ptr()
    with torch.no_grad():
        assert torch.equal(bound.module()(x), model(x))
        for program, options in ((bound, {}), (exported, {"weights": path})):
            artifact = penstock.compile(program, tmp_path / "a.penstock", force=True, **options)
            with artifact.load("100%") as module:
                assert torch.equal(module(x), model(x))


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    nbytes = 1 << 40
    value = torch.arange(8.0)
    fields = {
        "bias": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        "big": {"dtype": "U8", "shape": [nbytes], "data_offsets": [32, 32 + nbytes]},
    }
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + value.numpy().tobytes())
        file.truncate(8 + len(header) + 32 + nbytes)
    exported = penstock.fake_export(lambda: nn.LayerNorm(8), (torch.zeros(1, 8),))
    bound = penstock.bind(exported, path, rename={"weight": "bias"}, ignore=["big"])
    assert torch.equal(bound.state_dict["weight"], value)
