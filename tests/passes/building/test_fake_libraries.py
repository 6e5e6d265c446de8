"""Models of transformers and diffusers, exported for a GPU on a torch that may have none."""

import pytest
import torch

import penstock
from tests.hunt import nightly_but

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
IDS = torch.zeros(1, 8, dtype=torch.int64)


def decoder(name, **options):
    import transformers

    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    return lambda: model(config(**TINY, **options)), {"input_ids": IDS, "use_cache": False}


def qwen3_moe():
    return decoder("Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def gpt_oss():
    return decoder("GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False}
    return lambda: T5ForConditionalGeneration(config), inputs


def vit():
    from transformers import ViTConfig, ViTModel

    sizes = {name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = ViTConfig(**sizes, num_attention_heads=4, image_size=32, patch_size=8)
    return lambda: ViTModel(config), {"pixel_values": torch.zeros(1, 3, 32, 32)}


def flux():
    from diffusers import FluxTransformer2DModel

    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "in_channels": 8}
    inputs = {
        "hidden_states": torch.randn(1, 16, 8),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 16),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.tensor([3.5]),
        "return_dict": False,
    }
    return lambda: FluxTransformer2DModel(
        num_layers=1,
        num_single_layers=1,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
        **sizes,
    ), inputs


@pytest.mark.parametrize("make", nightly_but({qwen3_moe, flux}, (qwen3_moe, gpt_oss, t5, vit, flux)))
@pytest.mark.filterwarnings("ignore")
def test_models_of_libraries_are_exported_for_a_gpu(make):
    build, inputs = make()
    exported = penstock.fake_export(build, inputs, "cuda")
    values = [node.meta.get("val") for node in exported.graph.nodes]
    assert {str(value.device) for value in values if isinstance(value, torch.Tensor)} == {"cuda:0"}
    payload = penstock.annotate(exported)
    with torch.device("meta"):
        expected = {name: p.nbytes for name, p in build().named_parameters(remove_duplicate=False)}
    weights = [weight for weight in payload.weights if weight.role == "parameter"]
    assert {one.fqn: payload.storages[one.parts[0].storage].nbytes for one in weights} == expected
