"""Mixtures of experts that torchao quantised: calls read what tokens ask for, with the library's bits."""

import pytest
import torch
from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig, quantize_

from penstock.integrations import apply, load
from penstock.schedule.sparse import pool
from tests.hunt import sampled
from tests.integrations import expert_models
from tests.integrations.models import frozen
from tests.integrations.test_quantised_models import called_at_the_floor
from tests.integrations.test_sparse_families import outputs

EXPERTS = r"re:.*experts\.(gate_up|down)_proj"
FAMILIES = ("olmoe", "qwen3_moe", "deepseek_v3")
CASES = [(family, dtype) for family in FAMILIES for dtype in (torch.bfloat16, torch.float32)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Units of small models count."""
    monkeypatch.setattr(pool, "LEAST", 256 << 10)


def quantised(family, dtype):
    model = expert_models.FAMILIES[family](dtype)
    quantize_(model, FqnToConfig({EXPERTS: Float8WeightOnlyConfig()}), filter_fn=None)
    return model


@pytest.mark.random
@pytest.mark.parametrize(("family", "dtype"), sampled(CASES, 3))
def test_quantised_experts_have_their_bits_in_any_memory(family, dtype, tmp_path):
    model = quantised(family, dtype)
    expected = outputs(model)
    stacks = [one for name, one in model.named_parameters() if ".experts." in name]
    assert {one.qdata.dtype for one in stacks} == {torch.float8_e4m3fn}
    largest = max(one.qdata.nbytes for one in stacks)
    with apply(model, "64KB", cache=tmp_path) as applied:
        called_at_the_floor(applied, lambda: outputs(model))
        least = applied.memory
        for memory in (least, least + largest // 2, 4 * least + 8 * largest):
            applied.memory = memory
            for _ in range(2):
                assert all(torch.equal(*both) for both in zip(outputs(model), expected, strict=True))
            (component,) = applied.components.values()
            assert component.stats.peak_bytes <= component.stats.budget


def test_a_folder_of_quantised_experts_runs_in_little_memory(tmp_path):
    from transformers import OlmoeForCausalLM, TorchAoConfig

    expert_models.olmoe(torch.bfloat16).save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(FqnToConfig({EXPERTS: Float8WeightOnlyConfig()}))
    model = OlmoeForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "float8")
    expected = outputs(frozen(model))
    loaded = load(tmp_path / "float8", "64KB", cache=tmp_path / "cache")
    called_at_the_floor(loaded.penstock_applied, lambda: outputs(loaded))
    assert all(torch.equal(*both) for both in zip(outputs(loaded), expected, strict=True))
    loaded.penstock_applied.close()
