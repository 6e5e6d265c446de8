"""Models stream to the rig through `apply` and `load`, and give the bits that they give there in memory."""

import pytest
import torch
from torch import nn

from penstock import LoadOptions
from penstock.integrations import apply, load
from penstock.schedule.facts.errors import BudgetError
from tests.integrations import models
from tests.integrations.called.odd_modules import (
    WIDTH,
    Blocks,
    Convolving,
    Experts,
    KeepsView,
    Writes,
    inputs,
)
from tests.integrations.called.test_devices_of_called import nbytes, same
from tests.rig import machine

IDS = torch.tensor([[5, 17, 99, 23, 42]])


@pytest.mark.parametrize(
    ("make", "memory", "order"),
    [
        (models.sliding, "300KB", "late"),
        pytest.param(models.t5, "200KB", "lagging", marks=pytest.mark.nightly),
    ],
)
def test_what_is_generated_on_the_rig_is_what_its_library_generates_there(make, memory, order, tmp_path):
    machine.load()
    model = make().to("rig")
    reference = models.twin(model)
    with machine.ordered(order), apply(model, memory, device="rig", cache=tmp_path) as applied:
        assert {p.device for p in model.parameters()} == {torch.device("rig:0")}
        ids = IDS.to("rig")
        got = model.generate(ids, max_new_tokens=4, do_sample=False)
        (component,) = applied.components.values()
        assert component.stats.bytes_moved > 0
        assert component.stats.misses == 0
        assert component.stats.peak_bytes <= component.stats.budget < 300_000
        assert torch.equal(got, reference.generate(ids, max_new_tokens=4, do_sample=False))


def test_numbers_that_a_caller_has_on_the_cpu_stay_there(tmp_path):
    """As torch takes them beside tensors of a device. A model moves them itself, as caches that slide do."""
    machine.load()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x, factor, rows):
            for layer in self.layers:
                x = layer(x) * factor
            return x[: rows.shape[0]], factor + 1, factor.to(x.device)

    model = models.frozen(Scaled()).to("rig")
    reference = models.twin(model)
    x, factor, rows = torch.randn(3, 8).to("rig"), torch.tensor(0.3), torch.empty(2, 0)
    with machine.ordered("late"), apply(model, "1MiB", device="rig", cache=tmp_path):
        got, expected = model(x=x, factor=factor, rows=rows), reference(x, factor, rows)
        assert [one.device for one in got] == [one.device for one in expected]
        assert [str(one.device) for one in got] == ["rig:0", "cpu", "rig:0"]
        assert all(torch.equal(*both) for both in zip(got, expected, strict=True))
        with pytest.raises(RuntimeError, match="on the same device"):
            model(x=x, factor=factor.expand(8), rows=rows)


@pytest.mark.nightly
def test_a_pipeline_draws_on_the_rig_what_it_draws_there_without_streaming(tmp_path):
    machine.load()
    (tmp_path / "vocabulary").mkdir()
    made = models.pipeline(tmp_path / "vocabulary")
    made.save_pretrained(tmp_path / "saved", safe_serialization=True)
    expected = models.picture(made.to("rig"))
    assert sum(weight.nbytes for weight in made.unet.parameters()) > 3_000_000
    with machine.ordered("late"):
        streamed = load(tmp_path / "saved", "3MB", cache=tmp_path / "cache", device="rig")
        streamed.set_progress_bar_config(disable=True)
        for _ in range(2):
            assert torch.equal(models.picture(streamed), expected)
        parts = streamed.penstock_applied.components
        assert parts["vae"].stats.peak_bytes <= parts["vae"].stats.budget
        streamed.penstock_applied.close()


POISONED = LoadOptions(poison=True)

ROOMY = 10 << 20
"""A cap with room for all. The device is measured under it."""


class Tied(nn.Module):
    """A recurrent part between a table and a head that is the table."""

    def __init__(self):
        super().__init__()
        self.table, self.part = nn.Embedding(300, WIDTH), nn.RNN(WIDTH, WIDTH, 2, batch_first=True)
        self.register_buffer("scale", torch.full((40, WIDTH), 0.5))
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.table.weight
        self.spare = nn.Linear(WIDTH, 300)  # which no call reads

    def forward(self, ids):
        return self.head(self.part(self.table(ids))[0] * self.scale[0])


CASES = {
    "blocks": (Blocks, [inputs(n) for n in (1, 1, 2, 1)]),
    "convolving": (Convolving, [torch.ones(1, 8, 16, 16) * n for n in range(3)]),
    "tied": (Tied, [torch.arange(n).reshape(1, -1) for n in (5, 5, 9, 1)]),
    "experts": (Experts, [inputs(n) for n in (1, 1, 2, 1)]),
    "viewed": (KeepsView, [inputs(n) for n in (1, 1, 2, 1)]),
    "written": (Writes, [inputs(n) for n in (1, 1, 2, 1)]),
}


def _made(kind):
    machine.load()
    torch.manual_seed(0)
    return models.frozen(kind())


@pytest.mark.parametrize("name", CASES)
def test_late_kernels_find_the_weights_that_they_read(name, order, tmp_path):
    kind, calls = CASES[name]
    calls = [one.to("rig") for one in calls]
    model, reference = _made(kind), _made(kind).to("rig")
    with torch.no_grad():
        expected = [reference(one) for one in calls]
        before = dict(model.named_parameters())
        with apply(model, nbytes(model) // 2 + (96 << 10), device="rig", cache=tmp_path, options=POISONED):
            assert same([model(one) for one in calls], expected)
    assert all(one is before[fqn] for fqn, one in model.named_parameters())
    state = [one.cpu() for one in reference.state_dict().values()]
    assert same(model.state_dict().values(), state)


@pytest.mark.parametrize("name", ["blocks", "tied"])
def test_no_byte_of_the_device_is_taken_above_the_cap(name, late, tmp_path):
    """At the least memory that errors name, in first calls and in planned ones; then all is given back."""
    kind, calls = CASES[name]
    with torch.no_grad():
        _call_each(kind, calls[:1] * 2, ROOMY, tmp_path)
        memory, least = 1 << 12, 0
        while memory > least:
            least = memory
            memory = _call_each(kind, calls, memory, tmp_path)
    assert least == memory < nbytes(kind())


def _call_each(kind, calls, memory, tmp_path):
    """Make calls within a cap, and return it, or the memory that a refusal names."""
    base, peak = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated
    try:
        with apply(_made(kind), memory, device="rig", cache=tmp_path) as applied:
            for one in calls:
                torch.accelerator.reset_peak_memory_stats()
                applied.target(one.to("rig"))
                assert peak() - base <= memory or memory == ROOMY
        assert torch.accelerator.memory_allocated() == base
    except BudgetError as error:
        return error.floor_bytes or 0
    return memory


def test_the_host_waits_in_first_calls_alone(late, tmp_path):
    model, x = _made(Blocks), inputs().to("rig")
    with torch.no_grad(), apply(model, nbytes(model) // 2, device="rig", cache=tmp_path) as applied:
        for _ in range(3):
            model(x)
        before = machine.blocked()
        outputs = [model(x) for _ in range(3)]
        assert machine.blocked() == before
        (component,) = applied.components.values()
        assert component.stats.bytes_moved > 0
        assert component.stats.misses == 0
    assert same(outputs, [outputs[0]] * 3)


def test_a_model_that_lies_on_the_device_lies_there_again(late, tmp_path):
    model, reference = _made(Tied).to("rig:1"), _made(Tied).to("rig:1")
    model.head.weight = model.table.weight  # which `to` has untied
    ids = torch.arange(7).reshape(1, -1).to("rig:1")
    before = dict(model.named_parameters())
    with torch.no_grad():
        with apply(model, nbytes(model) * 2 // 3, device="rig:1", cache=tmp_path):
            for _ in range(3):
                assert torch.equal(model(ids), reference(ids))
        assert torch.equal(model(ids), reference(ids))
    for fqn, one in model.named_parameters():
        assert one is before[fqn]
        assert one.device == torch.device("rig:1")
    assert model.head.weight is model.table.weight


def test_calls_on_two_streams_in_turn_find_their_weights(order, tmp_path):
    model, reference = _made(Blocks), _made(Blocks).to("rig")
    calls = [inputs(n).to("rig") for n in (1, 1, 1, 2, 1, 1)]
    streams = [torch.accelerator.current_stream(), torch.Stream("rig")]
    with torch.no_grad():
        expected = [reference(one) for one in calls]
        torch.accelerator.synchronize()
        with apply(model, nbytes(model) // 2, device="rig", cache=tmp_path, options=POISONED) as applied:
            outputs = []
            for number, one in enumerate(calls):
                with streams[number % 2]:
                    outputs.append(model(one))
                if number == 4:
                    applied.idle()
            torch.accelerator.synchronize()
            assert [torch.equal(*both) for both in zip(outputs, expected, strict=True)] == [True] * 6


def test_an_error_in_a_step_spoils_no_later_call(order, tmp_path):
    model, reference, x = _made(Blocks), _made(Blocks).to("rig"), inputs().to("rig")

    def fail(*_):
        raise ValueError("in a step")

    with torch.no_grad():
        expected = reference(x)
        with apply(model, nbytes(model) // 2, device="rig", cache=tmp_path, options=POISONED):
            for part in (model.blocks[0].up, model.blocks[2].down, model.head):
                hook = part.register_forward_hook(fail)
                with pytest.raises(ValueError, match="in a step"):
                    model(x)
                hook.remove()
                assert torch.equal(model(x), expected)
