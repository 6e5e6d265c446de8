"""A module has one key in every process, and another one after any change that its exports could show."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from penstock.integrations.keys.module import ModuleKey
from penstock.schedule.facts.errors import PassError
from tests.forked import run_forked
from tests.integrations import models

# peft asks transformers for what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

HERE = torch.device("cpu")


def key(module: nn.Module) -> str:
    return ModuleKey(module, ["forward"], HERE).now()


def replaced(path, value):
    """A change that gives what has a path in modules another value."""
    module, _, name = path.rpartition(".")

    def change(monkeypatch, _):
        owner = import_module(module) if module in sys.modules else None
        if owner is None:
            module_name, _, kind = module.rpartition(".")
            owner = getattr(import_module(module_name), kind)
        monkeypatch.setattr(owner, name, value)

    return change


def on_model(change):
    return lambda _, model: change(model)


def other(*_, **__):
    """Stands in the place of any function."""


LLAMA = "transformers.models.llama.modeling_llama"

CHANGES = {
    "a method of a class": replaced(f"{LLAMA}.LlamaRMSNorm.forward", other),
    "a function that methods call": replaced(f"{LLAMA}.rotate_half", other),
    "a method of a cache": replaced("transformers.cache_utils.DynamicLayer.update", other),
    "a function behind a registry": replaced("transformers.integrations.sdpa_attention.repeat_kv", other),
    "a function behind masks": replaced("transformers.masking_utils.sdpa_mask", other),
    "a flag of a module": replaced("transformers.integrations.sdpa_attention._is_torch_npu_available", True),
    "a function of torch": replaced("torch.nn.functional.silu", other),
    "a method of torch": replaced("torch.nn.Linear.forward", other),
    "another attention in the registry": lambda monkeypatch, _: monkeypatch.setitem(
        import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS._global_mapping, "own", other
    ),
    "a setting of torch": lambda monkeypatch, _: monkeypatch.setattr(
        torch.backends.mha, "get_fastpath_enabled", lambda: "changed"
    ),
    "a version": lambda monkeypatch, _: monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.0"),
    "an entry of the configuration": on_model(lambda model: setattr(model.config, "rms_norm_eps", 0.1)),
    "the attention": on_model(lambda model: model.set_attn_implementation("eager")),
    "an attribute": on_model(lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.3)),
    "a new attribute": on_model(lambda model: setattr(model.model.layers[1], "own", [{"a": (1, 2.0)}])),
    "an array": on_model(lambda model: setattr(model, "table", np.arange(3))),
    "a buffer's value": on_model(lambda model: model.model.rotary_emb.inv_freq.mul_(2)),
    "a tensor among the attributes": on_model(lambda model: setattr(model, "scale", torch.ones(2))),
    "a dtype": on_model(lambda model: model.lm_head.to(torch.bfloat16)),
    "an order in memory": on_model(
        lambda model: setattr(
            model.lm_head, "weight", nn.Parameter(torch.empty(64, 128).t(), requires_grad=False)
        )
    ),
    "a tie": on_model(lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight)),
    "a hook": on_model(lambda model: model.model.register_forward_hook(other)),
    "a method of the object": on_model(lambda model: setattr(model.lm_head, "forward", lambda x: x)),
    "another class": on_model(lambda model: setattr(model.model, "norm", nn.Identity())),
}


@pytest.fixture(scope="module")
def before():
    return key(models.llama())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_changes_the_key(change, before, monkeypatch):
    model = models.llama()
    assert key(model) == before
    change(monkeypatch, model)
    assert key(model) != before


def test_values_of_parameters_and_what_generate_is_told_do_not_count(before):
    model = models.llama()
    model.lm_head.weight.data.mul_(2)
    model.generation_config.temperature = 0.3
    model.register_forward_hook(other)  # called as ever, beside what is exported
    assert key(model) == before


def test_a_function_that_a_closure_holds_counts(before):
    def hook(scale):
        return lambda module, given, output: output * scale

    keys = set()
    for scale in (2, 3):
        model = models.llama()
        model.model.register_forward_hook(hook(scale))
        keys.add(key(model))
    model = models.llama()
    model.model.norm.forward = functools.partial(model.model.norm.forward, own=1)
    assert len(keys | {key(model), before}) == 4


MODULE = """
import os
import torch
from torch import nn
from {helper} import helped

FLAG = 1

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def unused(self, x):
        return x + 3

    def forward(self, x):
        import {late}
        factor = 2 if os.environ.get("OWN_FACTOR") else 1
        return helped(self.linear(x)) * FLAG * factor + {late}.value()
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Makes the class of three files, of which one says it, one helps and one is imported late."""
    monkeypatch.syspath_prepend(tmp_path)
    names = {"helper": f"helper_{tmp_path.name}", "late": f"late_{tmp_path.name}"}

    def make(
        text=MODULE, helper="def helped(x):\n    return x.relu()\n", late="def value():\n    return 1\n"
    ):
        (tmp_path / f"own_{tmp_path.name}.py").write_text(text.format(**names))
        (tmp_path / f"{names['helper']}.py").write_text(helper)
        (tmp_path / f"{names['late']}.py").write_text(late)
        for name in (*names.values(), f"own_{tmp_path.name}"):
            sys.modules.pop(name, None)
        invalidate_caches()
        import_module(names["late"])
        torch.manual_seed(0)
        return import_module(f"own_{tmp_path.name}").Scaled().eval()

    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which goes by whole seconds
    yield make
    for name in (*names.values(), f"own_{tmp_path.name}"):
        sys.modules.pop(name, None)


def test_one_line_of_a_users_files_changes_the_key(written, monkeypatch):
    before = key(written())
    assert key(written()) == before
    keys = {
        "in its method": key(written(MODULE.replace("* FLAG", "- FLAG"))),
        "a flag": key(written(MODULE.replace("FLAG = 1", "FLAG = 3"))),
        "where no call comes": key(written(MODULE.replace("x + 3", "x + 4"))),
        "in a helper": key(written(helper="def helped(x):\n    return x.sin()\n")),
        "in what is imported late": key(written(late="def value():\n    return 2\n")),
    }
    assert len({before, *keys.values()}) == 1 + len(keys)
    monkeypatch.setenv("OWN_FACTOR", "1")
    assert key(written()) != before


def test_a_flag_that_is_set_at_run_time_changes_the_key(written):
    model = written()
    before = key(model)
    sys.modules[type(model).__module__].FLAG = 5
    assert key(model) != before


SETTINGS = """
import types
options = types.SimpleNamespace(scale={scale})
"""


def test_a_line_of_a_file_of_constants_changes_the_key(written):
    text = MODULE.replace("{late}.value()", "{late}.options.scale")
    before = key(written(text, late=SETTINGS.format(scale=1)))
    keys = {key(written(text, late=SETTINGS.format(scale=2)))}
    keys |= {key(written(text, late=SETTINGS.format(scale=1) + "other = 3"))}
    assert len({before, *keys}) == 3
    model = written(text, late=SETTINGS.format(scale=1))
    assert key(model) == before
    late = next(module for name, module in sys.modules.items() if name.startswith("late_"))
    late.options.scale = 2
    assert key(model) != before


class Named(nn.Module):
    """Reads attributes of its class by their names."""

    scale, shift = 1.0, 2.0

    def forward(self, x):
        return [getattr(self, name) for name in ("shift", "other")] + [getattr(self, "scale")]  # noqa: B009


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_an_attribute_of_a_class_that_is_read_by_name_counts(name, monkeypatch):
    before = key(Named())
    monkeypatch.setattr(Named, name, 3.0)
    assert key(Named()) != before


class Holder:
    """An object of a class in Python, with a cycle."""

    def __init__(self, value: object) -> None:
        self.value, self.itself = value, self


def test_an_object_is_what_it_holds(before):
    keys = []
    for value in ({"a", "b", "c"}, {"c", "a", "b"}, {"a"}, torch.ones(3), torch.zeros(3)):
        model = nn.Linear(2, 2)
        model.held = Holder(value)
        keys.append(key(model))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    "value", [torch.Generator(), iter([1]), memoryview(b"a")], ids=lambda v: type(v).__name__
)
def test_what_says_nothing_of_what_it_holds_is_refused_by_its_place(value):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].held = [1, value]
    with pytest.raises(PassError, match=r"0\.held\[1\] is a .*, and what that holds is not known"):
        key(model)


SCRIPT = """
import sys, tempfile, pathlib
from peft import LoraConfig, get_peft_model
from tests.integrations import models
from tests.integrations.keys.test_module_key import key, several
print(*(key(one) for one in several(pathlib.Path(tempfile.mkdtemp()))))
"""


def several(folder: Path) -> list[nn.Module]:
    """Models of three libraries, one of them with an adapter."""
    made = models.pipeline(folder)
    adapted = get_peft_model(models.llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    return [models.llama(), models.t5(), made.unet, made.vae, made.text_encoder, adapted.base_model.model]


def test_another_process_has_the_same_keys(tmp_path):
    done = run_forked(SCRIPT, warnings="ignore")
    assert done.status == 0, done.err
    keys = [key(one) for one in several(tmp_path)]
    assert done.out.split() == keys
    assert len(set(keys)) == len(keys)
