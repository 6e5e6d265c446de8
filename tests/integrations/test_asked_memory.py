"""`memory=`: bytes, a percentage of the weights, or what is free; `verbose=` says what was chosen."""

import os

import pytest
import torch
from peft import LoraConfig, get_peft_model

from penstock.integrations import apply, cap, load
from penstock.runtime.system.limits import Limit
from penstock.schedule.facts.errors import BudgetError
from tests.integrations import models

GIB = 1 << 30
IDS = torch.tensor([[5, 17, 99, 3]])


@pytest.fixture
def saved(tmp_path):
    """A model, and its folder."""
    model = models.llama(num_hidden_layers=1)
    model.save_pretrained(tmp_path / "saved")
    return model, tmp_path / "saved"


@pytest.fixture
def free(monkeypatch):
    """Lets a control group have so many bytes left."""
    return lambda left: monkeypatch.setattr(cap, "memory_limit", lambda: Limit(left, "control group /one"))


def both(saved, cache, memory):
    """What `apply` and `load` make of a memory."""
    model, folder = saved
    return [apply(model, memory, cache=cache), load(folder, memory, cache=cache).penstock_applied]


@pytest.mark.parametrize(("share", "part"), [("50%", 0.5), ("12.5%", 0.125), (" 200 % ", 2)])
def test_a_percentage_is_of_all_weights(share, part, saved, tmp_path):
    weights = sum(weight.nbytes for weight in saved[0].parameters())
    for applied in both(saved, tmp_path, share):
        assert applied.memory == int(weights * part)
        applied.memory = "100%"
        assert applied.memory == weights


@pytest.mark.parametrize("memory", ["0%", "abc%", "-5%", "%", "0.5", 0, -1])
def test_what_is_no_memory_is_refused_before_anything_changes(memory, saved, tmp_path):
    model, folder = saved
    for call in (lambda: apply(model, memory, cache=tmp_path), lambda: load(folder, memory)):
        with pytest.raises(BudgetError, match=r"^memory .*: (write|give) "):
            call()
    model(IDS)


def test_the_default_is_what_is_free_less_a_fifth(saved, tmp_path, free, said):
    free(GIB)
    for applied in both(saved, tmp_path, None):
        assert applied.memory == GIB - GIB // 5
        free(2 * GIB)
        applied.memory = None
        assert applied.memory == 2 * GIB - 2 * GIB // 5
        free(GIB)
    line = "memory is 819.20 MiB: control group /one has 1.00 GiB left, of which 204.80 MiB are a reserve"
    assert said().splitlines().count(line) == 2


def test_the_reserve_is_what_a_process_takes_beside_memory_at_least(saved, tmp_path, free):
    free(cap.SLACK + 4096)
    assert [applied.memory for applied in both(saved, tmp_path, None)] == [4096, 4096]
    free(cap.SLACK)
    with pytest.raises(
        BudgetError, match=r"has 64\.00 MiB of memory left, of which 64\.00 MiB are a reserve"
    ):
        load(saved[1])


def test_the_default_counts_what_apply_has_given_back(saved, tmp_path, monkeypatch):
    """What is free is asked once the weights are out of memory."""
    model, _ = saved
    weights = list(model.parameters())

    def limit():
        return Limit(GIB - sum(weight.untyped_storage().nbytes() for weight in weights), "the system")

    monkeypatch.setattr(cap, "memory_limit", limit)
    with apply(model, cache=tmp_path) as applied:
        assert applied.memory == GIB - GIB // 5


def test_a_system_that_does_not_say_what_is_free_asks_for_memory(saved, monkeypatch):
    monkeypatch.setattr(cap, "memory_limit", lambda: None)
    with pytest.raises(BudgetError, match="does not say how much memory is free: give memory="):
        load(saved[1])


def test_the_default_of_a_simulated_device_is_its_own_memory(saved):
    applied = load(saved[1], device="sim:rtx4090").penstock_applied
    assert applied.memory == 24_000_000_000 * 4 // 5


def test_a_percentage_has_to_hold_what_is_trained(saved, tmp_path):
    model = get_peft_model(saved[0], LoraConfig(r=32, target_modules=["q_proj", "v_proj"]))
    with pytest.raises(BudgetError, match="two moments of AdamW take"):
        apply(model, "10%", train=True, cache=tmp_path)
    model(IDS).logits.sum().backward()  # as it was


# verbose=


def test_verbose_prints_the_log_of_that_model_alone(saved, tmp_path, free, monkeypatch, capsys):
    monkeypatch.delenv("PENSTOCK_LOG", raising=False)
    free(GIB)
    model, folder = saved
    quiet = load(folder)
    assert capsys.readouterr() == ("", "")
    for call in (lambda: load(folder, verbose=True), lambda: apply(model, verbose=True, cache=tmp_path)):
        call()
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("penstock: memory is 819.20 MiB: control group /one has ") == 1
    assert err.count("penstock: LlamaForCausalLM is ready after ") == 1
    model(IDS)
    model(IDS)
    lines = capsys.readouterr().err.splitlines()
    assert [" ".join(line.split()[:3]) for line in lines] == [
        "penstock: LlamaForCausalLM ran",
        "penstock: LlamaForCausalLM streams",
    ]
    quiet(IDS)
    assert capsys.readouterr() == ("", "")


def test_verbose_does_not_print_what_the_variable_prints(saved, monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "PENSTOCK_LOG", "info")  # whose handler would be there from the start
    load(saved[1], "1MB", verbose=True)
    assert capsys.readouterr() == ("", "")


# What was read.


def test_bytes_read_are_those_of_the_first_call_and_of_what_is_loaded(saved, tmp_path):
    weights = sum(weight.nbytes for weight in saved[0].parameters())
    for applied in both(saved, tmp_path, "100MB"):
        assert applied.bytes_read == 0
        read = []
        for _ in range(3):
            applied.target(IDS)
            read.append(applied.bytes_read)
        assert read == [weights, 2 * weights, 2 * weights]
        applied.idle()
        applied.target(IDS)
        assert applied.bytes_read == 3 * weights


def test_bytes_read_count_what_streams(saved, tmp_path):
    (applied, _) = both(saved, tmp_path, "60%")
    for _ in range(4):
        applied.target(IDS)
    (component,) = applied.components.values()
    before = applied.bytes_read
    assert component.plan.streamed_bytes > 0
    for _ in range(5):
        applied.target(IDS)
    # Reads for a call may end after the call before it, and those for the next one before it begins.
    streamed = component.plan.streamed_bytes
    assert 4 * streamed <= applied.bytes_read - before <= 6 * streamed
    counted = component.stats
    applied.idle()
    assert applied.bytes_read >= counted.bytes_moved
