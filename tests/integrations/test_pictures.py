"""Models that take pictures: equal to the bit, whatever the sizes."""

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from tests.integrations import models, picture_models


def answered(model, given):
    """Three tokens and their logits."""
    made = model.generate(
        **{name: value.clone() for name, value in given.items()},
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat([made.sequences.flatten().float(), *(one.flatten() for one in made.logits)])


MODELS = {
    "InternVL": picture_models.internvl,
    "SmolVLM": picture_models.smolvlm,
    "Gemma 3": picture_models.gemma3,
    "Qwen2-VL": picture_models.qwen2vl,
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_says_of_a_picture_is_what_it_says_in_memory(name, tmp_path):
    model, given = MODELS[name]()
    reference = models.twin(model)
    with apply(model, "1MB", cache=tmp_path):
        assert torch.equal(answered(model, given), answered(reference, given))
        assert torch.equal(answered(model, given), answered(reference, given))


def test_pictures_of_other_sizes_are_seen_as_in_memory(tmp_path):
    model, wide = picture_models.qwen2vl(4, 16)
    _, square = picture_models.qwen2vl(8, 8)  # as many patches
    assert wide["pixel_values"].shape == square["pixel_values"].shape
    reference = models.twin(model)
    with apply(model, "1MB", cache=tmp_path):
        for given in (wide, square, wide):
            seen = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
            want = reference.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
            assert all(
                torch.equal(*pair) for pair in zip(seen.pooler_output, want.pooler_output, strict=True)
            )


def test_what_a_model_remembers_of_another_call_is_as_in_memory(tmp_path):
    model, given = picture_models.qwen2vl()
    reference, ids = models.twin(model), given["input_ids"][:, :3]
    with apply(model, "1MB", cache=tmp_path):
        found = []
        for one in (model, reference):
            options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
            state = one.generate(ids, **options)
            found.append(one(ids[:, :1], past_key_values=state.past_key_values).logits)
        assert torch.equal(*found)
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_a_model_whose_generate_calls_its_parts_streams(tmp_path):
    """This generate reads a parameter of the model itself, between calls of its parts."""
    model, given = picture_models.blip2()
    reference = models.twin(model)
    with apply(model, "1MB", cache=tmp_path):
        for _ in range(2):
            assert torch.equal(answered(model, given), answered(reference, given))
    assert torch.equal(model.query_tokens, reference.query_tokens)


def test_a_model_in_which_values_decide_streams(tmp_path):
    class Decides(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = models.frozen(nn.Sequential(nn.Linear(4, 4), Decides()))
    reference = models.twin(model)
    with apply(model, "1MB", cache=tmp_path):
        for x in (torch.ones(2, 4), -torch.ones(2, 4)):
            assert torch.equal(model(x), reference(x))
