"""Models in the local cache of the hub are used in place, although their files are links to blobs."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

import penstock as library
from penstock.integrations import apply, load
from penstock.runtime.artifact import relink
from penstock.runtime.cache import Cache
from penstock.runtime.dynamo.backend import offload
from penstock.schedule.facts.errors import SourceError
from tests.cli.command_line import penstock_fixture  # noqa: F401
from tests.hunt import nightly_but
from tests.integrations import models
from tests.runtime.test_relink import runs

# peft asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[5, 17, 99, 3]])
ONE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
X = torch.ones(2, 64)
ONES = torch.ones(1, 2, dtype=torch.int64)


class Hub:
    """A cache of models in a folder, as huggingface_hub lays it out."""

    def __init__(self, folder):
        self.folder = folder

    def publish(self, name, saved, commit="a" * 40, ref="main"):
        """Move the files of a folder to blobs, and return the snapshot that links to them."""
        home = self.folder / f"models--{name.replace('/', '--')}"
        snapshot = home / "snapshots" / commit
        (home / "refs").mkdir(parents=True, exist_ok=True)
        (home / "blobs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)
        for file in sorted(path for path in saved.rglob("*") if path.is_file()):
            blob = home / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.move(file, blob)
            link = snapshot / file.relative_to(saved)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        return snapshot

    def state(self):
        found = {path: path.lstat() for path in (self.folder, *self.folder.rglob("*"))}
        return {path: (one.st_ino, one.st_size, one.st_mtime_ns) for path, one in found.items()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache that libraries use offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return Hub(tmp_path / "hub")


def written(tmp_path):
    """The files of weights in penstock's own cache."""
    return list(Cache(tmp_path / "own").weights.glob("*/*"))


def save(tmp_path, seed=0, **options):
    """A model in the folder `saved`."""
    model = models.llama(**ONE)
    torch.manual_seed(seed)
    nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "saved", **options)
    return model


def opened(source, tmp_path, **options):
    return load(source, "1GB", cache=tmp_path / "own", **options)


@pytest.mark.parametrize(("shards", "by"), [("50GB", "snapshot"), ("20KB", "name")])
def test_load_reads_the_files_of_a_snapshot_in_place(hub, tmp_path, shards, by):
    model = save(tmp_path, max_shard_size=shards)
    snapshot = hub.publish("some/model", tmp_path / "saved")
    before = hub.state()
    with opened("some/model" if by == "name" else snapshot, tmp_path) as loaded:
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        files = loaded.penstock_applied.components["LlamaForCausalLM"].weights
    assert sorted(files) == sorted(snapshot.glob("*.safetensors"))
    assert (len(files) > 1) == (shards == "20KB")
    assert not written(tmp_path)
    assert hub.state() == before


@pytest.mark.parametrize("shards", nightly_but(["20KB"], ["50GB", "20KB"]))
def test_apply_finds_the_files_of_a_model_that_was_loaded_by_name(hub, tmp_path, shards):
    save(tmp_path, max_shard_size=shards)
    snapshot = hub.publish("some/model", tmp_path / "saved")
    model = models.frozen(LlamaForCausalLM.from_pretrained("some/model"))
    expected, before = model(IDS).logits, hub.state()
    with apply(model, "1GB", cache=tmp_path / "own") as applied:
        assert torch.equal(model(IDS).logits, expected)
        assert {file.parent for file in applied.components["LlamaForCausalLM"].weights} == {snapshot}
    assert torch.equal(model(IDS).logits, expected)
    assert not written(tmp_path)
    assert hub.state() == before


def test_each_revision_has_its_own_values(hub, tmp_path):
    snapshots, expected = [], []
    for commit, ref in (("a" * 40, "old"), ("b" * 40, "main")):
        expected.append(save(tmp_path, seed=len(snapshots))(IDS).logits)
        snapshots.append(hub.publish("some/model", tmp_path / "saved", commit, ref))
    assert not torch.equal(*expected)
    for source, logits in (("some/model", expected[1]), *zip(snapshots, expected, strict=True)):
        with opened(source, tmp_path) as loaded:
            assert torch.equal(loaded(IDS).logits, logits)
    old = models.frozen(LlamaForCausalLM.from_pretrained("some/model", revision="old"))
    with apply(old, "1GB", cache=tmp_path / "own") as applied:
        assert applied.components["LlamaForCausalLM"].weights == [snapshots[0] / "model.safetensors"]
        assert torch.equal(old(IDS).logits, expected[0])
    assert not written(tmp_path)


def test_a_snapshot_without_the_files_that_no_library_reads_is_a_model(hub, tmp_path):
    """The hub's library calls it incomplete, because it keeps a list of all files of a repository."""
    from huggingface_hub import _tree_cache as trees

    model = save(tmp_path)
    snapshot = hub.publish("some/model", tmp_path / "saved")
    names = [*(path.name for path in snapshot.iterdir()), "README.md", "pytorch_model.bin"]
    entries = {name: trees.TreeCacheEntry(size=1, blob_id="0" * 40) for name in names}
    trees.write_tree_cache(str(snapshot.parent.parent), snapshot.name, entries)
    with opened("some/model", tmp_path) as loaded:
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_converted_model_of_the_hub_is_converted_once(hub, tmp_path):
    save(tmp_path)
    snapshot = hub.publish("some/model", tmp_path / "saved")
    expected = models.frozen(LlamaForCausalLM.from_pretrained("some/model", dtype=torch.bfloat16))(IDS).logits
    before = hub.state()
    for source in ("some/model", snapshot):
        with opened(source, tmp_path, dtype=torch.bfloat16) as loaded:
            assert torch.equal(loaded(IDS).logits, expected)
    assert len({file.parent for file in written(tmp_path)}) == 1
    assert hub.state() == before


@pytest.mark.parametrize("shards", nightly_but(["shards"], ["one file", "shards"]))
def test_a_snapshot_of_torch_files_is_refused_by_their_names_and_converted(hub, tmp_path, penstock, shards):
    model = save(tmp_path)
    (tmp_path / "saved" / "model.safetensors").unlink()
    values = {name: one.contiguous() for name, one in model.state_dict().items()}
    names = dict.fromkeys(values, "pytorch_model.bin")
    if shards == "shards":
        names |= {"lm_head.weight": "pytorch_model-00002-of-00002.bin"}
        names = {name: file.replace("model.bin", "model-00001-of-00002.bin") for name, file in names.items()}
        (tmp_path / "saved" / "pytorch_model.bin.index.json").write_text(
            f'{{"metadata": {{}}, "weight_map": {names}}}'.replace("'", '"')
        )
    for file in set(names.values()):
        torch.save(
            {name: one for name, one in values.items() if names[name] == file}, tmp_path / "saved" / file
        )
    torch.save({}, tmp_path / "saved" / "training_args.bin")
    snapshot = hub.publish("some/model", tmp_path / "saved")
    before = hub.state()
    with pytest.raises(
        SourceError, match=rf"^{snapshot} has its weights in {min(names.values())} and in no "
    ):
        opened("some/model", tmp_path)
    done = penstock("convert", snapshot, "--output", tmp_path / "converted")
    assert done.status == 0, done.err
    shutil.copy(snapshot / "config.json", tmp_path / "converted")
    with opened(tmp_path / "converted", tmp_path) as loaded:
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert hub.state() == before


def test_files_of_a_snapshot_are_called_by_their_own_names(hub, tmp_path, penstock):
    """Given as a folder, an index, a file, or a file whose own name has no suffix either."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    saved, index = tmp_path / "saved", "model.safetensors.index.json"
    for place, name in (("plain", "model.safetensors"), ("bare", "weights")):
        (saved / place).mkdir(parents=True)
        save_file(model.state_dict(), saved / place / name)
    text = str({"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), "model.safetensors")})
    (saved / "plain" / index).write_text(text.replace("'", '"'))
    snapshot = hub.publish("some/model", saved)
    exported = torch.export.export(model, (X,))
    torch.export.save(exported, tmp_path / "model.pt2")
    artifact, before = tmp_path / "a.penstock", hub.state()
    for given in ("plain", f"plain/{index}", "plain/model.safetensors", "bare/weights"):
        weights = ["--weights", snapshot / given, "--no-pack", "--trust", "--force"]
        done = penstock("compile", tmp_path / "model.pt2", artifact, *weights)
        assert done.status == 0, done.err
        program = library.open(artifact)
        assert runs(program, model, X)
        assert torch.equal(library.bind(exported, snapshot / given).module()(X), model(X))
    link = snapshot / given
    assert [file.path for file in program.payload.files] == [str(link)]
    assert hub.state() == before

    blob = link.resolve()
    link.unlink()
    with pytest.raises(SourceError, match=rf"^{link} is missing: .*`penstock relink .* {link.name}`"):
        library.open(artifact)
    shutil.copy(blob, tmp_path / "another")
    link.symlink_to(tmp_path / "another")
    with pytest.raises(SourceError, match=rf"^{link} is not the file that was compiled"):
        library.open(artifact)
    (tmp_path / link.name).symlink_to(blob)
    assert penstock("relink", artifact, tmp_path / link.name).status == 0
    assert [file.path for file in library.open(artifact).payload.files] == [str(tmp_path / link.name)]
    assert runs(library.open(artifact), model, X)


def test_a_path_with_dots_is_a_place_like_any_other(tmp_path, monkeypatch):
    """What is recorded would otherwise leave the artifact's folder, which is refused when it is opened."""
    model = nn.Linear(64, 64)
    for name in ("files", "here", "moved"):
        (tmp_path / name).mkdir()
    save_file(model.state_dict(), tmp_path / "files" / "model.safetensors")
    monkeypatch.chdir(tmp_path / "here")
    exported = torch.export.export(model, (X,))
    file = Path("..", "files", "model.safetensors")
    artifact = library.compile(exported, "a.penstock", weights=file, pack=False).path
    assert runs(library.open(artifact), model, X)
    moved = Path("..", "moved")
    for place, given in ((moved, moved), (file.parent, file)):
        found = next(Path("..").glob("*/model.safetensors"))
        shutil.move(found, place)
        relink(artifact, [given])
        assert runs(library.open(artifact), model, X)


def test_offload_reads_a_snapshot_in_place(hub, tmp_path):
    module = nn.Linear(64, 64)
    (tmp_path / "saved").mkdir()
    save_file(module.state_dict(), tmp_path / "saved" / "model.safetensors")
    snapshot = hub.publish("some/model", tmp_path / "saved")
    record = offload(module, snapshot)
    assert [file.path for file in record.files] == [str(snapshot / "model.safetensors")]


def test_the_components_of_a_pipeline_stay_in_its_snapshot(hub, tmp_path):
    (tmp_path / "vocabulary").mkdir()
    made = models.pipeline(tmp_path / "vocabulary")
    made.save_pretrained(tmp_path / "saved", safe_serialization=True)
    snapshot = hub.publish("some/pipeline", tmp_path / "saved")
    before = hub.state()
    loaded = opened("some/pipeline", tmp_path)
    assert torch.equal(loaded.text_encoder(ONES)[0], made.text_encoder(ONES)[0])
    for name, component in loaded.penstock_applied.components.items():
        assert {file.parent for file in component.weights} == {snapshot / name}
    loaded.penstock_applied.close()
    assert not written(tmp_path)
    assert hub.state() == before


# diffusers gives the hub's library what that warns of.
@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning")
@pytest.mark.parametrize("by", nightly_but(["folder"], ["name", "folder"]))
def test_a_component_that_was_loaded_alone_stays_in_its_folder_of_the_snapshot(hub, tmp_path, by):
    from diffusers import AutoencoderKL

    made = AutoencoderKL(block_out_channels=(16,), latent_channels=4, norm_num_groups=8)
    models.frozen(made).save_pretrained(tmp_path / "saved" / "vae")
    (tmp_path / "saved" / "model_index.json").write_text("{}")
    snapshot = hub.publish("some/pipeline", tmp_path / "saved")
    given = ("some/pipeline", "vae") if by == "name" else (snapshot / "vae", None)
    model = models.frozen(AutoencoderKL.from_pretrained(given[0], subfolder=given[1]))
    with apply(model, "1GB", cache=tmp_path / "own") as applied:
        assert {file.parent for file in applied.components["AutoencoderKL"].weights} == {snapshot / "vae"}
    assert not written(tmp_path)


def test_a_quantised_model_of_the_hub_stays_in_its_snapshot(hub, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    save(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    made = LlamaForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=config)
    made.save_pretrained(tmp_path / "int8", max_shard_size="20KB")
    expected = models.frozen(made)(IDS).logits
    snapshot = hub.publish("some/model", tmp_path / "int8")
    with opened("some/model", tmp_path) as loaded:
        assert torch.equal(loaded(IDS).logits, expected)
        files = loaded.penstock_applied.components["LlamaForCausalLM"].weights
        assert {file.parent for file in files} == {snapshot}
    assert not written(tmp_path)
