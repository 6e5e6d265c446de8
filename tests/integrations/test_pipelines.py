"""Pipelines of diffusers, models from folders, and step caches, which leave blocks out of calls."""

from contextlib import nullcontext

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from penstock.integrations import apply, load
from penstock.schedule.facts.errors import PassError, StreamError
from tests.hunt import nightly_but
from tests.integrations import models

CAP = 2_200_000
"""Bytes for everything; the U-Net alone has 3.9 MB."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A pipeline, the folder that it was saved to, and its picture."""
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "vocabulary").mkdir()
    made = models.pipeline(folder / "vocabulary")
    made.save_pretrained(folder / "saved", safe_serialization=True)
    return made, folder / "saved", models.picture(made)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Weights that no file of the pipeline holds are here for all tests."""
    return tmp_path_factory.mktemp("cache")


def test_a_pipeline_draws_the_same_picture_within_less_than_its_largest_component(drawn, tmp_path):
    made, _, expected = drawn
    assert sum(p.nbytes for p in made.unet.parameters()) > CAP
    with apply(made, CAP, cache=tmp_path) as applied:
        for _ in range(2):
            assert torch.equal(models.picture(made), expected)
        loaded = [name for name, one in applied.components.items() if one.stats is not None]
        assert loaded == ["vae"]  # the others hold nothing while it runs
        assert applied.components["vae"].stats.peak_bytes <= CAP
    assert torch.equal(models.picture(made), expected)


def test_a_simulated_gpu_draws_the_same_picture_and_says_how_long_it_takes(drawn, cache):
    _, folder, expected = drawn
    made = load(folder, "5MB", cache=cache, device="sim:rtx4090")
    made.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert torch.equal(models.picture(made), expected)
    stats = made.penstock_applied.components["vae"].stats
    assert stats.simulated_seconds > 0
    assert stats.peak_bytes <= stats.budget


def adapted(made, folder):
    """LoRA is loaded, scaled, fused, taken out of the weights again, and left in them."""
    adapter = UNet2DConditionModel.from_config(made.unet.config)
    adapter.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q"], init_lora_weights=False))
    made.save_lora_weights(folder / "ink", get_peft_model_state_dict(adapter))
    made.load_lora_weights(folder / "ink", adapter_name="ink")
    made.set_adapters("ink", 0.7)
    yield models.picture(made)
    made.fuse_lora()
    yield models.picture(made)
    made.unfuse_lora()
    made.fuse_lora()
    made.unload_lora_weights()
    yield models.picture(made)


def divided(made, folder):
    """The autoencoder encodes and decodes by tiles."""
    made.vae.enable_tiling()
    made.vae.tile_latent_min_size, made.vae.tile_sample_min_size = 4, 8
    yield models.picture(made)
    yield made.vae.encode(torch.ones(1, 3, 16, 24)).latent_dist.mean
    made.vae.disable_tiling()
    yield made.vae.decode(torch.ones(1, 4, 8, 8)).sample


def with_other_attention(made, folder):
    """Projections become one, which were three weights."""
    yield models.picture(made)
    made.fuse_qkv_projections()
    yield models.picture(made)
    made.unfuse_qkv_projections()
    yield models.picture(made)


@pytest.mark.parametrize("changed", nightly_but([adapted], [adapted, divided, with_other_attention]))
def test_what_changes_a_pipeline_changes_one_that_streams(changed, drawn, tmp_path):
    _, folder, _ = drawn
    plain, applied = (StableDiffusionPipeline.from_pretrained(folder, safety_checker=None) for _ in range(2))
    loaded = load(folder, CAP, cache=tmp_path)
    pictures = []
    for made in (plain, applied, loaded):
        made.set_progress_bar_config(disable=True)
        torch.manual_seed(0)
        with apply(made, CAP, cache=tmp_path) if made is applied else nullcontext(), torch.no_grad():
            pictures.append(torch.cat([one.flatten() for one in changed(made, tmp_path)]))
    assert torch.equal(pictures[1], pictures[0])
    assert torch.equal(pictures[2], pictures[0])
    assert torch.equal(models.picture(applied), models.picture(plain))  # as it was changed


def test_a_component_may_be_moved_to_where_it_is(drawn, tmp_path):
    made, _, _ = drawn
    with apply(made.vae, CAP, cache=tmp_path):
        assert made.vae.to("cpu", torch.float32) is made.vae  # as pipelines do before they encode a picture
        for change in ({"dtype": torch.float16}, {"memory_format": torch.channels_last}):
            with pytest.raises(StreamError, match="AutoencoderKL cannot be moved or converted"):
                made.vae.to(**change)
        with pytest.raises(StreamError, match="cannot be moved or converted"):
            made.vae.share_memory()


def test_of_a_safety_checker_the_vision_model_streams(drawn, tmp_path):
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessor

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = {"vision_config": {**sizes, "image_size": 8, "patch_size": 4}, "text_config": sizes}
    checker = models.frozen(StableDiffusionSafetyChecker(CLIPConfig(**seen, projection_dim=8)))
    checker.concept_embeds_weights.fill_(2)  # no cosine is more
    others = {"safety_checker": checker, "feature_extractor": CLIPImageProcessor()}
    made = type(drawn[0])(**drawn[0].components | others)
    with apply(made, CAP, cache=tmp_path) as applied:
        assert "safety_checker.vision_model" in applied.components
        images, found = made.safety_checker(torch.ones(1, 3, 8, 8), torch.ones(1, 3, 8, 8))
        assert images.all()
        assert found == [False]


def test_a_pipeline_from_a_folder_is_never_in_memory(drawn, cache):
    _, folder, expected = drawn
    made = load(folder, CAP, cache=cache)
    made.set_progress_bar_config(disable=True)
    assert all(p.untyped_storage().nbytes() == 0 for p in made.unet.parameters())
    assert torch.equal(models.picture(made), expected)
    with pytest.raises(StreamError, match="never in memory"):
        made.penstock_applied.restore()


hooks = pytest.importorskip(
    "diffusers.hooks", reason="diffusers is not installed: pip install '.[diffusers]'"
)


def test_a_component_that_is_no_module_is_refused_by_name(drawn, monkeypatch):
    made, _, _ = drawn
    monkeypatch.setattr(made, "unet", lambda sample, timestep: sample)
    with pytest.raises(PassError, match="component unet is a function and no module"):
        apply(made, CAP)


TIMES = [1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84]
"""Close to each other, so that a step_cache leaves blocks out."""

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


CASES = [(step_cache, first) for step_cache in CACHES for first in ("apply", "step_cache")]


@pytest.mark.parametrize(("step_cache", "first"), nightly_but([CASES[0], CASES[-1]], CASES))
def test_the_bits_are_those_of_the_cached_model_in_memory(tmp_path, step_cache, first):
    plain, model = made(), made()
    plain.enable_cache(CACHES[step_cache]())
    if first == "step_cache":
        model.enable_cache(CACHES[step_cache]())
    with apply(model, "40%", cache=tmp_path):
        if first == "apply":
            model.enable_cache(CACHES[step_cache]())
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
        assert after.bytes_moved - before.bytes_moved < whole - left_out // 2  # whole pages are read


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
