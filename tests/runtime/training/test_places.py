"""What a forward keeps lies among the weights: gradients equal PyTorch's, and other orders are refused."""

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.passes.annotate import annotate_with_values
from penstock.passes.training.facts import BACKWARD, FORWARD
from penstock.runtime.training.module import TrainingModule
from penstock.schedule.facts.errors import PassError, StreamError
from tests.engines import ENGINES
from tests.hunt import sampled
from tests.training_models import DECODER, NORMED

MODELS = {"decoder": DECODER, "normed": NORMED}


@pytest.fixture(scope="module", params=MODELS)
def trained(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def program(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("places") / "trained.penstock"
    return penstock.compile_training(
        trained.model(), path, example=trained.inputs(), trainable=trained.patterns, spill=True
    )


def loaded(program):
    module = program.load("100%", options=LoadOptions(engine="python"))
    assert isinstance(module, TrainingModule)
    return module


def loss_of(trained, module, seed=0):
    torch.manual_seed(seed)
    return trained.loss(module(*trained.inputs()))


def gradients(module):
    found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad()
    return found


def produced(program):
    return {s for s, one in enumerate(program.payload.storages) if one.kind == "produced"}


def test_each_place_is_written_once_in_the_forward_and_read_in_the_backward(program):
    traces = {trace.method: trace for trace in program.payload.traces}
    written = [s for step in traces[FORWARD].steps for s in step.writes]
    assert len(written) > 3
    assert sorted(written) == sorted(produced(program))
    assert produced(program) <= {s for step in traces[BACKWARD].steps for s in step.reads}
    assert not any(step.writes for step in traces[BACKWARD].steps)
    assert all(not (step.reads and step.writes) for step in traces[FORWARD].steps)
    storages = program.payload.storages
    assert all(storages[s].nbytes >= 4096 and not storages[s].extents for s in produced(program))
    values = {weight.parts[0].storage for weight in program.payload.weights if weight.role == "value"}
    assert values == produced(program)


def test_no_value_that_has_a_place_is_kept_by_autograd(trained, program):
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    with loaded(program) as module, torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss_of(trained, module)
        given = {one.data_ptr() for one in (*module.parameters(), *module.buffers())}
    assert seen
    kept = {one.data_ptr(): one.nbytes for one in seen if one.data_ptr() not in given}
    assert sum(kept.values()) < sum(program.payload.storages[s].nbytes for s in produced(program)) / 2


def test_a_second_forward_is_refused_until_the_first_is_spent(trained, program):
    plain = trained.model()
    loss_of(trained, plain).backward()
    wanted = gradients(plain)
    with loaded(program) as module:
        first = loss_of(trained, module)
        with pytest.raises(StreamError, match=r"waits for its backward.*spill=False"):
            loss_of(trained, module)
        with torch.no_grad(), pytest.raises(StreamError, match="waits for its backward"):
            loss_of(trained, module)
        first.backward()
        found = gradients(module)
        assert found
        assert all(torch.equal(found[name], wanted[name]) for name in found)
        with torch.no_grad():
            loss_of(trained, module)


def test_a_second_backward_is_refused(trained, program):
    with loaded(program) as module:
        loss = loss_of(trained, module)
        loss.backward(retain_graph=True)
        with pytest.raises(StreamError, match=r"first backward.*spill=False"):
            loss.backward()


def test_a_forward_that_is_dropped_or_fails_leaves_nothing(trained, program):
    plain = trained.model()
    loss_of(trained, plain).backward()
    wanted = gradients(plain)
    with loaded(program) as module:
        dropped = loss_of(trained, module)
        del dropped
        with pytest.raises(StreamError, match="input"):
            module(*(one[:1, :1] for one in trained.inputs()))
        loss_of(trained, module).backward()
        found = gradients(module)
        assert found
        assert all(torch.equal(found[name], wanted[name]) for name in found)


BUDGETS = [
    (engine, arena, share)
    for j, engine in enumerate(ENGINES)
    for k, arena in enumerate(("contiguous", "paged"))
    for share in ((0.4, 0.0) if (j + k) % 2 else (0.0, 0.4))
]
"""Every second one has each engine with each arena, and each share with each of both."""


@pytest.mark.random
@pytest.mark.parametrize(("engine", "arena", "share"), sampled(BUDGETS, 2))
def test_at_any_budget_gradients_are_those_of_the_model(engine, arena, share, trained, program):
    floor = program.floor(arena=arena)
    budget = floor + int(share * (program.largest_budget - floor))
    plain, rounds = trained.model(), 3
    with program.load(budget, options=LoadOptions(engine=engine, arena=arena, poison=True)) as module:
        for seed in range(rounds):
            loss_of(trained, plain, seed).backward()
            loss_of(trained, module, seed).backward()
            wanted, found = gradients(plain), gradients(module)
            assert found
            assert all(torch.equal(found[name], wanted[name]) for name in found)
        stats, out = module.stats, moved(module.plan, "out")
    assert out or share
    assert stats.bytes_written == rounds * out
    assert stats.misses == 0
    assert stats.peak_bytes <= budget


def moved(plan, direction):
    transfers = [one for schedule in plan.schedules for one in schedule.transfers]
    return sum(one.stop - one.start for one in transfers if one.direction == direction)


def test_on_the_simulated_device(trained, program):
    plain = trained.model()
    with program.load(program.floor(device="sim"), device="sim") as module:
        for seed in range(2):
            loss_of(trained, plain, seed).backward()
            loss_of(trained, module, seed).backward()
            wanted, found = gradients(plain), gradients(module)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert module.stats.bytes_written == 2 * moved(module.plan, "out") > 0
        assert module.stats.misses == 0


def test_spilling_is_for_the_eager_lowering(tmp_path):
    with pytest.raises(PassError, match="lowering='eager'"):
        penstock.compile_training(
            DECODER.model(),
            tmp_path / "x.penstock",
            example=DECODER.inputs(),
            trainable=DECODER.patterns,
            spill=True,
            lowering="inductor",
        )


def test_other_programs_have_no_places():
    exported = torch.export.export(torch.nn.Linear(64, 64), (torch.randn(64, 64),))
    payload = annotate_with_values(exported).payload
    assert all(one.kind == "streamable" for one in payload.storages)
    assert all(not step.writes for trace in payload.traces for step in trace.steps)
