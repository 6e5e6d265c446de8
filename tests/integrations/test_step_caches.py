"""Step caches of diffusers leave blocks out of calls: bits of the model in memory, no reads in vain."""

import pytest
import torch

from penstock.integrations import apply
from tests.hunt import nightly_but

hooks = pytest.importorskip(
    "diffusers.hooks", reason="diffusers is not installed: pip install '.[diffusers]'"
)

TIMES = [1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84]
"""Close to each other, so that a cache leaves blocks out."""

CACHES = {
    "first block": lambda: hooks.FirstBlockCacheConfig(threshold=0.5),
    "attention": lambda: hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=3,
        spatial_attention_timestep_skip_range=(-1, 1000),
        current_timestep_callback=lambda: 500,
    ),
}


def made():
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24),
    ).eval()


def called(model, time):
    random = torch.Generator().manual_seed(0)
    with torch.no_grad(), model.cache_context("cond"):
        output = model(
            hidden_states=torch.randn(1, 16, 4, generator=random),
            encoder_hidden_states=torch.randn(1, 8, 32, generator=random),
            pooled_projections=torch.randn(1, 32, generator=random),
            timestep=torch.tensor([time]),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
            guidance=None,
            return_dict=False,
        )[0]
    return output


CASES = [(cache, first) for cache in CACHES for first in ("apply", "cache")]


@pytest.mark.parametrize(("cache", "first"), nightly_but([CASES[0], CASES[-1]], CASES))
def test_the_bits_are_those_of_the_cached_model_in_memory(tmp_path, cache, first):
    plain, model = made(), made()
    plain.enable_cache(CACHES[cache]())
    if first == "cache":
        model.enable_cache(CACHES[cache]())
    with apply(model, "40%", cache=tmp_path):
        if first == "apply":
            model.enable_cache(CACHES[cache]())
        for time in TIMES:
            assert torch.equal(called(model, time), called(plain, time))


def test_a_block_that_is_left_out_is_not_read(tmp_path):
    model = made()
    model.enable_cache(CACHES["first block"]())
    with apply(model, "40%", cache=tmp_path) as applied:
        (component,) = applied.components.values()
        for time in (1.0, 0.99, 0.2, 0.99, 0.2, 0.19, 0.18):  # the first of two that differ runs all blocks
            called(model, time)
        before = component.stats
        called(model, 0.17)
        after = component.stats
        left_out = sum(p.nbytes for p in model.transformer_blocks[1:].parameters())
        whole = sum(p.nbytes for p in model.parameters())
        assert after.misses == before.misses
        assert after.bytes_moved - before.bytes_moved < whole - left_out


def test_calls_that_leave_out_by_turns_are_expected(tmp_path):
    model = made()
    model.enable_cache(CACHES["attention"]())
    with apply(model, "40%", cache=tmp_path) as applied:
        (component,) = applied.components.values()
        for time in TIMES:
            called(model, time)
        misses = component.stats.misses
        for time in TIMES:
            called(model, time)
        assert component.stats.misses == misses
