"""Training through a streamed module: gradients, parameters and statistics equal PyTorch's to the bit."""

import copy
import hashlib
import json
import shutil
import zipfile
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import penstock
from penstock import LoadOptions
from penstock.runtime.files.artifact_files import replace_payload
from penstock.schedule.facts.errors import PassError, PayloadError, SourceError, StreamError
from penstock.schedule.payload.codec import Payload
from tests.engines import ENGINES
from tests.hunt import nightly_but, sampled
from tests.runtime.training.conftest import DTYPES
from tests.training_models import DECODER, NORMED


@pytest.fixture
def plain():
    return DECODER.model()


@pytest.fixture
def module(decoders):
    """The decoder at its floor, with poisoned memory."""
    program = decoders[torch.float32]
    with program.load(program.floor_bytes, options=LoadOptions(poison=True, arena="contiguous")) as loaded:
        yield loaded


def gradients(module):
    return {name: one.grad for name, one in module.named_parameters() if one.requires_grad}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert isinstance(value, torch.Tensor)
        assert isinstance(other[name], torch.Tensor)
        assert value.any(), f"{name} is zero, which hides what is missing"
        assert torch.equal(value, other[name]), name


def trained(module):
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


def assert_same(plain, module, run):
    """Both do the same, from one state of the generator: their gradients are equal."""
    for one in (plain, module):
        torch.manual_seed(0)
        run(one, *DECODER.inputs())
    assert_equal(gradients(module), gradients(plain))


def train(module, case, steps=5):
    """The losses of some steps of AdamW, and the gradients of the last one left in place."""
    optimiser = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        optimiser.zero_grad()
        torch.manual_seed(step)
        loss = case.loss(module(*case.inputs()))
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return losses


STEPS = [
    (engine, budget, dtype)
    for number, (engine, budget) in enumerate(product(ENGINES, ("floor", "25%", "100%")))
    for dtype in (DTYPES[::-1] if number % 2 else DTYPES)
]
"""Every second one has each engine with each budget, and each dtype with each of both."""
IN_FP32 = {one for one in STEPS if one[2] is torch.float32}


@pytest.mark.random
@pytest.mark.parametrize(("engine", "budget", "dtype"), nightly_but(IN_FP32, sampled(STEPS, 2)))
def test_five_steps(decoders, dtype, engine, budget):
    program, plain = decoders[dtype], DECODER.model(dtype)
    expected = train(plain, DECODER)
    with program.load(
        program.floor_bytes if budget == "floor" else budget, options=LoadOptions(engine=engine)
    ) as module:
        assert all(torch.equal(*pair) for pair in zip(train(module, DECODER), expected, strict=True))
        assert_equal(gradients(module), gradients(plain))
        assert_equal(dict(module.state_dict()), trained(plain))
        assert module.stats.misses == 0
        assert module.stats.passes == 10
        moved = sum(one.stop - one.start for s in module.plan.schedules for one in s.transfers)
        assert bool(moved) == (budget != "100%")


def test_statistics_of_batch_norms(program_of):
    plain, program = NORMED.model(), program_of(NORMED)
    expected = train(plain, NORMED)
    with program.load(program.floor_bytes) as module:
        assert all(torch.equal(*pair) for pair in zip(train(module, NORMED), expected, strict=True))
        assert_equal(gradients(module), gradients(plain))
        assert set(dict(module.named_buffers())) == set(dict(plain.named_buffers()))
        for name, statistic in plain.named_buffers():
            assert torch.equal(statistic, dict(module.named_buffers())[name]), name


def one_backward_of_two_calls(one, tokens, labels):
    (one(tokens, labels)[0] + one(labels, tokens)[0]).backward()


def a_backward_twice(one, tokens, labels):
    loss = one(tokens, labels)[0]
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def scaled_and_clipped(one, tokens, labels):
    trained = [p for p in one.parameters() if p.requires_grad]
    optimiser, scaler = torch.optim.SGD(trained, lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(one(tokens, labels)[0]).backward()
    scaler.unscale_(optimiser)
    nn.utils.clip_grad_norm_(trained, 0.1)
    scaler.step(optimiser)
    scaler.update()


def asked_for_by_name(one, tokens, labels):
    trained = [p for p in one.parameters() if p.requires_grad]
    found = torch.autograd.grad(one(tokens, labels)[0], trained)
    assert all(parameter.grad is None for parameter in trained)
    for parameter, gradient in zip(trained, found, strict=True):
        parameter.grad = gradient


def of_other_lengths(one, tokens, labels):
    for length in (2, 64):
        longer = torch.cat([tokens] * 4, 1)[:, :length]
        one(longer, longer)[0].backward()


@pytest.mark.parametrize(
    "run",
    [one_backward_of_two_calls, a_backward_twice, scaled_and_clipped, asked_for_by_name, of_other_lengths],
)
def test_calls(plain, module, run):
    assert_same(plain, module, run)
    assert_equal(trained(module), trained(plain))


def test_a_pass_that_raised(plain, module):
    loss = module(*DECODER.inputs())[0]
    loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError("a hook")))
    with pytest.raises(KeyError, match="a hook"):
        loss.backward()
    assert_same(plain, module, lambda one, *inputs: one(*inputs)[0].backward())


def test_parameters_that_changed_before_the_backward(module):
    loss = module(*DECODER.inputs())[0]
    with torch.no_grad():
        next(p for n, p in module.named_parameters() if "up" in n).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_saved_tensors(plain, module):
    packed = []

    def pack(tensor):
        packed.append(tensor.nbytes)
        return tensor.clone()

    torch.manual_seed(0)
    plain(*DECODER.inputs())[0].backward()
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*DECODER.inputs())[0].backward()
    assert sum(packed) > 0
    assert_equal(gradients(module), gradients(plain))


def test_gradients_of_gradients_are_refused(module):
    loss = module(*DECODER.inputs())[0]
    with pytest.raises(StreamError, match=r"gradients of gradients .* create_graph=True"):
        torch.autograd.grad(loss, list(module.parameters()), create_graph=True)


def test_closing_before_the_backward(decoders):
    with decoders[torch.float32].load("50%") as module:
        loss = module(*DECODER.inputs())[0]
    with pytest.raises(StreamError, match="the module is closed"):
        loss.backward()


def test_state_dicts(plain, module):
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.5) if parameter.requires_grad else None
    module.load_state_dict({name: one.detach() for name, one in trained(plain).items()})
    assert_equal(dict(module.state_dict()), trained(plain))
    assert_same(plain, module, lambda one, *inputs: one(*inputs)[0].backward())
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({})


class Two(nn.Module):
    """Two results, both of which depend on the trained parameter, and on the input."""

    def __init__(self):
        super().__init__()
        self.base, self.up = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x):
        y = self.up(self.base(x))
        return {"first": self.base(y), "second": y.sin()}


WIDE = 64


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    torch.manual_seed(0)
    model = Two()
    model.base.requires_grad_(False)
    x = torch.randn(3, WIDE, requires_grad=True)
    path = tmp_path_factory.mktemp("two") / "two.penstock"
    return model, penstock.compile_training(model, path, example=(x,), trainable=["up.*"])


def test_two_results_and_the_gradient_of_an_input(two):
    plain, program = copy.deepcopy(two[0]), two[1]
    with program.load(program.floor_bytes) as module:
        inputs = [torch.ones(3, WIDE, requires_grad=True) for _ in range(2)]
        for one, x in zip((plain, module), inputs, strict=True):
            result = one(x)
            (result["first"].sum() + result["second"].square().sum()).backward()
        assert_equal(gradients(module), gradients(plain))
        assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
        with pytest.raises(
            StreamError, match=r"have come to first, .* from first and second: compile it with losses="
        ):
            module(inputs[1])["first"].sum().backward()


def test_losses_by_name(two, tmp_path):
    plain = copy.deepcopy(two[0])
    x = torch.randn(3, WIDE)
    program = penstock.compile_training(
        plain, tmp_path / "one.penstock", example={"x": x}, trainable=["up.*"], losses=["first"]
    )
    with program.load(program.floor_bytes) as module:
        for one in (plain, module):
            one(x=x)["first"].sum().backward()
        assert_equal(gradients(module), gradients(plain))
        result = module(x=x)
        with pytest.raises(
            StreamError, match=r"have come to first and second, .* gradients from first: compile"
        ):
            (result["first"].sum() + result["second"].sum()).backward()
        with pytest.raises(StreamError, match="input x requires grad, and the program was compiled without"):
            module(x=x.clone().requires_grad_())


def test_a_program_that_was_exported_before(two, tmp_path):
    plain = copy.deepcopy(two[0])
    x = torch.randn(3, WIDE)
    exported = export(plain, (x,))
    before = {name: one.requires_grad for name, one in plain.named_parameters()}
    program = penstock.compile_training(exported, tmp_path / "one.penstock", trainable=["base.weight"])
    assert {name: one.requires_grad for name, one in plain.named_parameters()} == before
    plain.requires_grad_(False)
    plain.base.weight.requires_grad_(True)  # type: ignore[union-attr]
    with program.load(program.floor_bytes) as module:
        for one in (plain, module):
            sum(map(torch.sum, one(x).values())).backward()
        assert_equal(gradients(module), gradients(plain))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"trainable": ["lora*"]}, r"trainable='lora\*' matches no parameter; the first of them is 'base"),
        ({"trainable": "up.*"}, "trainable= takes a list of patterns"),
        ({"trainable": []}, "no result of the program depends on what is trained"),
        ({"trainable": ["up.*"], "losses": ["third"]}, "expected a list of results, which are first, second"),
        ({"trainable": ["up.*"], "example": None}, "a module is exported with the arguments of a call"),
    ],
)
def test_refusals(two, tmp_path, given, sentence):
    options = {"example": (torch.ones(3, WIDE),), **given}
    with pytest.raises(PassError, match=sentence):
        penstock.compile_training(two[0], tmp_path / "refused.penstock", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "refused.penstock").exists()


def rewritten(program, folder, change):
    """A copy of an artifact in which training.json has changed, and the hash of its program with it."""
    shutil.copytree(program.path, folder)
    payload = Payload.from_bytes((folder / "payload.json").read_bytes())
    assert payload.program is not None
    path = folder / payload.program.path
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    facts = json.loads(members["training.json"])
    change(facts)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (members | {"training.json": json.dumps(facts).encode()}).items():
            archive.writestr(name, data)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    replace_payload(folder, replace(payload, program=replace(payload.program, sha256=digest)))
    return folder


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("backwards.kept", [99], "does not fit the program"),
        ("backwards.kept", [-99], "does not fit the program"),
        ("backwards.gradients", [-1], "does not fit the program"),
        ("backwards.tangents", [7], "does not fit the program"),
        ("backwards.method", "other", "which lacks other"),
        ("backwards", [], "which lacks backward"),
        ("rungs", [], "has no rungs"),
        ("parameters", ["up.weight"] * 9, "does not fit the program"),
        ("parameters", ["other"], "lacks the parameter other"),
        ("backwards.kept", ["up"], r"\$.rungs\[0\].backwards\[0\].kept\[0\]: expected"),
        ("losses", [], "losses is not a field"),
    ],
)
def test_damaged_facts(two, tmp_path, field, value, sentence):
    def change(facts):
        *path, name = field.split(".")
        rung = facts["rungs"][0]
        held = rung["backwards"][0] if path else rung if name == "backwards" else facts
        held.update({name: value})

    folder = rewritten(two[1], tmp_path / "two.penstock", change)
    with pytest.raises((PayloadError, SourceError), match=sentence):
        penstock.open(folder).load("100%")


def test_damaged_parameters(two, tmp_path):
    folder = tmp_path / "two.penstock"
    shutil.copytree(two[1].path, folder)
    file = folder / "trainable.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-8])
    with pytest.raises(SourceError, match=r"trainable\.safetensors"):
        penstock.open(folder).load("100%")
    file.unlink()
    with pytest.raises(SourceError, match=r"trainable\.safetensors"):
        penstock.open(folder).load("100%")


def test_a_parameter_that_was_replaced_is_the_one_that_is_trained(two):
    plain, program = copy.deepcopy(two[0]), two[1]
    value = torch.randn(WIDE, WIDE)
    with program.load(program.floor_bytes) as module:
        x = torch.ones(3, WIDE)
        for one in (plain, module):
            one.up.weight = nn.Parameter(value.clone())  # type: ignore[union-attr]
            sum(map(torch.sum, one(x).values())).backward()
        assert_equal(gradients(module), gradients(plain))
        module.requires_grad_(False)
        assert not module(x)["first"].requires_grad


def test_a_result_that_is_transposed(tmp_path):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.up = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x.shape[0], self.base(self.up(x)).transpose(1, 2)

    plain, x = Turned(), torch.randn(2, 5, 16)
    plain.base.requires_grad_(False)
    for sizes in (None, ({0: Dim("batch", min=2, max=9)},)):
        program = penstock.compile_training(
            plain, tmp_path / f"{sizes}.penstock", example=(x,), dynamic_shapes=sizes, trainable=["up.*"]
        )
        with program.load(program.floor_bytes) as module:
            for one in (plain, module):
                one.zero_grad()
                size, result = one(x)
                assert size == 2
                nn.functional.cross_entropy(result, torch.zeros(2, 5, dtype=torch.long)).backward()
            assert_equal(gradients(module), gradients(plain))


def test_autocast_is_refused(module):
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(StreamError, match="autocast is on, and the program computes in the dtypes"),
    ):
        module(*DECODER.inputs())


def test_a_parameter_that_shares_its_memory(tmp_path):
    with pytest.raises(PassError, match=r"is to be trained and shares its memory with (embed|head)\.weight"):
        penstock.compile_training(
            DECODER.model(), tmp_path / "m.penstock", example=DECODER.inputs(), trainable=["embed.*"]
        )
