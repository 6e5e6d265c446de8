"""Adapters whose parameters are tied, of other kinds than LoRA, and in files that are damaged."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import (
    AdaLoraConfig,
    GraloraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.integrations import apply, streamed
from penstock.integrations.cached import with_other_file
from penstock.runtime.files import tensor_file
from penstock.runtime.files.safetensors_file import read_exactly
from penstock.schedule.facts.errors import PassError, SourceError, StreamError
from tests.integrations import models

X = torch.linspace(-1, 1, 16).reshape(1, 16)
SIZES = {"r": 4, "target_modules": ["a", "b"]}


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def adapted(config, seed, *, tied=False):
    """One model with an adapter, whose values are of the seed."""
    torch.manual_seed(0)
    model = get_peft_model(TwoLayers(), config)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn_like(parameter) / 4
    if tied:
        model.b.lora_A["default"].weight = model.a.lora_A["default"].weight
    return models.frozen(model)


def test_tied_parameters_of_an_adapter_are_swapped_together(tmp_path):
    model, other = (adapted(LoraConfig(**SIZES), seed, tied=True) for seed in (1, 2))
    other.save_pretrained(tmp_path / "tied")
    adapted(LoraConfig(**SIZES), 3).save_pretrained(tmp_path / "untied")
    with apply(model, "1MB", cache=tmp_path) as applied:
        before = model(X)
        with pytest.raises(StreamError, match=r"a\.lora_A\.weight and b\.lora_A\.weight are tied in the mod"):
            applied.swap_adapter(tmp_path / "untied")
        assert torch.equal(model(X), before)
        applied.swap_adapter(tmp_path / "tied")
        assert torch.equal(model(X), other(X))
    assert torch.equal(model(X), other(X))


def test_an_adapter_that_is_another_transposed_is_refused_as_tied(tmp_path):
    model = adapted(LoraConfig(**SIZES), 1)
    transposed = model.b.lora_A["default"].weight.t()
    model.a.lora_B["default"].weight = nn.Parameter(transposed, requires_grad=False)
    message = r"a\.lora_B.* in the memory of b\.lora_A.* copy would untie it: .* merge it first"
    with pytest.raises(PassError, match=message):
        apply(model, "1MB", cache=tmp_path)


@pytest.mark.parametrize("other", [{}, {"use_rslora": True}], ids=["fits", "scales otherwise"])
def test_dora_is_swapped_where_only_values_differ(other, tmp_path):
    config = {"init_lora_weights": False, "use_dora": True}
    model = adapted(LoraConfig(**SIZES, **config), 1)
    reference = adapted(LoraConfig(**SIZES, **config, **other), 2)
    reference.save_pretrained(tmp_path / "other")
    with apply(model, "1MB", cache=tmp_path) as applied:
        before = model(X)
        if other:
            with pytest.raises(StreamError, match="use_rslora of adapter 'default' is False in the model"):
                applied.swap_adapter(tmp_path / "other")
        else:
            applied.swap_adapter(tmp_path / "other")
        assert torch.equal(model(X), before if other else reference(X))
        assert not torch.equal(before, reference(X))


KINDS = {
    "gralora": GraloraConfig(**SIZES, gralora_k=2),
    "hra": HRAConfig(**SIZES),  # reads the data of a parameter, which export does not follow by itself
    "ia3": IA3Config(target_modules=["a", "b"], feedforward_modules=["b"]),
    "oft": OFTConfig(target_modules=["a", "b"], oft_block_size=4),
}


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_other_kinds_of_adapters_are_swapped(config, tmp_path):
    other = adapted(copy.deepcopy(config), 2)
    other.save_pretrained(tmp_path / "other")
    with apply(adapted(config, 1), "1MB", cache=tmp_path) as applied:
        before = applied.target(X)
        applied.swap_adapter(tmp_path / "other")
        assert torch.equal(applied.target(X), other(X))
        assert not torch.equal(before, other(X))


@pytest.mark.parametrize("kind", [LoHaConfig, LoKrConfig])
def test_the_scaling_of_another_kind_is_called_as_that_kind_calls_it(kind, tmp_path):
    adapted(kind(**SIZES, alpha_pattern={"a": 64}), 2).save_pretrained(tmp_path / "other")
    with (
        apply(adapted(kind(**SIZES), 1), "1MB", cache=tmp_path) as applied,
        pytest.raises(StreamError, match=r"^alpha \(a\) of adapter 'default' is 8 in the model and 64 in"),
    ):
        applied.swap_adapter(tmp_path / "other")


def test_an_adapter_that_has_more_parameters_than_its_file_is_refused(tmp_path):
    config = AdaLoraConfig(init_r=4, total_step=9, target_modules=["a", "b"])
    adapted(copy.deepcopy(config), 2).save_pretrained(tmp_path / "other")
    with (
        apply(adapted(config, 1), "1MB", cache=tmp_path) as applied,
        pytest.raises(StreamError, match=r"'default' has a\.ranknum in the model and not in .*: restore"),
    ):
        applied.swap_adapter(tmp_path / "other")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with an adapter, and a streamed model that has another one."""
    folder = tmp_path_factory.mktemp("whole")
    adapted(LoraConfig(**SIZES), 2).save_pretrained(folder)
    with apply(adapted(LoraConfig(**SIZES), 1), "1MB", cache=tmp_path_factory.mktemp("cache")) as applied:
        yield folder, applied


FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _with_pattern(pattern):
    return lambda old: json.dumps(json.loads(old) | {"alpha_pattern": pattern}).encode()


DAMAGED = {
    "no JSON": (CONFIG, lambda old: old[:-9], r"settings in .*adapter_config\.json are no JSON"),
    "no text": (CONFIG, lambda _: b"\xff\xfe\xfd", r"settings in .*adapter_config\.json are no JSON"),
    "no object": (CONFIG, lambda _: b"[1]", "are a list and no object: get an intact copy"),
    "list": (CONFIG, _with_pattern([1]), "alpha_pattern in the settings of .* is a list and no object"),
    "no expression": (CONFIG, _with_pattern({"(": 1}), r"is for '\(', which is no regular expression"),
    "cut off": (FILE, lambda old: old[:-9], "is not a safetensors file that can be trusted"),
    "no header": (FILE, lambda old: b"?" * len(old), "is not a safetensors file that can be trusted"),
    "empty": (FILE, lambda _: b"", "is not a safetensors file that can be trusted"),
}


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_adapter_is_refused_by_name(name, damage, message, whole, tmp_path):
    folder, applied = whole
    for one in (FILE, CONFIG):
        shutil.copy(folder / one, tmp_path)
    (tmp_path / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(SourceError, match=message):
        applied.swap_adapter(tmp_path)


def test_damaged_settings_within_a_file_are_refused(whole, tmp_path):
    folder, applied = whole
    save_file(load_file(folder / FILE), tmp_path / FILE, {"lora_adapter_metadata": "{"})
    with pytest.raises(SourceError, match=r"settings in .*adapter_model\.safetensors are no JSON"):
        applied.swap_adapter(tmp_path)


def test_an_adapter_of_another_kind_is_refused_by_its_kind(whole, tmp_path):
    folder, applied = whole
    adapted(LoHaConfig(**SIZES), 2).save_pretrained(tmp_path)
    message = "says that it is LOHA, and adapter 'default' of the model is LORA: restore"
    with pytest.raises(StreamError, match=message):
        applied.swap_adapter(tmp_path)
    shutil.copy(folder / FILE, tmp_path)
    with pytest.raises(StreamError, match=message):
        applied.swap_adapter(tmp_path)


def test_a_file_without_settings_is_not_for_a_model_that_scales_otherwise(tmp_path):
    sizes = SIZES | {"lora_alpha": 4}
    adapted(LoraConfig(**sizes), 2).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / CONFIG).unlink()
    with apply(adapted(LoraConfig(**sizes), 1), "1MB", cache=tmp_path) as applied:
        applied.swap_adapter(tmp_path / "other" / FILE)
    with (
        apply(adapted(LoraConfig(**sizes, use_rslora=True), 1), "1MB", cache=tmp_path) as applied,
        pytest.raises(StreamError, match="use_rslora of adapter 'default' is True in the model and False in"),
    ):
        applied.swap_adapter(tmp_path / "other" / FILE)


class Pair:
    """As a pipeline is: components by name."""

    def __init__(self, seed):
        self.components = {
            name: adapted(LoraConfig(**SIZES), seed).get_base_model() for name in ("first", "second")
        }


def test_where_one_component_fails_none_is_swapped(tmp_path, monkeypatch):
    pair, other = Pair(1), Pair(2)
    tensors = {
        f"{name}.{fqn.replace('.default', '')}": value
        for name, module in other.components.items()
        for fqn, value in module.named_parameters()
        if "lora" in fqn
    }
    file = tmp_path / "other.safetensors"
    save_file(tensors, file, {"lora_adapter_metadata": '{"first.lora_alpha": 8, "second.lora_alpha": 8}'})
    calls = []

    def second_fails(*given):
        calls.append(given)
        if len(calls) == 2:
            raise SourceError("the disk is full")
        return with_other_file(*given)

    with apply(pair, "1MB", cache=tmp_path) as applied:
        before = {name: module(X) for name, module in pair.components.items()}
        with monkeypatch.context() as patched:
            patched.setattr(streamed, "with_other_file", second_fails)
            with pytest.raises(SourceError, match="disk is full"):
                applied.swap_adapter(file)
        for name, module in pair.components.items():
            assert torch.equal(module(X), before[name])
        applied.swap_adapter(file)
        for name, module in pair.components.items():
            assert torch.equal(module(X), other.components[name](X))


def test_an_adapter_that_changes_while_it_is_swapped_is_named_and_nothing_has_changed(tmp_path, monkeypatch):
    adapted(LoraConfig(**SIZES), 2).save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / FILE
    model, expected = (adapted(LoraConfig(**SIZES), seed) for seed in (1, 2))
    with apply(model, "1MB", cache=tmp_path / "cache") as applied:
        before, whole = model(X), file.read_bytes()

        def cut(fd, *given):
            os.truncate(file, len(whole) - 4)
            return read_exactly(fd, *given)

        def write_over(program, old, kept):
            (there,) = kept.files
            written = there.read_bytes()
            half = len(written) // 2
            there.write_bytes(written[:half] + bytes(one ^ 1 for one in written[half:]))
            return with_other_file(program, old, kept)

        for where, name, change, message in (
            (tensor_file, "read_exactly", cut, "it has been truncated"),
            (streamed, "with_other_file", write_over, "has other bytes than were written to it"),
            (Path, "is_file", refuse, "other cannot be read .*Input/output error"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(where, name, change)
                with pytest.raises(SourceError, match=message):
                    applied.swap_adapter(tmp_path / "other")
            file.write_bytes(whole)
            assert torch.equal(model(X), before)
        applied.swap_adapter(tmp_path / "other")
        assert torch.equal(model(X), expected(X))


def refuse(*_):
    raise OSError(5, "Input/output error")
