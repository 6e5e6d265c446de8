"""Calls without gradients, and in eval mode, of a module that is trained: PyTorch's values, to the bit."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.export import export

import penstock
from penstock import LoadOptions
from penstock.schedule.facts.errors import PassError, StreamError
from tests.engines import ENGINES
from tests.hunt import nightly_but
from tests.training_models import DECODER, NORMED

CASES = {"dropout": DECODER, "batch norms": NORMED}


@pytest.fixture(scope="module")
def programs(program_of):
    return {name: program_of(case) for name, case in CASES.items()}


def values(module):
    """The trained parameters, their gradients, and the buffers of a module."""
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    gradients = {f"{name}.grad": one.grad for name, one in trained.items() if one.grad is not None}
    return {**trained, **gradients, **dict(module.named_buffers())}


def assert_equal(one, other):
    found, expected = values(one), values(other)
    # A program has the buffers that it writes to; gradients and parameters are the same on both sides.
    assert {name for name in expected if name not in dict(other.named_buffers())} <= found.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def both(plain, module, run):
    """Run something on both, from one state of the generator: results and generators are equal."""
    found = []
    for one in (plain, module):
        torch.manual_seed(0)
        flat = [leaf for leaf in torch.utils._pytree.tree_leaves(run(one)) if leaf is not None]
        found.append([*flat, torch.get_rng_state()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert_equal(module, plain)


def step(case, optimisers):
    """One step of training in train mode, with evaluations before, in the middle of and after it."""

    def without_gradients(one):
        with torch.no_grad():
            return one(*case.inputs())

    def run(one):
        before = without_gradients(one.eval())
        optimisers[one].zero_grad()
        loss = case.loss(one.train()(*case.inputs()))
        # What is pending reads no buffer that this writes, and no memory that this streams weights into.
        between = without_gradients(one), without_gradients(one.eval())
        loss.backward()
        optimisers[one].step()
        return before, between, loss, without_gradients(one), without_gradients(one.train())

    return run


@pytest.mark.parametrize(
    ("name", "budget", "engine"),
    nightly_but(
        {("dropout", "floor", ENGINES[-1]), ("batch norms", "floor", "python")},
        [
            (*case, engine)
            for case in (
                ("dropout", "floor"),
                ("dropout", "40%"),
                ("dropout", "100%"),
                ("batch norms", "floor"),
            )
            for engine in ENGINES
        ],
    ),
)
def test_training_and_evaluation_by_turns(programs, name, budget, engine):
    program, case = programs[name], CASES[name]
    plain = case.model().train()
    amount = program.floor(arena="contiguous") if budget == "floor" else budget
    with program.load(amount, options=LoadOptions(engine=engine, poison=True, arena="contiguous")) as module:
        optimisers = {
            one: torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2)
            for one in (plain, module)
        }
        for _ in range(4):
            both(plain, module, step(case, optimisers))
        assert module.stats.misses == 0


def test_the_modes_differ(programs):
    """What the other tests compare with would hide a call that runs in the wrong mode if modes were equal."""
    for name, case in CASES.items():
        assert [one.name for one in programs[name].payload.methods] == [
            "forward",
            "backward",
            "evaluate",
            "predict",
        ]
        with programs[name].load("100%") as module, torch.no_grad():
            results = [case.loss(module.train(mode)(*case.inputs())) for mode in (True, False)]
        assert not torch.equal(*results)


def test_nothing_is_kept(programs):
    """The methods for calls without gradients return the results only."""
    program = programs["dropout"]
    with program.load("100%") as module:
        assert len([one for one in module._rung.kept if one < 0]) > 10  # type: ignore[union-attr]
        inputs = [*DECODER.inputs(), *module.parameters()]
        for method in ("evaluate", "predict"):
            loss, logits = module.run(method, [one.detach() for one in inputs])
            assert loss.dim() == 0
            assert logits.dim() == 3


def test_eval_mode_with_grad_mode_on(programs):
    plain = DECODER.model().eval()
    with programs["dropout"].load("50%") as module:
        loss = module.eval()(*DECODER.inputs())[0]
        assert not any(part.training for part in module.modules())
        assert torch.equal(loss, plain(*DECODER.inputs())[0])
        with pytest.raises(StreamError, match=r"called in eval mode, in which there are no gradients"):
            loss.backward()
        module.requires_grad_(False)
        assert not module(*DECODER.inputs())[0].requires_grad
        module.requires_grad_(True)
        both(plain.train(), module.train(), lambda one: one(*DECODER.inputs())[0].backward())


def test_a_model_in_eval_mode(tmp_path):
    """There is one program, which has gradients in both modes."""
    plain = NORMED.model().eval()
    program = penstock.compile_training(
        plain, tmp_path / "m.penstock", example=NORMED.inputs(), trainable=NORMED.patterns
    )
    assert [one.name for one in program.payload.methods] == ["forward", "backward", "evaluate"]
    with program.load(program.floor_bytes) as module:
        for one in (module.eval(), module.train(), module.eval()):
            both(plain, one, lambda one: NORMED.loss(one(*NORMED.inputs())).backward())


class Gate(nn.Module):
    """A model whose modes differ by what `makes` makes of them."""

    def __init__(self, makes):
        super().__init__()
        self.base, self.up, self.makes = nn.Linear(16, 16), nn.Linear(16, 16), makes

    def forward(self, x):
        return self.makes(self.training, self.base(self.up(x)).sin())


def by_a_constant(training, x):
    return x * torch.tensor(0.5 if training else 1.0)


def by_an_argument(training, x):
    return x.clamp(min=0.0 if training else 0.25)


def in_shape(training, x):
    return x.sum() if training else x


def never(training, x):
    return x.exp()


@pytest.mark.parametrize("makes", [by_a_constant, by_an_argument, in_shape, never])
def test_modes_are_compared(tmp_path, makes):
    x, plain = torch.randn(4, 16), Gate(makes)
    plain.base.requires_grad_(False)
    program = penstock.compile_training(
        copy.deepcopy(plain), tmp_path / "m.penstock", example=(x,), trainable=["up.*"]
    )
    assert ("predict" in [one.name for one in program.payload.methods]) == (makes is not never)
    with program.load(program.floor_bytes) as module, torch.no_grad():
        for mode in (True, False, True):
            both(plain.train(mode), module.train(mode), lambda one: one(x))


def test_a_program_has_one_mode(tmp_path):
    model = NORMED.model().train()
    exported = export(copy.deepcopy(model), NORMED.inputs())
    program = penstock.compile_training(exported, tmp_path / "m.penstock", trainable=NORMED.patterns)
    with program.load(program.floor_bytes) as module:
        with pytest.raises(
            StreamError, match=r"eval\(\) is not possible .* give compile_training the module"
        ):
            module.eval()
        assert module.training
        with torch.no_grad():
            both(model, module, lambda one: one(*NORMED.inputs()))


def test_a_model_that_cannot_be_exported_in_eval_mode(tmp_path, caplog):
    def makes(training, x):
        return x if training or float(x.sum()) > 1 else -x

    model = Gate(makes)
    with caplog.at_level(logging.WARNING, "penstock"):
        program = penstock.compile_training(
            model, tmp_path / "m.penstock", example=(torch.ones(2, 16),), trainable=["up.*"]
        )
    assert "cannot be exported in eval mode, so eval() is refused" in caplog.text
    assert all(part.training for part in model.modules())
    with program.load("100%") as module, pytest.raises(StreamError, match=r"eval\(\) is not possible"):
        module.eval()


def test_an_argument_of_the_name_of_the_parameters(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, trainable):
            return self.up(trainable).sum()

    with pytest.raises(PassError, match="the program takes an argument 'trainable'"):
        penstock.compile_training(
            Named(), tmp_path / "m.penstock", example={"trainable": torch.ones(2, 4)}, trainable=["up.*"]
        )


def test_without_the_methods(program_of):
    plain, program = DECODER.model().train(), program_of(DECODER, evaluate=False)
    assert [one.name for one in program.payload.methods] == ["forward", "backward"]
    with program.load(program.floor_bytes) as module:
        with torch.no_grad():
            both(plain, module, lambda one: one(*DECODER.inputs()))
        with pytest.raises(StreamError, match=r"eval\(\) is not possible .* leave out evaluate=False"):
            module.eval()
