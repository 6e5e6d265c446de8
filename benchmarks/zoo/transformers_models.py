"""Models of transformers at tiny sizes, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.entry import Entry, noise

IDS = torch.arange(1, 9)[None]
LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**LAYERS, "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0}
IMAGE = {**LAYERS, "image_size": 32, "patch_size": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def of_transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """The constructor of a class over its configuration."""

    def build() -> nn.Module:
        import transformers

        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return built

    return build


def decoder(name: str, config: str, *, float32: str = "", **options: Any) -> Entry:
    """A causal language model in bfloat16, as they are published; `float32` is a buffer that stays so."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**{**DECODER, **options})
        built: nn.Module = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        for module in built.modules():
            if float32 in module._buffers:
                module.register_buffer(float32, module.get_buffer(float32).float())
        return built

    return Entry(name, build, {"input_ids": IDS, "use_cache": False})


def decoders() -> tuple[Entry, ...]:
    local: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return (
        decoder("Llama", "LlamaConfig"),
        decoder("Qwen3", "Qwen3Config", head_dim=16),
        decoder("Qwen3-MoE", "Qwen3MoeConfig", head_dim=16, num_experts=4, **EXPERTS),
        decoder("Mixtral", "MixtralConfig", **local),
        decoder("GPT-OSS", "GptOssConfig", head_dim=16, **local),
        decoder("Gemma 2", "Gemma2Config", head_dim=16),
        decoder("Gemma 3", "Gemma3TextConfig", head_dim=16),
        deepseek(),
        decoder("Phi-3", "Phi3Config"),
    )


def deepseek() -> Entry:
    """One dense layer and one of experts; from_pretrained leaves the correction of its router in float32."""
    return decoder(
        "DeepSeek-V3",
        "DeepseekV3Config",
        float32="e_score_correction_bias",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        **EXPERTS,
    )


def bert() -> Entry:
    build = of_transformers("BertModel", "BertConfig", **LAYERS, vocab_size=96)
    return Entry("BERT", build, {"input_ids": IDS})


def t5() -> Entry:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    build = of_transformers("T5ForConditionalGeneration", "T5Config", **sizes)
    return Entry("T5", build, {"input_ids": IDS, "decoder_input_ids": IDS, "use_cache": False})


def whisper() -> Entry:
    sizes = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    build = of_transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        d_model=64,
        vocab_size=96,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        **sizes,
        **tokens,
    )
    inputs = {"input_features": noise(1, 8, 32), "decoder_input_ids": IDS, "use_cache": False}
    return Entry("Whisper", build, inputs)


def vit() -> Entry:
    build = of_transformers("ViTModel", "ViTConfig", **IMAGE)
    return Entry("ViT", build, {"pixel_values": noise(1, 3, 32, 32)})


def clip() -> Entry:
    tokens = {"bos_token_id": 0, "eos_token_id": 8, "pad_token_id": 1}
    text = {**LAYERS, "vocab_size": 96, "max_position_embeddings": 16, **tokens}
    build = of_transformers(
        "CLIPModel", "CLIPConfig", text_config=text, vision_config=IMAGE, projection_dim=32
    )
    return Entry("CLIP", build, {"input_ids": IDS, "pixel_values": noise(1, 3, 32, 32)})


def entries() -> tuple[Entry, ...]:
    """All of them, in the order of the table."""
    return (*decoders(), bert(), t5(), whisper(), vit(), clip())
