"""Models whose files have other dtypes than their library gives them."""

import gc
import json
import math

import pytest
import torch
from diffusers import AutoencoderKL, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
)

from penstock.integrations import load, weight_files
from penstock.integrations.folders import open_model
from penstock.integrations.weight_files import keep_converted
from penstock.runtime.cache import Cache, list_entries, prune
from penstock.runtime.checkpoint import stored_tensor
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.schedule.facts.errors import PlanError, SourceError
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 3]])
ONE = {"num_hidden_layers": 1}


@pytest.fixture
def folder(tmp_path):
    """A model in float32, in three shards, by its configuration in bfloat16. Embedding and head are tied."""
    path = tmp_path / "llama"
    models.llama(**ONE, tie_word_embeddings=True).save_pretrained(path, max_shard_size="70KB")
    assert len(list(path.glob("*.safetensors"))) == 3
    return says(path, dtype="bfloat16")


def says(folder, **facts):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    return folder


def opened(folder, tmp_path, **options):
    return load(folder, "2MB", cache=tmp_path / "cache", **options)


def weights(tmp_path):
    """The tensors that were converted, and their files."""
    files = list(Cache(tmp_path / "cache").weights.glob("*/*.safetensors"))
    tensors = {name: one for file in files for name, one in load_file(file).items()}
    return files, {name: one for name, one in tensors.items() if not name.startswith("__penstock")}


def same_values(stored, library):
    """Whether a checkpoint, and what is converted of it, has the library's values in each of its weights."""
    (module, called), cache = stored.make(), Cache(stored.folder.parent / "values")
    where = {}
    names = {}
    for one in keep_converted(module, stored.checkpoint, called, cache, "test"):
        where |= {name: value for file in one.files for name, value in load_file(file).items()}
        names |= one.names
    for name, value in library.state_dict().items():
        found = [where[each].flatten() for each in names.get(name, (name,)) if each in where]
        if found:  # of tied ones one is there
            assert torch.equal(torch.cat(found).view(value.shape), value), name
            assert found[0].dtype == value.dtype, name
    buffers = dict(module.named_buffers())
    for name, value in library.named_buffers():
        assert torch.equal(buffers[name], value), name
        assert buffers[name].dtype == value.dtype, name
    held, made = dict(library.named_parameters()), dict(module.named_parameters())
    assert {name: value.dtype for name, value in made.items()} == {n: v.dtype for n, v in held.items()}


@pytest.mark.parametrize("dtype", [None, "auto", torch.float16, "float16", torch.float32])
def test_logits_are_those_of_the_library_in_the_dtype_that_it_would_take(folder, tmp_path, dtype):
    given = {} if dtype is None else {"dtype": dtype}
    reference = LlamaForCausalLM.from_pretrained(folder, **given)
    model = opened(folder, tmp_path, **given)
    assert model.dtype == reference.dtype == model.config.dtype
    assert torch.equal(model(IDS).logits, models.frozen(reference)(IDS).logits)
    _, stored = weights(tmp_path)
    assert len(stored) == (0 if dtype == torch.float32 else 11)
    model.penstock_applied.close()


@pytest.mark.parametrize("half", ["lm_head.weight", "model.norm.weight"])
def test_where_no_dtype_is_stated_a_model_has_that_of_the_first_name(tmp_path, half):
    folder, file = tmp_path / "llama", tmp_path / "llama/model.safetensors"
    models.llama(**ONE).save_pretrained(folder)
    tensors = load_file(file)
    save_file({name: one.half() if name == half else one for name, one in tensors.items()}, file)
    dtype = LlamaForCausalLM.from_pretrained(says(folder, dtype=None)).dtype
    assert dtype == (torch.float16 if half == min(tensors) else torch.float32)
    model = opened(folder, tmp_path)
    assert model.dtype == dtype
    model.penstock_applied.close()


def test_what_is_converted_is_announced_listed_and_written_once(folder, tmp_path, said):
    opened(folder, tmp_path)(IDS)
    ((file,), stored) = weights(tmp_path)
    nbytes = sum(one.nbytes for one in load_file(file).values())
    told = f"writing {sum(one.nbytes for one in stored.values()):,} bytes of weights of LlamaForCausalLM of "
    assert told + f"{folder}, converted to bfloat16, to {file.parent}" in said()
    (entry,) = (one for one in list_entries(tmp_path / "cache") if one.kind == "weights")
    assert entry.made_for == f"LlamaForCausalLM of {folder}"
    assert entry.nbytes >= nbytes
    before = file.stat()
    model = opened(folder, tmp_path)
    model(IDS)
    assert "writing" not in said()
    assert weights(tmp_path)[0] == [file]
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    kept = {one.kind for one in prune(tmp_path / "cache", before=math.inf).in_use}
    assert kept == {"weights"}
    model.penstock_applied.close()


def test_control_c_in_the_middle_leaves_nothing(folder, tmp_path, monkeypatch):
    cast, calls = stored_tensor._cast, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 5:
            raise KeyboardInterrupt
        yield from cast(*given)

    monkeypatch.setattr(stored_tensor, "_cast", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(folder, tmp_path)
    assert not list(Cache(tmp_path / "cache").weights.iterdir())
    monkeypatch.undo()
    opened(folder, tmp_path)(IDS)


def test_a_damaged_file_in_the_cache_is_converted_again(folder, tmp_path, said):
    expected = opened(folder, tmp_path)(IDS).logits
    gc.collect()  # nobody has the model any more
    (file,) = weights(tmp_path)[0]
    whole = file.read_bytes()
    for damaged in (whole[:-6000] + bytes(3000) + whole[-3000:], whole[:9000]):
        file.write_bytes(damaged)
        model = opened(folder, tmp_path)
        assert f"{file.parent} was damaged, and is written again" in said()
        assert file.read_bytes() == whole
        assert torch.equal(model(IDS).logits, expected)
        file.write_bytes(damaged)
        with pytest.raises(SourceError, match="is damaged, and a model still runs on it: restore or delete"):
            opened(folder, tmp_path)
        del model
        gc.collect()


def test_what_was_converted_is_hashed_only_where_the_system_says_that_it_has_changed(
    folder, tmp_path, said, monkeypatch
):
    opened(folder, tmp_path)
    (file,) = weights(tmp_path)[0]
    before = file.read_bytes()
    file.write_bytes(before)  # the same bytes at another time
    said()
    opened(folder, tmp_path)
    assert "all of its bytes are compared" in said()
    monkeypatch.setattr(weight_files, "file_chunks", None)  # cannot be called
    opened(folder, tmp_path)
    told = said()
    assert "compared" not in told
    assert "writing" not in told
    assert file.read_bytes() == before


def test_room_is_made_for_what_is_converted(folder, tmp_path, monkeypatch):
    opened(folder, tmp_path)
    gc.collect()  # nobody has the model any more
    (old,) = weights(tmp_path)[0]
    total = sum(one.nbytes for one in list_entries(tmp_path / "cache"))
    monkeypatch.setenv("PENSTOCK_CACHE_LIMIT", str(total + 10_000))
    held = opened(folder, tmp_path, dtype="float16")
    assert not old.exists()
    assert sum(one.nbytes for one in list_entries(tmp_path / "cache")) <= total + 10_000
    del held


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_library_keeps_in_float32_stays_where_it_is(tmp_path, dtype):
    models.t5().save_pretrained(tmp_path / "t5")
    reference = models.frozen(T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", dtype=dtype))
    model = opened(tmp_path / "t5", tmp_path, dtype=dtype)
    given = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert torch.equal(model(**given).logits, reference(**given).logits)
    wo = reference.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype
    assert wo == (torch.float32 if dtype == torch.float16 else dtype)
    _, stored = weights(tmp_path)
    assert any(".wo." in name for name in stored) == (dtype == torch.bfloat16)


def test_what_is_in_half_precision_in_the_files_is_put_into_float32_where_the_library_does(tmp_path):
    models.t5().half().save_pretrained(tmp_path / "half")
    reference = models.frozen(T5ForConditionalGeneration.from_pretrained(tmp_path / "half"))
    model = opened(tmp_path / "half", tmp_path)
    given = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert torch.equal(model(**given).logits, models.twin(reference)(**given).logits)
    assert all(".wo." in name and name.endswith(" as float32") for name in weights(tmp_path)[1])


def test_stacked_experts_and_configurations_inside_others_are_converted(tmp_path):
    mixtral, llava = models.mixtral().float(), models.llava()
    mixtral.save_pretrained(tmp_path / "mixtral")
    llava.save_pretrained(tmp_path / "llava")
    for kind, name in ((MixtralForCausalLM, "mixtral"), (LlavaForConditionalGeneration, "llava")):
        for dtype in (torch.bfloat16, torch.float16):
            stored = open_model(tmp_path / name, dtype=str(dtype).removeprefix("torch."))
            same_values(stored, kind.from_pretrained(tmp_path / name, dtype=dtype))


def test_modules_of_diffusers_are_converted_as_diffusers_does(tmp_path):
    torch.manual_seed(0)
    wan = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )
    wan.save_pretrained(tmp_path / "wan")
    reference = WanTransformer3DModel.from_pretrained(tmp_path / "wan", torch_dtype=torch.bfloat16)
    assert {value.dtype for value in reference.parameters()} == {torch.bfloat16, torch.float32}
    same_values(open_model(tmp_path / "wan", dtype="bfloat16"), reference)
    reference.save_pretrained(tmp_path / "mixed")  # as it is, without a dtype, in that of most bytes
    same_values(open_model(tmp_path / "mixed"), reference)


def test_a_pipeline_is_converted_as_a_whole(tmp_path):
    (tmp_path / "vocabulary").mkdir()
    made = models.pipeline(tmp_path / "vocabulary")
    made.save_pretrained(tmp_path / "saved", safe_serialization=True)
    loaded = load(tmp_path / "saved", "5MB", dtype="bfloat16", cache=tmp_path / "cache")
    for name in ("unet", "text_encoder", "vae"):
        assert getattr(loaded, name).dtype == torch.bfloat16
    stored = open_model(tmp_path / "saved" / "vae", dtype="bfloat16")
    reference = AutoencoderKL.from_pretrained(tmp_path / "saved" / "vae", torch_dtype=torch.bfloat16)
    same_values(stored, reference)


def test_buffers_that_a_checkpoint_holds_are_converted_and_others_are_not(tmp_path):
    class WithBuffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(3, dtype=torch.bfloat16))
            self.register_buffer("computed", torch.ones(3, dtype=torch.bfloat16), persistent=False)

    save_file({"kept": torch.full((3,), 1.003), "computed": torch.ones(3)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    _, kept = keep_converted(WithBuffers(), checkpoint, {}, Cache(tmp_path / "cache"), "me")
    assert kept.names == {"kept": ("kept as bfloat16",)}
    assert torch.equal(load_file(kept.files[0])["kept as bfloat16"], torch.full((3,), 1.003).bfloat16())


def test_a_dtype_that_is_none_is_refused(folder):
    with pytest.raises(SourceError, match="no dtype 'float99' for weights: give auto, bfloat16, float16, fl"):
        load(folder, "1MB", dtype="float99")
    with pytest.raises(SourceError, match=r"no dtype torch\.int8"):
        load(folder, "1MB", dtype=torch.int8)


def test_a_device_that_is_none_is_refused_before_anything_is_opened(folder, tmp_path):
    (folder / "config.json").write_text("no JSON")
    with pytest.raises(PlanError, match="there is no hardware 'rtx': give one of"):
        load(folder, "1MB", device="sim:rtx", cache=tmp_path / "cache")


def test_what_is_loaded_closes_at_the_end_of_a_with_block(folder, tmp_path):
    with opened(folder, tmp_path) as model:
        assert isinstance(model, LlamaForCausalLM)
        assert type(model).__name__ == "LlamaForCausalLM"
        expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
        assert model.penstock_applied.components["LlamaForCausalLM"].stats is not None
    assert model.penstock_applied.components["LlamaForCausalLM"].stats is None
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False), expected)  # loads again
    model.penstock_applied.close()
