"""Masks that hide something, wherever they come from."""

import torch

from penstock.integrations import apply
from tests.integrations import models


def test_a_mask_that_the_model_makes_itself_is_asked_in_each_call(tmp_path):
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Idefics3VisionConfig(**sizes, image_size=16, patch_size=4)
    model = models.frozen(Idefics3VisionTransformer(config))
    reference = models.twin(model)
    pixels = torch.randn(2, 3, 16, 16)
    whole = torch.ones(2, 4, 4, dtype=torch.bool)
    part = whole.clone()
    part[0, :, 2:] = False
    with apply(model, "1MB", cache=tmp_path):
        for patches in (part, whole, part):
            got, want = (one(pixels, patch_attention_mask=patches)[0] for one in (model, reference))
            assert torch.equal(got, want)


def test_a_mask_of_the_encoder_says_nothing_of_the_decoders(tmp_path):
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = BartConfig(vocab_size=128, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64, **sizes)
    model = models.frozen(BartForConditionalGeneration(config))
    reference = models.twin(model)
    ids = torch.arange(2, 82).reshape(2, 40)
    full = torch.ones_like(ids)
    padded = full.clone()
    padded[0, :3] = 0
    with apply(model, "4MB", cache=tmp_path):
        for mask, of_decoder in ((padded, full), (full, padded)):
            given = {"input_ids": ids, "decoder_input_ids": ids, "attention_mask": mask, "use_cache": False}
            got, want = (one(**given, decoder_attention_mask=of_decoder).logits for one in (model, reference))
            assert torch.equal(got, want)
