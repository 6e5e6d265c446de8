"""Models of transformers that generate: what they say, token for token, is what they say in memory."""

import pytest
import torch
from transformers import StaticCache

from penstock.integrations import apply
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42], [7, 3, 64, 11, 90]])
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def generated(model, ids=IDS, **options):
    torch.manual_seed(11)
    return model.generate(ids, max_new_tokens=6, return_dict_in_generate=True, output_logits=True, **options)


def all_of(made):
    return [made.sequences, *made.logits]


def two_turns(model, _):
    """The second one goes on from the cache of the first."""
    first = generated(model, do_sample=False)
    ids = torch.cat([first.sequences, IDS[:, :3]], dim=1)
    options = {"attention_mask": torch.ones_like(ids), "past_key_values": first.past_key_values}
    return all_of(generated(model, ids, do_sample=False, **options))


def cropped(model, _):
    cache = model(IDS).past_key_values
    cache.crop(-2)
    return [model(IDS[:, 1:3], past_key_values=cache).logits]


def overflown(model, _):
    """More than a static cache has room for is the error of the library; what comes then is right."""
    cache = StaticCache(config=model.config, max_cache_len=6)
    model(IDS, past_key_values=cache)
    with pytest.raises(IndexError, match="index 6 is out of bounds"):
        model(IDS, past_key_values=cache)
    return cropped(model, _)


def assisted(model, assistant):
    return [model.generate(IDS[:1], max_new_tokens=6, do_sample=False, assistant_model=assistant)]


WAYS = {
    name: lambda model, _, options=options: all_of(generated(model, **options))
    for name, options in {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
        "left padded": {"do_sample": False, "attention_mask": LEFT_PADDED},
        "beams": {"num_beams": 3},
        "static cache": {"do_sample": False, "cache_implementation": "static"},
    }.items()
} | {one.__name__: one for one in (two_turns, cropped, overflown, assisted)}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A Llama that streams in less than its size, and its twin."""
    model = models.llama(num_hidden_layers=1)
    reference = models.twin(model)
    applied = apply(model, "190KB", cache=tmp_path_factory.mktemp("cache"))
    yield model, reference, applied
    applied.close()


@pytest.mark.parametrize("way", WAYS)
def test_it_says_what_it_says_in_memory(streamed, way):
    model, reference, applied = streamed
    got, want = (WAYS[way](one, reference) for one in (model, reference))
    assert all(torch.equal(*both) for both in zip(got, want, strict=True))
    stats = applied.components["LlamaForCausalLM"].stats
    if way not in (cropped.__name__, overflown.__name__):  # larger calls, which run one module at a time
        assert stats.bytes_moved > 0
        assert stats.peak_bytes <= stats.budget < 190_000


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch, about what transformers asks of it
def test_flex_attention_gives_what_it_gives_in_memory(tmp_path):
    model = models.llama(num_hidden_layers=1, attn_implementation="flex_attention")
    reference = models.twin(model)
    with apply(model, "150MB", cache=tmp_path):  # the compiler takes most of it
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


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
