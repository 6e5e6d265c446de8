"""Pipelines of diffusers, and models from folders."""

from contextlib import nullcontext

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from penstock.integrations import apply, load
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
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
    yield models.picture(made)
    made.set_adapters("ink", 0.7)
    yield models.picture(made)
    made.fuse_lora()
    yield models.picture(made)
    made.unfuse_lora()
    yield models.picture(made)
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


def test_a_prior_makes_embeddings_of_its_latents(tmp_path):
    from diffusers import PriorTransformer

    sizes = {"num_attention_heads": 1, "attention_head_dim": 8, "num_layers": 1, "num_embeddings": 4}
    prior = models.frozen(PriorTransformer(**sizes, embedding_dim=8))
    expected = prior.post_process_latents(torch.ones(1, 8))
    with apply(prior, "1MB", cache=tmp_path):
        assert torch.equal(prior.post_process_latents(torch.ones(1, 8)), expected)


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


def test_a_component_that_cannot_be_streamed_leaves_the_others_as_they_were(tmp_path_factory):
    made = models.pipeline(tmp_path_factory.mktemp("vocabulary"))
    made.unet.conv_in.weight.data = made.unet.conv_in.weight.data.to(memory_format=torch.channels_last)
    expected = models.picture(made)
    with pytest.raises(PassError, match=r"conv_in\.weight has strides .*: make it contiguous"):
        apply(made, CAP, cache=tmp_path_factory.mktemp("cache"))
    assert torch.equal(models.picture(made), expected)


def test_a_pipeline_from_a_folder_is_never_in_memory(drawn, cache):
    _, folder, expected = drawn
    made = load(folder, CAP, cache=cache)
    made.set_progress_bar_config(disable=True)
    assert all(p.untyped_storage().nbytes() == 0 for p in made.unet.parameters())
    assert torch.equal(models.picture(made), expected)
    with pytest.raises(StreamError, match="never in memory"):
        made.penstock_applied.restore()


def test_experts_that_their_library_stacks_while_it_loads_come_from_its_files(tmp_path):
    model = models.mixtral()
    model.save_pretrained(tmp_path / "model")
    streamed = load(tmp_path / "model", "250KB", cache=tmp_path / "cache")
    ids = torch.tensor([[5, 17, 99, 23, 42]])
    with torch.no_grad():
        assert torch.equal(streamed(ids).logits, model(ids).logits)
    streamed.penstock_applied.close()


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="a tokenizer and no model"):
        load(tmp_path, "1MB")


def test_a_name_that_is_not_in_the_cache_is_not_downloaded():
    with pytest.raises(SourceError, match="download it first, with `hf download nobody/nothing`"):
        load("nobody/nothing", "1MB")


def test_a_component_with_offloading_of_its_own_is_refused(tmp_path_factory):
    from diffusers.hooks import apply_group_offloading

    made = models.pipeline(tmp_path_factory.mktemp("vocabulary"))
    apply_group_offloading(
        made.unet,
        onload_device="cpu",
        offload_device="cpu",
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    with pytest.raises(PassError, match=r"unet has a hook of diffusers .*\(group_offloading\): load it"):
        apply(made, CAP)


def test_a_component_that_is_no_module_is_refused_by_name(drawn, monkeypatch):
    made, _, _ = drawn
    monkeypatch.setattr(made, "unet", lambda sample, timestep: sample)
    with pytest.raises(PassError, match="component unet is a function and no module"):
        apply(made, CAP)
