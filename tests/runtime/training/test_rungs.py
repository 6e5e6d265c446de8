"""What is kept for a backward: the same bits whatever is kept, bytes as counted, and the rung that fits."""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock import LoadOptions
from penstock.passes.lowering.archive import open_programs, read_code
from penstock.passes.training.facts import RUNGS
from penstock.runtime.training.module import rung_bytes
from penstock.schedule.facts.errors import BudgetError, PassError, PlanError
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401
from tests.hunt import nightly_but
from tests.runtime.training.conftest import DTYPES
from tests.training_models import DECODER, NORMED

LENGTHS = (16, 40)


def tokens(length):
    given = torch.randint(0, 96, (2, length), generator=torch.Generator().manual_seed(length))
    return given, given.roll(-1, 1)


@pytest.fixture
def program(decoders):
    return decoders[torch.float32]


def train(module):
    """The losses and the last gradients of a few steps of AdamW, over batches of several lengths."""
    optimiser = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step, length in enumerate((*LENGTHS, *LENGTHS)):
        optimiser.zero_grad()
        torch.manual_seed(step)
        loss = module(*tokens(length))[0]
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return losses + [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("dtype", nightly_but({torch.float32}, DTYPES))
def test_steps_equal_those_of_pytorch(decoders, dtype, rung):
    expected = train(DECODER.model(dtype))
    program = decoders[dtype]
    with program.load(
        program.floor(arena="contiguous"),
        options=LoadOptions(activations=rung, poison=True, arena="contiguous"),
    ) as module:
        found = train(module)
        assert module.activations == rung
        assert module.stats.misses == 0
    assert len(found) == len(expected) == 4 + 12
    assert all(one.any() for one in found)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def counted(program, length):
    """The bytes that are kept for batches of a length."""
    with open_programs(program.path, program.payload) as archive:
        held = read_code(archive, program.kind.rung.backwards[0].method, trust=False).activations()
    (symbol,) = {symbol for size in held.sizes for symbol in size.symbols}
    return held.held_bytes({symbol: length})


@pytest.mark.parametrize("rung", RUNGS)
def test_what_is_kept_is_what_is_counted(program, rung):
    of_rung = program.variants[rung]
    with program.load("100%", options=LoadOptions(activations=rung)) as module:
        for length in LENGTHS:
            inputs = tokens(length)
            given = {one.untyped_storage().data_ptr() for one in (*inputs, *module.parameters())}
            kept = {}

            def pack(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:  # noqa: B023
                    kept[storage.data_ptr()] = storage.nbytes()  # noqa: B023
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = module(*inputs)
            assert sum(kept.values()) == counted(of_rung, length)
            del result
    assert of_rung.kept_bytes == counted(of_rung, 40)


def test_each_rung_keeps_less_and_reads_more(program):
    keep, layers = rung_bytes(program)
    assert keep.kept_bytes > 2 * layers.kept_bytes
    assert keep.activation_bytes > layers.activation_bytes
    assert keep.activation_bytes > keep.kept_bytes
    assert layers.backward_read_bytes > 1.3 * keep.backward_read_bytes


def needed(program, rung):
    """The smallest memory for a rung."""
    one = program.variants[rung]
    return one.activation_bytes + one.trained_bytes + one.floor_bytes


def test_the_rung_is_chosen_by_memory(program):
    everything = needed(program, "keep") - program.floor_bytes + program.weight_bytes
    for memory, rung in ((everything, "keep"), (needed(program, "layers"), "layers")):
        with program.load(device_memory=memory) as module:
            assert module.activations == rung
            assert module.plan.budget <= memory - program.variants[rung].activation_bytes
            assert bool(module.plan.streamed_bytes) == (rung == "layers")


def test_a_refusal_names_the_least_memory_of_all(program):
    least = needed(program, "layers")
    with pytest.raises(
        BudgetError, match=r"give at least .*, with activations='layers', which needs the least"
    ):
        program.load(device_memory=least - 1)
    with pytest.raises(BudgetError, match="give at least"):
        program.load(device_memory=needed(program, "keep") - 1, options=LoadOptions(activations="keep"))
    program.load(device_memory=least).close()


def test_a_plan_of_a_rung_is_loaded_as_that_rung(program):
    plan = program.plan("50%", activations="layers", hardware="server")
    with program.load(plan=plan) as module:
        assert module.activations == "layers"
    with pytest.raises(PlanError, match="activations= is decided by the plan"):
        program.load(plan=plan, options=LoadOptions(activations="layers"))
    kept = program.plan("50%", hardware="server")
    assert kept == program.variants["keep"].plan("50%", hardware="server")
    assert plan.compute_ns > kept.compute_ns


def test_other_names_are_refused(program, tmp_path):
    with pytest.raises(PlanError, match="choose from 'auto', 'keep', 'layers'"):
        program.load("100%", options=LoadOptions(activations="all"))
    linear = nn.Linear(4, 4)
    plain = penstock.compile(export(linear, (torch.ones(1, 4),)), tmp_path / "plain.penstock")
    with pytest.raises(PlanError, match="is for programs that compile_training made"):
        plain.load("100%", options=LoadOptions(activations="keep"))
    for asked in ("keep", ["all"], []):
        with pytest.raises(PassError, match=r"expected a list of 'keep', 'layers'"):
            penstock.compile_training(
                linear, tmp_path / "m", example=(torch.ones(1, 4),), trainable=["*"], activations=asked
            )
    with pytest.raises(PassError, match="compiled code need not compute the same bits"):
        penstock.compile_training(
            linear,
            tmp_path / "m",
            example=(torch.ones(1, 4),),
            trainable=["*"],
            activations=["layers"],
            lowering="inductor",
        )


def test_one_rung_that_was_asked_for(tmp_path):
    program = penstock.compile_training(
        NORMED.model(),
        tmp_path / "m.penstock",
        example=NORMED.inputs(),
        trainable=NORMED.patterns,
        activations=["layers"],
    )
    assert [*program.variants] == ["layers"]
    plain = NORMED.model()
    with program.load("100%") as module:
        for one in (plain, module):
            NORMED.loss(one(*NORMED.inputs())).backward()
        own = dict(plain.named_parameters())
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.grad, own[name].grad)  # type: ignore[arg-type]
        assert all(
            torch.equal(one, dict(plain.named_buffers())[name]) for name, one in module.named_buffers()
        )


def test_a_ladder_of_plans_is_of_all_methods(program_of, tmp_path):
    program = program_of(NORMED)
    written = penstock.open(shutil.copytree(program.path, tmp_path / "copy.penstock")).write_ladder()
    assert written.verify() == program.verify()
    assert [*written.variants] == [*RUNGS]


def test_the_command_line_shows_what_is_kept(program, penstock):
    kept = {one.activations: one.kept_bytes for one in rung_bytes(program)}
    facts = json.loads(penstock("inspect", program.path, "--json").out)
    assert {one["activations"]: one["kept_bytes"] for one in facts["activations"]} == kept
    options = ("--budget", "50%", "--hardware", "server", "--activations", "layers")
    assert json.loads(penstock("plan", program.path, *options, "--json").out)["kept_bytes"] == kept["layers"]
    assert "kept for the backward" in penstock("plan", program.path, *options).out
    assert "Kept for the backward" in penstock("inspect", program.path).out
