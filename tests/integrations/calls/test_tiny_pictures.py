"""Tiny calls of pipelines: what they are given, and what they leave behind."""

from __future__ import annotations

import diffusers
import pytest

from penstock.integrations.calls.tiny_calls import make_call, tiny_call
from tests.integrations import models


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return models.pipeline(tmp_path_factory.mktemp("vocabulary"))


def of_kind(kind, made, **others):
    return getattr(diffusers, kind)(**made.components, **others, requires_safety_checker=False)


def denoised(pipeline):
    """The shapes of the latents that the U-Net gets in a tiny call."""
    shapes = []
    hook = pipeline.unet.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    make_call(pipeline, tiny_call(pipeline))
    hook.remove()
    return shapes


@pytest.mark.parametrize("kind", ["StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"])
def test_pipelines_that_need_pictures_get_them_in_the_size_that_they_draw(kind, made):
    assert denoised(of_kind(kind, made)) == [(2, 4, 8, 8)] * 2


@pytest.mark.parametrize("count", [1, 2])
def test_each_control_net_gets_a_picture(count, made):
    channels = {"conditioning_embedding_out_channels": (8, 16)}
    nets = [models.frozen(diffusers.ControlNetModel.from_unet(made.unet, **channels)) for _ in range(count)]
    pipeline = of_kind("StableDiffusionControlNetPipeline", made, controlnet=nets if count > 1 else nets[0])
    assert denoised(pipeline) == [(2, 4, 8, 8)] * 2


def test_a_tiny_call_leaves_a_pipeline_and_its_scheduler_as_they_were(made):
    made.scheduler.set_timesteps(7)
    before = dict(vars(made))
    assert len(denoised(made)) == 2
    assert vars(made) == before
    assert len(made.scheduler.timesteps) == 7
