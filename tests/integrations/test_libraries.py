"""What other tools have done to a model, and several models at once."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn

from penstock.integrations import apply
from penstock.schedule.facts.errors import PassError
from tests.integrations import models


def test_models_of_two_threads_stream_at_once(tmp_path):
    ids = torch.arange(6)[None]

    def run(model):
        expected = model(input_ids=ids).logits
        with apply(model, "1MB", cache=tmp_path):
            return all(torch.equal(model(input_ids=ids).logits, expected) for _ in range(3))

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        assert all(pool.map(run, [models.llama(num_hidden_layers=layers) for layers in (1, 2)]))


@pytest.mark.parametrize("form", ["a function", "a partial", "before the call", "on all modules"])
def test_hooks_run_as_they_do_in_memory(form, tmp_path):
    model, seen = models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), []

    def record(module, given, output):
        seen.append(output)

    match form:
        case "a function":
            handle = model[1].register_forward_hook(record)
        case "a partial":
            handle = model[1].register_forward_hook(functools.partial(record))
        case "before the call":
            handle = model[1].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        case "on all modules":
            handle = nn.modules.module.register_module_forward_hook(record)
    x = torch.ones(2, 8)
    model(x)
    expected = list(seen)
    with apply(model, "1MB", cache=tmp_path):
        for _ in range(3):
            seen.clear()
            model(x)
            assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))
    handle.remove()


def test_a_model_that_streams_is_not_applied_again_and_says_so(tmp_path):
    model = models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with apply(model, "1MB", cache=tmp_path):
        with pytest.raises(PassError, match=r"with it streams already: restore\(\) that first"):
            apply(model, "2MB", cache=tmp_path)
        model(torch.ones(2, 8))


def test_hidden_states_that_transformers_collects_with_hooks(tmp_path):
    model = models.llama(num_hidden_layers=1)
    ids = torch.arange(6)[None]
    expected = model(ids, output_hidden_states=True).hidden_states
    assert any(child._forward_hooks for child in model.modules())
    with apply(model, "1MB", cache=tmp_path):
        for _ in range(2):
            got = model(ids, output_hidden_states=True).hidden_states
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_what_moves_or_converts_weights_in_each_call_is_refused_by_its_name(tmp_path):
    def parts():
        return models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    cast, offloaded = parts(), parts()
    apply_layerwise_casting(cast, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    cpu = torch.device("cpu")
    apply_group_offloading(offloaded, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    for model, hook in ((cast, "layerwise_casting"), (offloaded, "group_offloading")):
        with pytest.raises(PassError, match=rf"Sequential has a hook of diffusers .*\({hook}\): load"):
            apply(model, "1MB", cache=tmp_path)
