"""Models of transformers that generate: what they say, token for token, is what they say in memory."""

import pytest
import torch
from transformers import StaticCache

from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError, PenstockError, StreamError
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42], [7, 3, 64, 11, 90]])
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def generated(model, ids=IDS, **options):
    torch.manual_seed(11)
    return model.generate(ids, max_new_tokens=6, return_dict_in_generate=True, output_logits=True, **options)


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "left padded": {"do_sample": False, "attention_mask": LEFT_PADDED},
    "beams": {"num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
}


def two_turns(model):
    """The second one goes on from the cache of the first."""
    first = generated(model, do_sample=False)
    ids = torch.cat([first.sequences, IDS[:, :3]], dim=1)
    options = {"attention_mask": torch.ones_like(ids), "past_key_values": first.past_key_values}
    return generated(model, ids, do_sample=False, **options)


def cropped(model):
    cache = model(IDS).past_key_values
    cache.crop(-2)
    return model(IDS[:, 1:3], past_key_values=cache).logits


def two_fillings(model):
    """More than a static cache has room for."""
    cache = StaticCache(config=model.config, max_cache_len=6)
    model(IDS, past_key_values=cache)
    model(IDS, past_key_values=cache)


def assisted(model, assistant):
    return model.generate(IDS[:1], max_new_tokens=6, do_sample=False, assistant_model=assistant)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A Llama that streams in less than its size, and its twin."""
    model = models.llama(num_hidden_layers=1)
    reference = models.twin(model)
    applied = apply(model, "190KB", cache=tmp_path_factory.mktemp("cache"))
    yield model, reference, applied
    applied.close()


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_tokens_and_logits_are_those_of_the_model_in_memory(streamed, options):
    model, reference, applied = streamed
    got, want = generated(model, **options), generated(reference, **options)
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
    stats = applied.components["LlamaForCausalLM"].stats
    assert stats.bytes_moved > 0
    assert stats.peak_bytes <= stats.budget < 190_000


def test_a_second_turn_goes_on_from_the_cache_of_the_first(streamed):
    got, want = (two_turns(one) for one in streamed[:2])
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_a_cache_that_is_cropped_goes_on_from_there(streamed):
    assert torch.equal(*(cropped(one) for one in streamed[:2]))


def test_past_the_end_of_a_static_cache_is_the_error_of_the_library(streamed):
    model, reference, _ = streamed
    for one in (reference, model):
        with pytest.raises(IndexError, match="index 6 is out of bounds"):
            two_fillings(one)
    assert torch.equal(cropped(model), cropped(reference))  # and what comes then is right


def test_an_assistant_is_verified_by_the_streamed_model(streamed):
    model, reference, _ = streamed
    assert torch.equal(assisted(model, reference), assisted(reference, reference))


def test_saving_is_refused_before_anything_changes(streamed, tmp_path):
    model, reference, _ = streamed
    with pytest.raises(StreamError, match="the LlamaForCausalLM cannot be saved, as its parameters are not"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert torch.equal(model(IDS).logits, reference(IDS).logits)


def test_windows_of_attention_are_kept_when_they_slide(tmp_path):
    model = models.sliding()
    reference = models.twin(model)
    with apply(model, "600KB", cache=tmp_path):
        got, want = generated(model, do_sample=False), generated(reference, do_sample=False)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_an_encoder_and_its_decoder_generate(tmp_path):
    model = models.t5()
    reference = models.twin(model)
    with apply(model, "300KB", cache=tmp_path):
        assert torch.equal(model.generate(IDS, max_new_tokens=4), reference.generate(IDS, max_new_tokens=4))


def test_generate_encodes_pictures_before_it_calls_the_model(tmp_path):
    model = models.llava()
    reference = models.twin(model)
    ids = torch.tensor([[5, 120, 120, 120, 120, 7, 8]])
    given = {"input_ids": ids, "pixel_values": torch.rand(1, 3, 16, 16), "max_new_tokens": 1}
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(model.generate(**given), reference.generate(**given))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch, about what transformers asks of it
def test_flex_attention_gives_what_it_gives_in_memory(tmp_path):
    model = models.llama(num_hidden_layers=1, attn_implementation="flex_attention")
    reference = models.twin(model)
    with apply(model, "150MB", cache=tmp_path):  # the compiler takes most of it
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


# What apply leaves and gives back.


def test_parameters_have_no_memory_until_they_are_restored(tmp_path):
    model = models.llama(num_hidden_layers=1)
    reference = models.twin(model)
    with apply(model, "400KB", cache=tmp_path) as applied:
        assert applied.freed_bytes == sum(p.nbytes for p in reference.parameters())
        assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
        assert (model.device, model.dtype) == (reference.device, reference.dtype)
        assert model.num_parameters() == reference.num_parameters()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    assert model.state_dict().keys() == reference.state_dict().keys()


# What is refused.


def test_a_model_that_accelerate_has_wrapped_is_refused(tmp_path):
    from accelerate import cpu_offload

    model = models.llama(num_hidden_layers=1)
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(PassError, match="wrapped by accelerate: remove its hooks"):
        apply(model, "400KB", cache=tmp_path)


def test_a_model_on_several_devices_is_refused(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(PassError, match="Sequential lies on several devices, cpu, meta: move it to one"):
        apply(model, "400KB", cache=tmp_path)


@pytest.mark.parametrize("options", [{"device": "gpu"}, {"memory": "lots"}])
def test_options_that_are_none_are_refused_before_memory_is_given_back(options, tmp_path):
    model = models.llama(num_hidden_layers=1)
    with pytest.raises(PenstockError, match=repr(*options.values())):
        apply(model, **{"memory": "400KB", "cache": tmp_path} | options)
    model(IDS)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(PassError, match=r"expected a module.* got a dict"):
        apply({}, "1MB", cache=tmp_path)
