"""What an export tells the libraries, what other threads see of it, and what other tools have done before."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn

from penstock.integrations import apply
from penstock.integrations.calls.assumptions import Assumptions
from penstock.integrations.libraries import as_when_called, refuse_wrapped
from penstock.schedule.facts.errors import PassError
from tests.integrations import models


def flags():
    return torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag


def test_two_threads_that_export_leave_the_flags_as_they_were(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with as_when_called(Assumptions((), True)):
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with as_when_called(Assumptions((), True)):
        assert flags() == (False, False)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(60)
    leave.set()
    thread.join()
    assert flags() == (True, True)


def test_models_of_two_threads_are_exported_at_once(tmp_path):
    ids = torch.arange(6)[None]

    def run(model):
        expected = model(input_ids=ids).logits
        with apply(model, "1MB", cache=tmp_path, example=models.nothing):
            return torch.equal(model(input_ids=ids).logits, expected)

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        assert all(pool.map(run, [models.llama(num_hidden_layers=layers) for layers in (1, 2)]))
    assert flags() == (False, False)


# What other tools have done to a module before.


def recorder():
    """A module whose second layer writes down what it computes."""
    model, seen = models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), []

    def record(module, given, output):
        seen.append(output)

    return model, record, seen


@pytest.mark.parametrize("form", ["a function", "a partial", "before the call"])
def test_a_hook_on_a_part_is_refused_by_name_until_it_is_removed(form, tmp_path):
    model, record, seen = recorder()
    match form:
        case "a function":
            handle = model[1].register_forward_hook(record)
        case "a partial":
            handle = model[1].register_forward_hook(functools.partial(record))
        case "before the call":
            handle = model[1].register_forward_pre_hook(lambda module, given: seen.append(given))
    name = "<lambda>" if form == "before the call" else "record"
    with pytest.raises(PassError, match=rf"1 in Sequential has the hook .*{name}, .*remove it"):
        apply(model, "1MB", cache=tmp_path)
    assert seen == []
    handle.remove()
    with apply(model, "1MB", cache=tmp_path):
        model(torch.ones(2, 8))


def test_a_model_that_streams_is_not_applied_again_and_says_so(tmp_path):
    model = models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with apply(model, "1MB", cache=tmp_path):
        with pytest.raises(PassError, match=r"Sequential streams already: call restore\(\)"):
            apply(model, "2MB", cache=tmp_path)
        model(torch.ones(2, 8))


def test_hooks_with_which_libraries_compute_are_exported(tmp_path):
    model = models.llama(num_hidden_layers=1)
    ids = torch.arange(6)[None]
    expected = model(ids, output_hidden_states=True).hidden_states  # transformers collects them with hooks
    assert any(child._forward_hooks for child in model.modules())
    with apply(model, "1MB", example=models.nothing, cache=tmp_path):
        got = model(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_what_diffusers_does_to_parts_is_refused_by_its_name():
    def parts():
        return models.frozen(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    cast, offloaded = parts(), parts()
    apply_layerwise_casting(cast, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    cpu = torch.device("cpu")
    apply_group_offloading(offloaded, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    with pytest.raises(PassError, match=r"unet has layerwise casting .* without enable_layerwise_casting"):
        refuse_wrapped(cast, "unet")
    with pytest.raises(
        PassError, match=r"unet has hooks of diffusers \(.*group_offloading.*\): load it with"
    ):
        refuse_wrapped(offloaded, "unet")
