"""Models of diffusers at tiny sizes, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.entry import Entry, noise


def of_diffusers(model: str, **options: Any) -> Callable[[], nn.Module]:
    """The constructor of a class with its options."""

    def build() -> nn.Module:
        import diffusers

        built: nn.Module = getattr(diffusers, model)(**options)
        return built

    return build


def flux() -> Entry:
    build = of_diffusers(
        "FluxTransformer2DModel",
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        in_channels=8,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    inputs = {
        "hidden_states": noise(1, 16, 8),
        "encoder_hidden_states": noise(1, 5, 32),
        "pooled_projections": noise(1, 16),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.tensor([3.5]),
        "return_dict": False,
    }
    return Entry("Flux transformer", build, inputs)


def sd3() -> Entry:
    build = of_diffusers(
        "SD3Transformer2DModel",
        sample_size=8,
        num_layers=2,
        in_channels=4,
        out_channels=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    inputs = {
        "hidden_states": noise(1, 4, 8, 8),
        "encoder_hidden_states": noise(1, 5, 32),
        "pooled_projections": noise(1, 16),
        "timestep": torch.tensor([7]),
        "return_dict": False,
    }
    return Entry("SD3 transformer", build, inputs)


def wan() -> Entry:
    build = of_diffusers(
        "WanTransformer3DModel",
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": noise(1, 4, 2, 8, 8),
        "timestep": torch.tensor([7]),
        "encoder_hidden_states": noise(1, 5, 16),
        "return_dict": False,
    }
    return Entry("Wan transformer", build, inputs)


class Decoding(nn.Module):
    """The half of a VAE that turns latents into images."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        del vae.encoder, vae.quant_conv
        self.vae = vae

    def forward(self, latents: torch.Tensor) -> Any:
        return self.vae.decode(latents, return_dict=False)


def vae_decode() -> Entry:
    build = of_diffusers(
        "AutoencoderKL",
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
    )
    return Entry(
        "AutoencoderKL decode",
        build,
        {"latents": noise(1, 4, 8, 8)},
        wrap=Decoding,
        rename=lambda fqn: fqn.removeprefix("vae."),
        ignore=("encoder.*", "quant_conv.*"),
    )


def unet() -> Entry:
    build = of_diffusers(
        "UNet2DConditionModel",
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
        sample_size=8,
    )
    inputs = {
        "sample": noise(1, 4, 8, 8),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": noise(1, 5, 16),
        "return_dict": False,
    }
    return Entry("UNet2DConditionModel", build, inputs)


def entries() -> tuple[Entry, ...]:
    """All of them, in the order of the table."""
    return flux(), sd3(), wan(), vae_decode(), unet()
