"""LoRA adapters that a model has when penstock is applied, others in their place, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from tests.integrations import models

# peft asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.tensor([[5, 17, 99, 23, 42]])


def lora(**options):
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options
    return LoraConfig(**given)


@pytest.fixture
def adapted():
    """A Llama with an adapter that changes its outputs."""
    model = models.llama()
    plain = models.twin(model)
    model.add_adapter(lora(), "first")
    model = models.frozen(model)
    assert not torch.equal(model(IDS).logits, plain(IDS).logits)
    return model


def test_an_adapter_is_exported_with_its_model(adapted, tmp_path):
    reference = models.twin(adapted)
    with apply(adapted, "340KB", cache=tmp_path):
        assert torch.equal(adapted.generate(IDS, max_new_tokens=4), reference.generate(IDS, max_new_tokens=4))


def test_a_model_of_peft_generates_through_its_base(tmp_path):
    model = models.frozen(get_peft_model(models.llama(), lora()))
    reference = models.twin(model)
    with apply(model, "340KB", cache=tmp_path) as applied:
        got = model.generate(input_ids=IDS, max_new_tokens=4)
        assert torch.equal(got, reference.generate(input_ids=IDS, max_new_tokens=4))
        assert applied.components["LlamaForCausalLM"].stats.bytes_moved > 0
        with model.disable_adapter(), pytest.raises(StreamError, match="adapters were switched"):
            model(input_ids=IDS)


def test_a_merged_adapter_is_a_weight_like_any_other(tmp_path):
    model = models.frozen(get_peft_model(models.llama(), lora()).merge_and_unload())
    reference = models.twin(model)
    with apply(model, "340KB", example=models.nothing, cache=tmp_path):
        assert torch.equal(model(IDS).logits, reference(IDS).logits)


def test_what_changes_afterwards_is_refused_and_never_ignored(adapted, tmp_path):
    with apply(adapted, "340KB", example=models.nothing, cache=tmp_path):
        adapted.disable_adapters()
        with pytest.raises(StreamError, match="adapters were switched"):
            adapted(IDS)
        adapted.enable_adapters()
        adapted(IDS)
        adapted.config.pad_token_id = 3
        with pytest.raises(StreamError, match=r"configuration changed \(pad_token_id\)"):
            adapted(IDS)
        adapted.config.pad_token_id = 0
        adapted.train()
        with pytest.raises(StreamError, match="training mode"):
            adapted(IDS)
        adapted.eval()
        adapted(IDS)


def test_an_adapter_that_comes_later_is_refused_and_the_model_is_restored(tmp_path):
    model = models.llama()
    reference = models.twin(model)
    with apply(model, "340KB", example={"input_ids": IDS}, cache=tmp_path):
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]), "late")
        with pytest.raises(StreamError, match=r"q_proj is another module than at export"):
            model(IDS)
    assert torch.equal(models.frozen(model)(IDS).logits, reference(IDS).logits)  # it begins as nothing


# Another adapter in the place of one.


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A streamed model with an adapter, what it said with it, and how often it was compiled."""
    folder = tmp_path_factory.mktemp("cache")
    model = models.llama()
    model.add_adapter(lora(), "first")
    applied = apply(models.frozen(model), "340KB", example=models.nothing, cache=folder)
    yield model, model(IDS).logits, applied, lambda: len(list((folder / "programs").iterdir()))
    applied.close()


def saved(folder, **options):
    """A model with another adapter, which is in the folder."""
    model = models.llama()
    torch.manual_seed(7)
    model.add_adapter(lora(**options), "any")
    model.save_pretrained(folder)
    return models.frozen(model)


def test_another_adapter_gives_its_outputs_without_another_export(swapped, tmp_path):
    model, before, applied, compiled = swapped
    reference, count = saved(tmp_path), compiled()
    applied.swap_adapter(tmp_path, "first")
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    assert not torch.equal(model(IDS).logits, before)
    assert compiled() == count
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())


REFUSED = {
    "rank": ({"r": 8}, r"q_proj\.lora_A\.weight is \[4, 64\] in the model and \[8, 64\] in .*: another rank"),
    "alpha": (
        {"lora_alpha": 16},
        r"lora_alpha \(.*\.q_proj\) of adapter 'first' is 8 in the model and 16 in",
    ),
    "alpha of one layer": (
        {"alpha_pattern": {"layers.1.self_attn.v_proj": 2}},
        r"\(.*1\.self_attn\.v_proj\)",
    ),
    "other scaling": (
        {"use_rslora": True},
        "use_rslora of adapter 'first' is False in the model and True in",
    ),
    "fewer layers": ({"target_modules": ["q_proj"]}, r"v_proj\.lora_A\.weight in the model and not in"),
    "more layers": ({"target_modules": ["q_proj", "k_proj", "v_proj"]}, r"k_proj\..* and not in the model"),
    "own weights changed": (
        {"init_lora_weights": "pissa"},
        "init_lora_weights of adapter 'first' is False .* pissa",
    ),
    "another kind": ({"use_dora": True}, "lora_magnitude_vector in .* and not in the model"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_differs_in_more_than_values_changes_nothing(options, message, swapped, tmp_path):
    model, _, applied, _ = swapped
    before = model(IDS).logits
    saved(tmp_path, **options)
    with pytest.raises(StreamError, match=rf"(?s){message}.*restore\(\) the model"):
        applied.swap_adapter(tmp_path)
    assert torch.equal(model(IDS).logits, before)


def test_what_is_no_adapter_of_the_model_is_refused_by_name(swapped, tmp_path):
    _, _, applied, _ = swapped
    with pytest.raises(StreamError, match="no adapter 'second': name one of first"):
        applied.swap_adapter(tmp_path, "second")
    with pytest.raises(SourceError, match="holds no adapter"):
        applied.swap_adapter(tmp_path)
    with (
        apply(models.llama(), "340KB", example=models.nothing, cache=tmp_path) as plain,
        pytest.raises(StreamError, match="no adapter whose values could be replaced"),
    ):
        plain.swap_adapter(tmp_path)


def test_a_model_that_is_restored_keeps_the_adapter_that_it_has_now(adapted, tmp_path):
    reference = saved(tmp_path / "other")
    with apply(adapted, "340KB", example=models.nothing, cache=tmp_path) as applied:
        applied.swap_adapter(tmp_path / "other")  # before anything was compiled
    assert torch.equal(adapted(IDS).logits, reference(IDS).logits)


def test_a_merged_adapter_is_not_swapped(tmp_path):
    saved(tmp_path / "other")
    model = models.frozen(get_peft_model(models.llama(), lora()))
    model.merge_adapter()
    with (
        apply(model, "340KB", example=models.nothing, cache=tmp_path) as applied,
        pytest.raises(StreamError, match="into whose weight it is merged"),
    ):
        applied.swap_adapter(tmp_path / "other")


class Pair:
    """As a pipeline is: components by name."""

    def __init__(self, seed: int):
        self.components = {"encoder": models.llama(num_hidden_layers=1), "decoder": models.llama()}
        torch.manual_seed(seed)
        for module in self.components.values():
            module.add_adapter(lora(), "style")
            models.frozen(module)


def test_the_names_in_the_adapter_of_a_pipeline_begin_with_their_component(tmp_path):
    pair, other = Pair(1), Pair(2)
    tensors = {
        f"{name}.{fqn.replace('.style', '')}": value
        for name, module in other.components.items()
        for fqn, value in module.named_parameters()
        if "lora" in fqn
    }
    settings = {f"{k}.lora_alpha": 8 for k in pair.components}
    cases = {
        "fits": (tensors, settings),
        "other": (tensors | {"vae.lora_A.weight": torch.ones(1)}, settings),
        "alpha": (tensors, settings | {"encoder.lora_alpha": 4}),
        "without": (tensors, {}),
    }
    for name, (held, said) in cases.items():
        metadata = {"lora_adapter_metadata": json.dumps(said)} if said else None
        save_file(held, tmp_path / f"{name}.safetensors", metadata)
    with apply(pair, "1MB", cache=tmp_path) as applied:
        for name, message in {
            "other": r"vae\.lora_A\.weight, for which there is no adapter 'style'",
            "alpha": "lora_alpha .* is 8 in the model and 4 in",
            "without": "lora_alpha .* is 8 in the model and 4 in",  # then alpha is the rank
        }.items():
            with pytest.raises(StreamError, match=message):
                applied.swap_adapter(tmp_path / f"{name}.safetensors")
        applied.swap_adapter(tmp_path / "fits.safetensors")
    for name, module in pair.components.items():
        assert torch.equal(module(IDS).logits, other.components[name](IDS).logits)


def test_an_adapter_that_adds_virtual_tokens_is_refused_by_name(tmp_path):
    from peft import PromptTuningConfig

    model = get_peft_model(
        models.llama(num_hidden_layers=1), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(PassError, match="of the kind PROMPT_TUNING, which adds virtual tokens"):
        apply(model, "1MB", cache=tmp_path)
