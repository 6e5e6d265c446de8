"""Adapters of peft while a model streams: attached, switched, scaled, merged and taken away at any time."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from penstock import LoadOptions
from penstock.integrations import apply
from penstock.schedule.facts.errors import BudgetError, StreamError
from tests.hunt import nightly_but
from tests.integrations import models

IDS = torch.tensor([[5, 17, 99, 23, 42]])
POISONED = LoadOptions(arena="contiguous", poison=True)
MEMORY = {"little": ("230KB", LoadOptions()), "poisoned": ("260KB", POISONED), "all": ("4MB", LoadOptions())}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=nightly_but(["poisoned"], MEMORY))
def room(request):
    return MEMORY[request.param]


def lora(**options):
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options
    return LoraConfig(**given)


def adapted(**options):
    torch.manual_seed(0)
    return models.frozen(get_peft_model(models.llama(), lora(**options)))


def merged():
    model = adapted()
    model.merge_adapter()
    return model


def two():
    model = adapted()
    torch.manual_seed(4)
    model.add_adapter("other", lora(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    return models.frozen(model)


def added(name, **options):
    return lambda model: model.add_adapter(lora(**options), name)


def switched(on):
    return lambda model: (
        model.base_model.enable_adapter_layers() if on else model.base_model.disable_adapter_layers()
    )


def scaled(model):
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)


def merge(model):
    model.merge_adapter()


def unmerge(model):
    model.unmerge_adapter()


STEPS = {
    "attached": (models.llama, [added("late")]),
    "two, switched, deleted": (
        models.llama,
        [
            added("a"),
            added("b", r=2),
            lambda model: model.set_adapter("a"),
            lambda model: model.set_adapter(["a", "b"]),
            lambda model: model.disable_adapters(),
            lambda model: model.enable_adapters(),
            lambda model: model.delete_adapter("a"),
            lambda model: model.delete_adapter("b"),
        ],
    ),
    "disabled": (adapted, [switched(False), switched(True)]),
    "scaled": (adapted, [scaled]),
    "merged": (adapted, [merge, unmerge]),
    "merged safely": (adapted, [lambda model: model.merge_adapter(safe_merge=True), unmerge]),
    "merged before": (merged, [unmerge, merge]),
    "disabled while merged": (adapted, [merge, switched(False), switched(True)]),
    "table and head": (
        lambda: adapted(target_modules=["q_proj", "embed_tokens", "lm_head", "down_proj"]),
        [merge, unmerge],
    ),
    "table and head, later": (models.llama, [added("late", target_modules=["embed_tokens", "lm_head"])]),
    "DoRA": (lambda: adapted(use_dora=True), [merge, unmerge]),
    "DoRA, later": (models.llama, [added("late", use_dora=True)]),
    "weights changed as it begins": (models.llama, [added("late", init_lora_weights="pissa")]),
    "tokens": (lambda: adapted(trainable_token_indices=[1, 5]), [merge, unmerge]),
    "tokens, later": (models.llama, [added("late", trainable_token_indices=[1, 5])]),
    "a head of its own": (lambda: adapted(modules_to_save=["lm_head"]), [switched(False), switched(True)]),
    "a head of its own, later": (models.llama, [added("late", modules_to_save=["lm_head"])]),
    "one of two merged": (two, [lambda model: model.merge_adapter(["other"])]),
    "two merged": (two, [merge, unmerge]),
    "taken out": (adapted, [lambda model: (model.delete_adapter("default"), model.base_model.model)[1]]),
    "one of two taken out": (two, [lambda model: model.delete_adapter("default")]),
    "unloaded": (adapted, [lambda model: model.merge_and_unload()]),
    "unloaded safely": (adapted, [lambda model: model.merge_and_unload(safe_merge=True)]),
    "one of two unloaded": (two, [lambda model: model.merge_and_unload(adapter_names=["other"])]),
    "unloaded without merging": (merged, [lambda model: model.unload()]),
    "parameters": (
        lambda: adapted(target_modules=[], target_parameters=["q_proj.weight"]),
        [switched(False), switched(True), merge],
    ),
}
CASES = [(name, room) for name in STEPS for room in MEMORY]
SAMPLE = [
    *((name, "poisoned") for name in STEPS),
    ("attached", "little"),
    ("merged", "little"),
    ("merged", "all"),
]


def agree(model, reference):
    return torch.equal(model(input_ids=IDS).logits, reference(input_ids=IDS).logits)


def merged_adapters(model):
    return [list(layer.merged_adapters) for layer in model.modules() if hasattr(layer, "merged_adapters")]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, about what it is asked to do here
@pytest.mark.parametrize(("name", "room"), nightly_but(SAMPLE, CASES))
def test_it_computes_what_it_computes_in_memory(name, room, tmp_path):
    make, steps = STEPS[name]
    model, reference = make(), make()
    memory, options = MEMORY[room]

    def changed(one, step):
        torch.manual_seed(3)
        return step(one) or one

    def check_equal():
        assert agree(model, reference)
        assert merged_adapters(model) == merged_adapters(reference)

    with apply(model, memory, cache=tmp_path, options=options):
        check_equal()
        for step in steps:
            model, reference = (changed(one, step) for one in (model, reference))
            check_equal()
            check_equal()
    check_equal()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_merged_weights_stream_from_the_cache(tmp_path):
    model = adapted(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    with apply(model, "230KB", cache=tmp_path) as applied:
        model.merge_adapter()
        for _ in range(2):
            model(input_ids=IDS)
        (component,) = applied.components.values()
        assert component.plan.streamed_bytes >= applied.freed_bytes // 2
        assert component.stats.peak_bytes <= component.plan.budget
        assert not any(
            "q_proj" in one.module
            for one in applied.residency["LlamaForCausalLM"]
            if one.why == ("calls write it, or keep views of it")
        )


def test_a_state_that_is_loaded_is_what_the_model_has(room, tmp_path):
    torch.manual_seed(5)
    state = {name: torch.randn_like(value) for name, value in models.llama().state_dict().items()}
    model, reference = models.llama(), models.llama()
    memory, options = room
    with apply(model, memory, cache=tmp_path, options=options):
        model(IDS)
        for one in (model, reference):
            one.load_state_dict(state)
        for _ in range(2):
            assert agree(model, reference)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_an_adapter_that_is_loaded_later(tmp_path):
    other = models.llama()
    torch.manual_seed(7)
    other.add_adapter(lora(), "any")
    other.save_pretrained(tmp_path / "adapter")
    model, reference = models.llama(), models.llama()
    with apply(model, "230KB", cache=tmp_path):
        model(IDS)
        for one in (model, reference):
            one.load_adapter(str(tmp_path / "adapter"), "loaded")
        assert agree(model, reference)
        model.save_pretrained(tmp_path / "again")
        assert torch.equal(
            model.generate(IDS, max_new_tokens=4), models.frozen(reference).generate(IDS, max_new_tokens=4)
        )


def test_parts_that_came_later_count_in_the_cap(tmp_path):
    model = models.llama()
    with apply(model, "300KB", cache=tmp_path):
        model(IDS)
        model.add_adapter(lora(r=512), "large")
        with pytest.raises(BudgetError, match="give at least"):
            model(IDS)
        model.delete_adapter("large")
        model(IDS)


def test_a_weight_that_is_written_between_calls_keeps_its_values(room, tmp_path):
    model, reference = models.llama(), models.llama()
    memory, options = room
    with apply(model, memory, cache=tmp_path, options=options):
        model(IDS)
        for one in (model, reference):
            layer = one.model.layers[0]
            layer.mlp.up_proj.weight.mul_(2)
            layer.mlp.down_proj.weight.data.add_(0.25)
            layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.flip(0)
            one.model.embed_tokens.weight[3] = 0.5
        kept = model.lm_head.weight.data
        assert agree(model, reference)
        kept.mul_(3)
        reference.lm_head.weight.mul_(3)
        for _ in range(2):
            assert agree(model, reference)
    assert agree(model, reference)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_weight_with_other_values_and_another_shape_is_refused(tmp_path):
    model, reference = models.llama(), models.llama()
    with apply(model, "230KB", cache=tmp_path):
        model(IDS)
        with pytest.raises(StreamError, match=r"q_proj\.weight streams as \[64, 64\]"):
            model.model.layers[0].self_attn.q_proj.weight.data = torch.ones(2, 2)
        assert agree(model, reference)


def test_a_part_may_be_copied_with_its_values(tmp_path):
    model, reference = models.llama(), models.llama()
    with apply(model, "230KB", cache=tmp_path):
        model(IDS)
        layer = copy.deepcopy(model.model.layers[0])
        model(IDS)
    for mine, other in zip(layer.parameters(), reference.model.layers[0].parameters(), strict=True):
        assert torch.equal(mine, other)
    x = torch.linspace(-1, 1, 64)[None]
    assert torch.equal(layer.mlp(x), reference.model.layers[0].mlp(x))
    assert not any("penstock" in name for part in layer.modules() for name in vars(part))


def test_a_model_of_peft_generates_through_its_base(tmp_path):
    model, reference = adapted(), adapted()
    with apply(model, "230KB", cache=tmp_path) as applied:
        got = model.generate(input_ids=IDS, max_new_tokens=4)
        assert torch.equal(got, reference.generate(input_ids=IDS, max_new_tokens=4))
        assert applied.components["LlamaForCausalLM"].stats.bytes_moved > 0
        with model.disable_adapter(), reference.disable_adapter():
            assert agree(model, reference)


def test_diffusers_fuses_and_switches_adapters(tmp_path):
    model = models.frozen(models.unet())
    reference = models.twin(model)
    given = torch.randn(1, 4, 8, 8), 5, torch.randn(1, 5, 32)
    with apply(model, "2MB", cache=tmp_path):
        for step in (
            lambda one: one.add_adapter(lora(target_modules=["to_q", "to_v", "conv1"]), "style"),
            lambda one: one.fuse_lora(),
            lambda one: one.unfuse_lora(),
            lambda one: one.set_adapters("style", 0.5),
            lambda one: one.disable_lora(),
            lambda one: one.enable_lora(),
            lambda one: one.delete_adapters("style"),
        ):
            for one in (model, reference):
                torch.manual_seed(3)
                step(one)
            assert torch.equal(model(*given).sample, reference(*given).sample)
    assert torch.equal(model(*given).sample, reference(*given).sample)
