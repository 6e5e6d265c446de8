"""A transformer of Flux's shape, as diffusers builds it, of about as many bytes as asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, TEXT_WIDTH, POOLED, CHANNELS = 3072, 24, 4096, 768, 64
"""The sizes of flux.1-dev."""

_DOUBLE = 2 * 12 * WIDTH * WIDTH + 2 * 6 * WIDTH * WIDTH
_SINGLE = 12 * WIDTH * WIDTH + 3 * WIDTH * WIDTH
"""Parameters of a block with two streams, and of one with a single stream, biases left out."""


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


def make_meta_flux(nbytes: int) -> DenoisingStep:
    """Blocks of both kinds, one to two, without memory behind them, in bfloat16."""
    with torch.device("meta"):
        return DenoisingStep(max(1, round(nbytes / 2 / (_DOUBLE + 2 * _SINGLE)))).to(torch.bfloat16).eval()


def make_flux_inputs(tokens: int) -> tuple[Tensor, ...]:
    """Inputs with `tokens` image tokens, and an eighth as many tokens of text."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    text = max(1, tokens // 8)
    return (
        draw(1, tokens, CHANNELS),
        draw(1, text, TEXT_WIDTH),
        draw(1, POOLED),
        torch.tensor([0.5]).bfloat16(),
    )
