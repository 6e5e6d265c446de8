"""What a `.pte` and a `.ptd` hold: delegates that do as the page says compute what the model does."""

import copy
import hashlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock
from penstock.backends.executorch import PenstockPartitioner
from penstock.schedule.payload.codec import verify_payload
from tests.backends.executorch.conftest import LEAST
from tests.backends.executorch.delegating import Delegates, Outer
from tests.backends.executorch.et_models import Decoder, Mlp
from tests.quantised_models import Hidden, Shown, linears, quantise


def storage_of(lowered, fqn):
    (weight,) = (w for w in lowered.exported.payload.weights if w.fqn == fqn)
    return weight.parts[0].storage


def test_weights_lie_in_the_data_file_aligned_and_once(lowered_mlp, mlp):
    exported = lowered_mlp.exported
    assert [w.fqn for w in exported.payload.weights] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    for weight in exported.payload.weights:
        place = exported.place_of(weight.parts[0])
        assert place is not None
        path, offset = place
        values = mlp.get_parameter(weight.fqn).detach().numpy().tobytes()
        assert (path.name, offset % 4096) == ("weights.ptd", 0)
        assert path.read_bytes()[offset : offset + len(values)] == values
    total = sum(s.nbytes for s in exported.payload.storages)
    # The head of the file, and four entries that begin at multiples of 4,096 bytes.
    assert (lowered_mlp.path.parent / "weights.ptd").stat().st_size < total + 5 * 4096


def test_hashes_are_those_of_the_bytes(lowered_mlp):
    payload = lowered_mlp.exported.payload
    for storage in payload.storages:
        file = payload.files[storage.extents[0].file]
        path, offset = lowered_mlp.exported.places[file.key]
        found = hashlib.sha256(path.read_bytes()[offset : offset + file.nbytes]).hexdigest()
        assert (file.kind, file.key) == ("named", f"penstock.storage.{found}")
        assert storage.sha256 == found


@pytest.mark.usefixtures("executorch_python")
def test_a_cache_is_one_state_for_all_methods(lowered_decoder, decoder):
    delegates, alone = Delegates(lowered_decoder.exported), copy.deepcopy(decoder)
    calls = [("prefill", torch.arange(8) * 7, torch.arange(8))]
    calls += [("decode", torch.tensor([3 * k]), torch.tensor([k])) for k in (8, 9)]
    for method, tokens, positions in calls:
        found = Outer(lowered_decoder.edge, delegates, method)(tokens, positions)
        torch.testing.assert_close(found, alone(tokens, positions), rtol=1e-4, atol=1e-4)
    assert len(delegates.states) == 2
    assert delegates.seen == [(graph, region) for graph in (0, 1, 1) for region in range(10)]


def test_a_state_that_begins_as_zeros_is_not_stored(lowered_decoder):
    storages = lowered_decoder.exported.payload.storages
    keys, values = (storages[storage_of(lowered_decoder, name)] for name in ("keys", "values"))
    assert (keys.kind, keys.extents) == ("mutable", ())
    assert (values.kind, len(values.extents)) == ("mutable", 1)


def test_a_tied_weight_is_stored_once_under_all_names(lowered_decoder):
    assert storage_of(lowered_decoder, "embed.weight") == storage_of(lowered_decoder, "head.weight")
    payload = lowered_decoder.exported.payload
    total = sum(storage.nbytes for storage in payload.storages)
    weights = {name: p.numel() * 4 for name, p in Decoder().named_parameters()}  # without the second name
    assert total == sum(weights.values()) + 3 * 32 * 64 * 4 - 32 * 32 * 4
    for trace in payload.traces:
        readers = [
            step.name for step in trace.steps if storage_of(lowered_decoder, "embed.weight") in step.reads
        ]
        assert len(readers) == 2


def test_exporting_leaves_no_copy_of_a_tied_weight(lowered_decoder):
    for method in ("prefill", "decode"):
        program = lowered_decoder.edge.exported_program(method)
        held = [*program.state_dict.values(), *program.constants.values()]
        assert all(value.numel() < 64 for value in held), [tuple(value.shape) for value in held]


def test_regions_say_what_delegates_need(lowered_decoder):
    exported = lowered_decoder.exported
    for trace in exported.payload.traces:
        regions = [one for one in exported.regions if one.graph == trace.graph]
        assert [one.region for one in regions] == list(range(10))
        assert [one.regions for one in regions] == [10] * 10
        assert [step for one in regions for step in range(*one.steps)] == list(range(len(trace.steps)))
        for one in regions:
            reads = {s for step in trace.steps[slice(*one.steps)] for s in step.reads}
            appended = {a.storage for a in one.appended}
            streamable = {s for s in appended if exported.payload.storages[s].kind == "streamable"}
            assert reads == streamable
    # One code for q, k and v of a method.
    assert len(exported.programs) == 16


def test_a_ladder_of_verified_plans_is_carried(lowered_decoder):
    payload = lowered_decoder.exported.payload
    verify_payload(payload)
    budgets = [plan.budget for plan in payload.plans]
    assert budgets == sorted(budgets)
    assert payload.plans[-1].streamed_bytes == 0
    assert payload.plans[0].streamed_bytes > 0
    kept = storage_of(lowered_decoder, "up.weight")
    for plan in payload.plans:
        start = plan.arena.layout[kept]
        whole = any(r.start <= start and start + 64 * 256 * 4 <= r.stop for r in plan.resident)
        assert whole or kept in plan.outside
    assert all(one.budget is None for one in lowered_decoder.exported.regions)


def test_the_budget_that_is_asked_for_has_a_plan(lowered_mlp):
    exported = lowered_mlp.exported
    budget = exported.weight_bytes * 7 // 10
    assert [one.budget for one in exported.regions] == [budget, budget]
    assert budget in [plan.budget for plan in exported.payload.plans]
    assert exported.plan("70%").budget == budget
    with pytest.raises(penstock.BudgetError, match=r"is below that of the lowest plan of model\.pte"):
        exported.plan(4096)


@pytest.mark.usefixtures("executorch_python")
@pytest.mark.parametrize("kind", [Shown, Hidden])
def test_quantised_weights_are_read_by_parts(lower, kind):
    model, x = quantise(linears(64, 2), kind), torch.randn(2, 64)
    lowered = lower(torch.export.export(model, (x,)))
    parts = {w.fqn: [p.name for p in w.parts] for w in lowered.exported.payload.weights if len(w.parts) > 1}
    assert parts == {"0.weight": ["data_", "scale"], "2.weight": ["data_", "scale"]}
    delegates = Delegates(lowered.exported)
    torch.testing.assert_close(Outer(lowered.edge, delegates)(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(delegates.seen) == 2


class Constants(nn.Module):
    """Holds a tensor that export calls by a number of its own."""

    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.value = torch.full((64, 64), value)

    def forward(self, x):
        return self.linear(x) @ self.value


@pytest.mark.usefixtures("executorch_python")
def test_constants_of_one_name_do_not_collide(lower):
    one, other = Constants(0.5), Constants(2.0)
    other.linear = one.linear
    x = torch.randn(2, 64)
    lowered = lower({"one": torch.export.export(one, (x,)), "other": torch.export.export(other, (x,))})
    delegates = Delegates(lowered.exported)
    for name, model in (("one", one), ("other", other)):
        torch.testing.assert_close(Outer(lowered.edge, delegates, name)(x), model(x), rtol=1e-5, atol=1e-5)
    names = sorted(w.fqn for w in lowered.exported.payload.weights)
    assert names == ["linear.bias", "linear.weight", "one.value", "other.value"]


def test_a_program_without_values_is_planned(lower):
    program = penstock.fake_export(Mlp, (torch.randn(2, 128),))
    lowered = lower(program, least=1 << 20)
    payload = lowered.exported.payload
    assert (payload.files, lowered.exported.places) == ((), {})
    assert len(payload.weights) == 6  # the norm's too: ExecuTorch cannot store what it does not have
    assert not list(lowered.path.parent.glob("*.ptd"))
    assert replace(payload.storages[0]).nbytes == 128 * 256 * 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.other = nn.Linear(128, 256, bias=False), nn.Linear(128, 256, bias=False)
        self.other.weight = self.up.weight

    def forward(self, x):
        return self.up(x) + self.other(x)


def test_a_partitioner_forgets_the_program_before(lower, mlp):
    """Of which names, and that it had no values, would show in the next."""
    used, x = PenstockPartitioner(least=LEAST), torch.randn(2, 128)
    lower(penstock.fake_export(Tied, (x,)), used)
    found = lower(torch.export.export(mlp, (x,)), used).exported
    expected = lower(torch.export.export(mlp, (x,)), PenstockPartitioner(least=LEAST)).exported
    assert [one.fqn for one in found.payload.weights] == [one.fqn for one in expected.payload.weights]
    assert found.payload == expected.payload
    assert len(found.regions) == 2
