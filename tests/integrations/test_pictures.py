"""Models that take pictures, whose sizes cannot all stay open: equal to the bit, whatever is fixed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.integrations.calls import stages
from penstock.schedule.facts.errors import PassError, StreamError
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
    "InternVL": (picture_models.internvl, "sides of pictures are part of the program"),
    "SmolVLM": (picture_models.smolvlm, ""),
    "Gemma 3": (picture_models.gemma3, ""),
    "Qwen2-VL": (picture_models.qwen2vl, "numbers of patches are part of the program"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_says_of_a_picture_is_what_it_says_in_memory(name, tmp_path, said):
    make, fixed = MODELS[name]
    model, given = make()
    reference = models.twin(model)
    with apply(model, "1MB", example=models.nothing, cache=tmp_path):
        assert torch.equal(answered(model, given), answered(reference, given))
        log = said()
        assert fixed in log
        assert fixed or "part of the program" not in log
        assert torch.equal(answered(model, given), answered(reference, given))
        assert "exporting" not in said()


def test_a_picture_of_another_size_is_exported_anew_and_found_in_the_cache(tmp_path, said):
    model, wide = picture_models.qwen2vl(4, 16)
    _, square = picture_models.qwen2vl(8, 8)  # as many patches
    assert wide["pixel_values"].shape == square["pixel_values"].shape
    reference = models.twin(model)
    for exported in (2, 0):  # by apply, then in its cache
        with apply(model, "1MB", example=models.nothing, cache=tmp_path):
            for given in (wide, square, wide):
                seen = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
                want = reference.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
                assert all(
                    torch.equal(*pair) for pair in zip(seen.pooler_output, want.pooler_output, strict=True)
                )
        log = said()
        assert log.count("exporting") == exported
        assert log.count("so numbers of patches are part of the program") == exported // 2


def test_what_a_model_remembers_of_another_call_is_not_read(tmp_path):
    model, given = picture_models.qwen2vl()
    reference, ids = models.twin(model), given["input_ids"][:, :3]
    with apply(model, "1MB", example=models.nothing, cache=tmp_path):
        state = model.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        with pytest.raises(PassError, match=r"reads rope_deltas, which it remembers .* give it position_ids"):
            model(ids[:, :1], past_key_values=state.past_key_values)
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_a_model_whose_generate_calls_its_parts_streams_part_by_part(tmp_path):
    model, given = picture_models.blip2()
    reference = models.twin(model)
    options = {"example": models.nothing, "cache": tmp_path}
    with (
        apply(model, "1MB", **options),
        pytest.raises(StreamError, match=r"own generate does this, apply penstock to the parts"),
    ):
        answered(model, given)
    parts = [model.vision_model, model.qformer, model.language_model]
    with (
        apply(parts[0], "1MB", **options),
        apply(parts[1], "1MB", **options),
        apply(parts[2], "1MB", **options) as language,
    ):
        assert torch.equal(answered(model, given), answered(reference, given))
        (kinds,) = language.prepared.values()
        assert any(text.startswith("model.decoder.embed_tokens.forward") for text in kinds)


class Slow(nn.Module):
    """As slow as its caller likes while it is exported with open sizes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).flatten(1).cumsum(0)


def test_an_export_that_takes_too_long_begins_again_with_fewer_open_sizes(tmp_path, said, monkeypatch):
    monkeypatch.setattr(stages, "LIMIT_S", 0.0)
    torch.manual_seed(0)
    model = models.frozen(Slow())
    reference = models.twin(model)
    with apply(model, "1MB", example=models.nothing, cache=tmp_path):
        for shape in [(2, 3, 4, 4), (2, 3, 4, 4), (3, 3, 4, 4)]:
            assert torch.equal(model(torch.ones(shape)), reference(torch.ones(shape)))
        log = said()
    assert "the export took more than 0 s of processor time: so sides of pictures are part" in log
    assert "so all sizes but those of caches are part of the program" in log
    assert log.count("exporting") == 2
    assert log.count("took more than") == 2  # the second one begins where the first one ended


def test_a_model_that_cannot_be_exported_at_all_says_why(tmp_path):
    class Decides(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = models.frozen(nn.Sequential(nn.Linear(4, 4), Decides()))
    with (
        apply(model, "1MB", example=models.nothing, cache=tmp_path),
        pytest.raises(PassError, match="values decide which way it goes"),
    ):
        model(torch.ones(2, 4))
