"""`Applied.save_pretrained`: a model that is not in memory is saved as its library saves it, bit for bit."""

import errno
import gc
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.integrations import apply, load, saved
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from tests.hunt import nightly_but
from tests.integrations import expert_models, models

IDS = torch.tensor([[5, 17, 99, 23, 42]])


def dinov2():
    """Two weights of each layer are one tensor of the files."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Dinov2Config(**sizes, image_size=16, patch_size=8, use_swiglu_ffn=True)
    return models.frozen(Dinov2Model(config))


MADE = {
    "llama": models.llama,
    "tied": lambda: models.llama(tie_word_embeddings=True),
    "stacked experts": models.mixtral,
    "kept in float32": lambda: expert_models.deepseek_v3(torch.bfloat16),
    "encoder and decoder": models.t5,
    "pictures": models.llava,
    "joined weights": dinov2,
}


def tensors_of(folder):
    """The tensors in the files of a folder."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def check_equal(folder, expected):
    got, want = tensors_of(folder), tensors_of(expected)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value), name
    for name in {path.name for path in expected.glob("*config.json")}:
        assert json.loads((folder / name).read_text()) == json.loads((expected / name).read_text())


DOORS = [("apply", name) for name in MADE] + [("load", name) for name in MADE if name != "joined weights"]


SAMPLE = [
    *(("apply", name) for name in ("joined weights", "tied", "stacked experts")),
    *(("load", name) for name in ("llama", "kept in float32", "encoder and decoder")),
]


@pytest.mark.parametrize(("door", "name"), nightly_but(SAMPLE, DOORS))
def test_a_saved_model_is_what_its_library_saves(door, name, tmp_path):
    made = MADE[name]()
    made.save_pretrained(tmp_path / "first")
    reference = models.frozen(type(made).from_pretrained(tmp_path / "first"))
    reference.save_pretrained(tmp_path / "library")
    if door == "load":
        applied = load(tmp_path / "first", "4MB", cache=tmp_path / "cache").penstock_applied
    else:
        applied = apply(models.twin(reference), "4MB", cache=tmp_path / "cache")
    applied.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    check_equal(tmp_path / "saved", tmp_path / "library")
    applied.close()
    again, facts = type(made).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(facts[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    values = again.state_dict()
    assert all(torch.equal(values[name], value) for name, value in reference.state_dict().items())


def applied_llama(tmp_path):
    model = models.llama()
    model.save_pretrained(tmp_path / "first")
    model = load(tmp_path / "first", "1MB", cache=tmp_path / "cache")
    return model, model.penstock_applied


def test_weights_that_were_written_are_saved(tmp_path):
    model, applied = applied_llama(tmp_path)
    model(IDS)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    (tmp_path / "saved").mkdir()
    applied.save_pretrained(str(tmp_path / "saved"))
    got, want = tensors_of(tmp_path / "saved"), tensors_of(tmp_path / "first")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(got.pop(name), want.pop(name) * 2)
    assert all(torch.equal(value, got[name]) for name, value in want.items())
    assert sorted(path.name for path in (tmp_path / "saved").glob("*model*")) == ["model.safetensors"]
    model(IDS)
    applied.close()


def test_a_conversion_is_saved_as_what_it_was_converted_to(tmp_path):
    models.llama().save_pretrained(tmp_path / "first")
    model = load(tmp_path / "first", "1MB", dtype="bfloat16", cache=tmp_path / "cache")
    model.penstock_applied.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, value in tensors_of(tmp_path / "first").items():
        assert torch.equal(tensors_of(tmp_path / "saved")[name], value.bfloat16())
    model.penstock_applied.close()


@pytest.mark.parametrize("of_peft", [True, False])
def test_of_an_adapted_model_the_adapter_is_saved(of_peft, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = models.llama()
    if of_peft:
        model = get_peft_model(model, lora)
    else:
        model.add_adapter(lora, "mine")
    model.save_pretrained(tmp_path / "library")
    applied = apply(model.requires_grad_(False), "230KB", cache=tmp_path / "cache")
    applied.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "again")
    want = tensors_of(tmp_path / "library")
    assert want
    for folder in (tmp_path / "saved", tmp_path / "again"):
        names = sorted(path.name for path in folder.iterdir())
        assert names == sorted(path.name for path in (tmp_path / "library").iterdir())
        got = tensors_of(folder)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], value) for name, value in want.items())


def tensors_in_memory():
    gc.collect()
    return sum(type(value) in (torch.Tensor, nn.Parameter) for value in gc.get_objects())


def test_a_state_is_saved_by_addresses_as_far_as_there_is_room(tmp_path):
    """safetensors asks each tensor where it is, and reads there once it has asked all."""
    model = models.llama(hidden_size=256).bfloat16()
    reference = {name: value.clone() for name, value in model.state_dict().items()}
    for memory, fits in (("60%", False), ("100MB", True)):
        with apply(model, memory, cache=tmp_path / "cache") as applied:
            model(torch.zeros(1, 3, dtype=torch.long))
            applied.idle()
            before, file = tensors_in_memory(), tmp_path / f"{fits}.safetensors"
            if not fits:
                with pytest.raises(StreamError, match=r"for that: save .*any other after restore"):
                    save_file(model.state_dict(), file)
                assert tensors_in_memory() > before
                applied.idle()
                assert tensors_in_memory() == before
                continue
            save_file(model.state_dict(), file)
            saved = load_file(file)
            assert all(torch.equal(saved[name], value) for name, value in reference.items())


def test_nothing_is_overwritten(tmp_path):
    _, applied = applied_llama(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(SourceError, match=r"full is a folder with files in it, which stay"):
        applied.save_pretrained(tmp_path / "full")
    with pytest.raises(SourceError, match=r"notes is a file: choose a folder"):
        applied.save_pretrained(tmp_path / "full" / "notes")
    with pytest.raises(SourceError, match="create it, or choose another output"):
        applied.save_pretrained(tmp_path / "none" / "here")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes"]
    applied.close()


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    _, applied = applied_llama(tmp_path)
    before = sorted(tmp_path.iterdir())
    read, count = saved.value_of, []

    def interrupted(value):
        count.append(value)
        if len(count) == 7:
            raise KeyboardInterrupt
        return read(value)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(saved, "value_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            applied.save_pretrained(tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(SourceError, match="is full"):
            applied.save_pretrained(tmp_path / "saved")
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
        with pytest.raises(SourceError, match=r"is full: packing needs \d+ bytes and 4096 are available"):
            applied.save_pretrained(tmp_path / "saved")
    assert sorted(tmp_path.iterdir()) == before
    applied.save_pretrained(tmp_path / "saved")
    check_equal(tmp_path / "saved", tmp_path / "first")
    applied.close()


_SAVE = """
import sys
from penstock.integrations import load
from tests.resident import peak_above

import transformers.core_model_loading, transformers.modeling_utils
applied = load(sys.argv[1], "20MB", cache=sys.argv[3]).penstock_applied
print(peak_above(lambda: applied.save_pretrained(sys.argv[2])))
"""


def test_one_weight_is_in_memory_at_a_time(tmp_path):
    big = models.llama(hidden_size=1024, intermediate_size=1024, num_hidden_layers=6, vocab_size=1024)
    big.save_pretrained(tmp_path / "first")
    nbytes = sum(value.nbytes for value in big.parameters())
    places = [str(tmp_path / name) for name in ("first", "saved", "cache")]
    done = subprocess.run([sys.executable, "-c", _SAVE, *places], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < nbytes // 4  # 144 MiB; a weight has 4
    check_equal(tmp_path / "saved", tmp_path / "first")


def test_weights_that_a_library_joins_across_layers_are_refused(tmp_path, monkeypatch):
    def joined(_, state):
        return {"all": torch.cat([value.flatten() for value in state.values()])}

    _, applied = applied_llama(tmp_path)
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", joined)
    with pytest.raises(
        PassError, match=r"writes .*\.weight, .* together with weights of other layers: load the"
    ):
        applied.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    applied.close()


def test_what_is_not_saved_says_what_to_do(tmp_path):
    model, applied = applied_llama(tmp_path)
    with pytest.raises(StreamError, match=r"save a model of transformers with save_pretrained\(folder\)"):
        model.save_pretrained(tmp_path / "saved")
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(PassError, match=r"is quantised, and is not saved while it streams: copy its folder"):
        applied.save_pretrained(tmp_path / "saved")
    applied.close()
    with (
        apply(nn.Sequential(nn.Linear(8, 8)), "1MB", cache=tmp_path) as plain,
        pytest.raises(PassError, match=r"no model of transformers.*after restore"),
    ):
        plain.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
