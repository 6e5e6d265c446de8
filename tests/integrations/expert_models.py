"""Tiny models with random weights that have stacks of experts, or large tables of embeddings, by family."""

import torch

from tests.integrations.models import frozen

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

TABLES = "experts", "per_layer.weight"
"""What is in the names of the weights that these models are about, each of 1 MiB or more."""


def mixtral(dtype):
    from transformers import MixtralConfig, MixtralForCausalLM

    return _made(MixtralForCausalLM, MixtralConfig, dtype, num_local_experts=16)


def qwen3_moe(dtype):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    options = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    return _made(Qwen3MoeForCausalLM, Qwen3MoeConfig, dtype, **options)


def olmoe(dtype, **options):
    from transformers import OlmoeConfig, OlmoeForCausalLM

    options = {"num_experts": 16, "num_experts_per_tok": 2} | options
    return _made(OlmoeForCausalLM, OlmoeConfig, dtype, **options)


def olmoe_that_gathers(dtype):
    """Its experts are copied for each token that asks for them; files do not keep that it does so."""
    return olmoe(dtype, experts_implementation="batched_mm")


def deepseek_v3(dtype):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    options = {
        **{"moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 4},
        **{"topk_group": 2, "first_k_dense_replace": 0, "q_lora_rank": 32, "kv_lora_rank": 32},
        **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4},
    }
    return _made(DeepseekV3ForCausalLM, DeepseekV3Config, dtype, **options)


def gpt_oss(dtype):
    from transformers import GptOssConfig, GptOssForCausalLM

    options = {"num_local_experts": 16, "num_experts_per_tok": 2, "head_dim": 64}
    model = _made(GptOssForCausalLM, GptOssConfig, dtype, **options)
    for name, value in model.named_parameters():
        if "bias" in name:  # which are zeros
            value.normal_(0, 0.02)
    return model


def qwen3_next(dtype):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    options = {
        **{"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
        **{"linear_value_head_dim": 32, "shared_expert_intermediate_size": 128, "num_hidden_layers": 2},
        **{"layer_types": ["linear_attention", "full_attention"]},
    }
    return _made(Qwen3NextForCausalLM, Qwen3NextConfig, dtype, **options)


def gemma3n(dtype):
    """Its second table of embeddings has a row for each token, of all layers."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    options = {
        **{"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 1024, "head_dim": 64},
        **{"num_hidden_layers": 2, "num_kv_shared_layers": 0, "sliding_window": 32, "laurel_rank": 16},
        **{"layer_types": ["sliding_attention", "full_attention"], "altup_num_inputs": 2},
        "activation_sparsity_pattern": None,
    }
    return _made(Gemma3nForCausalLM, Gemma3nTextConfig, dtype, **options)


def llama4(dtype):
    """It multiplies each token with every expert."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    options = {
        **{"num_local_experts": 16, "intermediate_size_mlp": 256, "head_dim": 64},
        **{"attention_chunk_size": 64, "interleave_moe_layer_step": 1},
    }
    model = _made(Llama4ForCausalLM, Llama4TextConfig, dtype, **options)
    for name, value in model.named_parameters():
        if "experts" in name:  # of which some are zeros
            value.normal_(0, 0.02)
    return model


FAMILIES = {
    one.__name__: one
    for one in (
        *(gpt_oss, deepseek_v3, olmoe, mixtral, qwen3_moe, qwen3_next),
        *(gemma3n, llama4, olmoe_that_gathers),
    )
}


def _made(model, config, dtype, **options):
    torch.manual_seed(0)
    return frozen(model(config(**SIZES | options)).to(dtype))


def table_bytes(model):
    """Bytes of its stacks of experts and large tables."""
    named = [(name, value) for name, value in model.named_parameters() if any(t in name for t in TABLES)]
    return sum(value.nbytes for _, value in named)
