"""A backward by segments: gradients equal PyTorch's to the bit where autograd's backward has no trace."""

from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

import penstock
from penstock import LoadOptions
from penstock.passes.graph.nodes import move_graph
from penstock.passes.training.rerun import RANDOM_STATE, SEGMENT_GRADIENTS
from penstock.schedule.facts.errors import PassError
from tests.hunt import nightly_but, sampled
from tests.runtime.training.conftest import OfEachDtype
from tests.runtime.training.test_training import IN_FP32, STEPS, assert_equal, gradients, train
from tests.training_models import DECODER, NORMED, Adapted, Trained


@torch.library.custom_op("penstock_tests::limited", mutates_args=())
def limited(x: torch.Tensor) -> torch.Tensor:
    """Doubles a value; its gradient is cut off where it is large, which only its values tell."""
    return x * 2


def _limit(ctx, gradient):
    return gradient * 2 if gradient.abs().max().item() < 1e-3 else gradient.clamp(-1e-3, 1e-3)


limited.register_fake(torch.empty_like)
limited.register_autograd(_limit)


class Layered(nn.Module):
    """A factorisation in front of layers that all read one value twice, with dropout and a detached part."""

    def __init__(self, width=64):
        super().__init__()
        self.before, self.shared = nn.Linear(width, width), Adapted(width, width)
        self.layers = nn.ModuleList(Adapted(width, width) for _ in range(4))
        self.drop = nn.Dropout(0.2)

    def forward(self, x, target):
        seen = self.before(x).float()
        square = seen.transpose(-1, -2) @ seen + 64 * torch.eye(x.shape[-1])
        y = (seen @ torch.linalg.cholesky(square)).to(x.dtype) / 8
        shared = self.shared(self.drop(y))
        for layer in self.layers:
            with torch.no_grad():
                scale = y.abs().mean() + 1
            y = y + torch.tanh(limited(layer(self.drop(y))) * shared) / scale + shared.sin() - y.detach() / 2
        loss = (y - target).square().mean()
        return {"loss": loss, "size": shared.square().mean()}


def _values():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, 64, generator=generator), torch.randn(2, 8, 64, generator=generator)


def _case(dtype):
    inputs = tuple(one.to(dtype) for one in _values())
    return Trained(Layered, lambda: inputs, ("down", "up"), lambda result: result["loss"])


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The layers, compiled by segments."""
    folder = tmp_path_factory.mktemp("segments")
    return OfEachDtype(
        lambda dtype: _compiled(_case(dtype), folder / f"{dtype}.penstock", dtype, evaluate=True)
    )


def _compiled(case, path, dtype=torch.float32, **options):
    options = {"evaluate": False, **({"losses": ["loss"]} if case.make is Layered else {}), **options}
    return penstock.compile_training(
        case.model(dtype),
        path,
        example=case.inputs(),
        trainable=case.patterns,
        backward="segments",
        **options,
    )


@pytest.mark.random
@pytest.mark.parametrize(("engine", "budget", "dtype"), nightly_but(IN_FP32, sampled(STEPS, 2)))
def test_five_steps(programs, dtype, engine, budget):
    program, case = penstock.open(programs[dtype].path, trust=True), _case(dtype)
    plain = case.model(dtype)
    expected, state = train(plain, case), torch.get_rng_state()
    floor = program.floor_bytes
    with program.load(
        floor if budget == "floor" else max(floor, _share(program, budget)),
        options=LoadOptions(engine=engine),
    ) as module:
        assert all(torch.equal(*pair) for pair in zip(train(module, case), expected, strict=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert_equal(gradients(module), gradients(plain))
        assert module.stats.misses == 0
        assert module.activations == "segments"
        moved = sum(one.stop - one.start for s in module.plan.schedules for one in s.transfers)
        assert bool(moved) == (budget != "100%")


def _share(program, budget):
    percent = 0 if budget == "floor" else int(budget.rstrip("%"))
    return sum(one.nbytes for one in program.payload.storages) * percent // 100


def test_each_weight_is_read_once_in_each_direction(programs):
    payload = programs[torch.float32].payload
    traces = {trace.method: trace for trace in payload.traces}
    names = payload.storage_names()
    reads = {
        method: Counter(names[read] for step in traces[method].steps for read in step.reads)
        for method in ("forward", "backward")
    }
    assert set(reads["forward"].values()) == set(reads["backward"].values()) == {1}
    assert set(reads["forward"]) - set(reads["backward"]) == {"before.weight", "before.bias"}
    assert len(traces["backward"].steps) > 2
    assert traces["backward"].follows == traces["forward"].graph


@pytest.fixture(scope="module")
def of_any_length(tmp_path_factory):
    """The decoder, compiled by segments for batches of any length."""
    length, path = Dim("length", min=2, max=64), tmp_path_factory.mktemp("decoder") / "m.penstock"
    return _compiled(DECODER, path, dynamic_shapes=({1: length}, {1: length}))


def test_what_is_kept(of_any_length, program_of):
    """Less than joint graphs of the model keep, where no layer computes anything twice."""
    joint = program_of(DECODER)
    assert of_any_length.variants["segments"].kept_bytes < joint.variants["keep"].kept_bytes


@pytest.mark.parametrize("spill", nightly_but({True}, [False, True]))
def test_a_decoder(of_any_length, tmp_path, spill):
    program = _compiled(DECODER, tmp_path / "m.penstock", spill=True) if spill else of_any_length
    plain = DECODER.model()
    expected = train(plain, DECODER)
    with program.load(
        program.floor(arena="contiguous"), options=LoadOptions(poison=True, arena="contiguous")
    ) as module:
        assert all(torch.equal(*pair) for pair in zip(train(module, DECODER), expected, strict=True))
        assert_equal(gradients(module), gradients(plain))
        if not spill:
            for one in (plain, module):
                one.zero_grad()
                torch.manual_seed(0)
                one(*(value.repeat(1, 3) for value in DECODER.inputs()))[0].backward()
            assert_equal(gradients(module), gradients(plain))


def test_statistics_and_the_simulated_device(tmp_path):
    program = _compiled(NORMED, tmp_path / "m.penstock")
    plain = NORMED.model()
    expected = train(plain, NORMED)
    with program.load(program.floor_bytes, device="sim") as module:
        assert all(torch.equal(*pair) for pair in zip(train(module, NORMED), expected, strict=True))
        assert_equal(gradients(module), gradients(plain))
        for name, statistic in plain.named_buffers():
            assert torch.equal(statistic, dict(module.named_buffers())[name]), name
        assert module.stats.misses == 0


def test_sets_of_losses(tmp_path):
    case = _case(torch.float32)
    program = _compiled(case, tmp_path / "m.penstock", losses=[["loss"], ["size"], ["loss", "size"]])
    plain = case.model()
    with program.load("100%") as module:
        for one in (plain, module):
            torch.manual_seed(0)
            found = one(*case.inputs())
            found["size"].backward(retain_graph=True)
            found["loss"].backward(retain_graph=True)
            sum(found.values()).backward()
        assert_equal(gradients(module), gradients(plain))


def test_what_is_refused(programs, tmp_path):
    case = _case(torch.float32)
    known = {"example": case.inputs(), "trainable": case.patterns, "losses": ["loss"]}
    with pytest.raises(PassError, match=r"autograd cannot trace .* or compile with backward='segments'"):
        penstock.compile_training(case.model(), tmp_path / "joint.penstock", **known)
    for wrong, message in (
        ({"backward": "traced"}, "expected 'joint' or 'segments'"),
        ({"backward": "segments", "activations": ["keep"]}, "leave out activations="),
        ({"backward": "segments", "lowering": "inductor"}, "leave out activations= and lowering="),
    ):
        with pytest.raises(PassError, match=message):
            penstock.compile_training(case.model(), tmp_path / "m.penstock", **known, **wrong)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_control_flow_is_refused(tmp_path):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.up(x),)).sum()

    with pytest.raises(PassError, match="control flow stands in a segment"):
        penstock.compile_training(
            Branching(),
            tmp_path / "m.penstock",
            example=(torch.randn(2, 8),),
            trainable=["up.*"],
            backward="segments",
        )


def test_random_numbers_of_an_accelerator_are_refused():
    graph = fx.Graph()
    graph.output((graph.call_function(RANDOM_STATE),))
    with pytest.raises(PassError, match=r"random_state.*cannot move to cuda"):
        move_graph(graph, [], torch.device("cpu"), "cuda")


def test_no_gradient_is_a_view_of_a_weight():
    weight, x = torch.randn(4), torch.randn(4)
    graph = fx.Graph()
    inputs = [graph.placeholder("x"), graph.placeholder("weight")]
    graph.output((graph.call_function(_product, tuple(inputs)),))
    (found,) = SEGMENT_GRADIENTS(fx.GraphModule({}, graph), (0,), (0,), (), False, torch.ones(()), x, weight)
    assert torch.equal(found, weight)
    assert found.data_ptr() != weight.data_ptr()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


def _product(x, weight):
    return _Product.apply(x, weight)


class Writing(nn.Module):
    """Reads a buffer and an input before, between and after writing to them."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(48, 48), nn.Linear(48, 48)
        self.register_buffer("turned", torch.ones(48, 2).t()[::2].squeeze(0))
        self.register_buffer("counted", torch.ones(48))
        self.turned: torch.Tensor
        self.counted: torch.Tensor

    def forward(self, x):
        y = self.down(x.clone()) * self.turned.clone()
        self.turned.add_(0.5)
        x.add_(1)
        self.counted.mul_(y.detach().mean())
        return (self.up(y * self.counted.clone() + x.clone()) * self.turned.clone()).square().mean()


class Numbered(nn.Module):
    """Multiplies by a number that is taken out of a value."""

    def __init__(self):
        super().__init__()
        self.down, self.frozen = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        y = self.down(x)
        return (self.frozen(y) * y.mean().item()).square().mean()


@pytest.mark.filterwarnings("ignore:Unable to find user code")
@pytest.mark.parametrize("kind", [Writing, Numbered])
def test_what_is_written_meanwhile_and_numbers_out_of_tensors(kind, tmp_path):
    case = Trained(kind, lambda: (torch.ones(5, 48) / 3,), ("down",), lambda result: result)
    plain, program = case.model(), _compiled(case, tmp_path / "model.penstock")
    expected = train(plain, case)
    with program.load(program.floor_bytes) as module:
        assert all(torch.equal(*pair) for pair in zip(train(module, case), expected, strict=True))
        assert_equal(gradients(module), gradients(plain))
        buffers = dict(plain.named_buffers())
        assert all(torch.equal(value, buffers[name]) for name, value in module.named_buffers())
