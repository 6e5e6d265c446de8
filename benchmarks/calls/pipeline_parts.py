"""The components of a text-to-image pipeline of Flux.1-dev's sizes, exported with fake weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from benchmarks.zoo.diffusers_models import Decoding, of_diffusers
from penstock.models.preflight import Model
from penstock.passes.activations import activation_bytes

WIDTH, HEADS, TEXT_WIDTH, POOLED, CHANNELS = 3072, 24, 4096, 768, 64
"""The sizes of flux.1-dev."""

TEXT_TOKENS, CLIP_TOKENS, LATENT_CHANNELS = 512, 77, 16


@dataclass(frozen=True)
class Part:
    """A component with its inputs, called `calls` times for each image."""

    name: str
    calls: int
    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]

    def export(self) -> Model:
        """Facts of the component; it is never built."""
        exported = penstock.fake_export(lambda: self.build().bfloat16().eval(), self.inputs)
        return Model(self.name, penstock.annotate(exported), activation_bytes(exported), 0)


class Encoding(nn.Module):
    """A text encoder of transformers: token ids to hidden states."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(tokens, return_dict=True).last_hidden_state
        return hidden


class Pooling(Encoding):
    """A text encoder whose state at the end of the text is wanted."""

    def forward(self, tokens: Tensor) -> Tensor:
        pooled: Tensor = self.encoder(tokens, return_dict=True).pooler_output
        return pooled


class DenoisingStep(nn.Module):
    """One step: [1, image tokens, 64] latents, [1, text tokens, 4096] text, and a time, to latents."""

    def __init__(self, pairs: int) -> None:
        from diffusers import FluxTransformer2DModel

        super().__init__()
        self.transformer: Any = FluxTransformer2DModel(
            num_layers=pairs,
            num_single_layers=2 * pairs,
            attention_head_dim=WIDTH // HEADS,
            num_attention_heads=HEADS,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=POOLED,
            in_channels=CHANNELS,
            guidance_embeds=True,
        )

    def forward(self, latents: Tensor, text: Tensor, pooled: Tensor, time: Tensor) -> Tensor:
        tokens = {"img_ids": latents.shape[1], "txt_ids": text.shape[1]}
        positions = {name: latents.new_zeros(count, 3) for name, count in tokens.items()}
        found: Tensor = self.transformer(
            hidden_states=latents,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=time,
            guidance=torch.full_like(time, 3.5),
            return_dict=False,
            **positions,
        )[0]
        return found


def t5_xxl(layers: int) -> nn.Module:
    """The encoder of google/t5-v1_1-xxl, which has 24 layers."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": TEXT_WIDTH, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "vocab_size": 32128}
    config = T5Config(num_layers=layers, feed_forward_proj="gated-gelu", use_cache=False, **sizes)
    return Encoding(T5EncoderModel(config))


def clip_l(layers: int) -> nn.Module:
    """The text encoder of openai/clip-vit-large-patch14, which has 12 layers."""
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": POOLED, "intermediate_size": 3072, "num_attention_heads": 12}
    config = CLIPTextConfig(num_hidden_layers=layers, max_position_embeddings=CLIP_TOKENS, **sizes)
    return Pooling(CLIPTextModel(config))


def vae() -> nn.Module:
    """The decoder of Flux's autoencoder."""
    build = of_diffusers(
        "AutoencoderKL",
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=LATENT_CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=1024,
    )
    return Decoding(build())


def list_parts(*, steps: int, pixels: int, layers: int | None) -> Iterator[Part]:
    """In the order in which an image needs them; `layers` is the most that a component gets, None all."""

    def least(number: int) -> int:
        return min(number, layers or number)

    def bf16(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    def tokens(count: int) -> tuple[Tensor]:
        return (torch.empty(1, count, dtype=torch.int64, device="meta"),)

    side = pixels // 8
    latents = (
        bf16(1, (side // 2) ** 2, CHANNELS),
        bf16(1, TEXT_TOKENS, TEXT_WIDTH),
        bf16(1, POOLED),
        bf16(1),
    )
    yield Part("CLIP-L text encoder", 1, lambda: clip_l(least(12)), tokens(CLIP_TOKENS))
    yield Part("T5 XXL encoder", 1, lambda: t5_xxl(least(24)), tokens(TEXT_TOKENS))
    yield Part("Flux.1-dev transformer", steps, lambda: DenoisingStep(least(19)), latents)
    yield Part("VAE decoder", 1, vae, (bf16(1, LATENT_CHANNELS, side, side),))
