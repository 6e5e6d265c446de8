"""Several sets of losses: each has a backward, and all of them one forward."""

from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch.export import Dim, export

import penstock
from penstock import LoadOptions
from penstock.passes.training.halves import divide
from penstock.passes.training.joint import align
from penstock.schedule.facts.errors import PassError, StreamError
from penstock.schedule.verify.proof import verify_plan
from tests import oracle
from tests.engines import ENGINES
from tests.hunt import nightly_but
from tests.runtime.training.conftest import OfEachDtype
from tests.training_models import Adapted

WIDTH = 64
SETS = (["first"], ["first", "second"], ["second"])


class Heads(nn.Module):
    """A trunk with dropout and a norm that writes its statistics, and two losses behind a head each.

    The second loss goes through the head of the first as well, so that the two backwards have products of one
    weight with different gradients. Every dropout is of one value twice, and the two differ.
    """

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(Adapted(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.heads = nn.ModuleList(Adapted(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for layer in self.trunk:
            x = torch.tanh(layer(x))
            x = self.drop(x) + self.drop(x)
        x = self.norm(x)
        one = self.heads[0](x)
        two = self.heads[1](torch.sin(one + self.drop(x)))
        return {"first": one.float().square().mean(), "second": two.float().abs().mean(), "extra": one.exp()}


def model(dtype=torch.float32):
    torch.manual_seed(0)
    made = Heads().to(dtype)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("down" in name or "up" in name)
    return made


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses")
    return OfEachDtype(
        lambda dtype: penstock.compile_training(
            model(dtype),
            folder / f"{dtype}.penstock",
            example=(torch.randn(4, WIDTH).to(dtype),),
            dynamic_shapes=({0: Dim("batch", min=2, max=64)},),
            trainable=["*down*", "*up*"],
            losses=SETS,
        )
    )


Results = dict[str, torch.Tensor]


def apart(results):
    results["first"].backward(retain_graph=True)
    results["second"].backward()


def apart_in_another_order(results):
    (results["second"] * 3).backward(retain_graph=True)
    results["first"].backward(retain_graph=True)
    results["second"].backward()


def together(results):
    (results["first"] + 0.5 * results["second"]).backward()


def all_ways(results):
    (results["first"] - results["second"]).backward(retain_graph=True)
    results["second"].backward(retain_graph=True)
    results["first"].backward()


def the_first(results):
    results["first"].backward()


def the_second(results):
    results["second"].backward()


WAYS = (apart, apart_in_another_order, together, all_ways, the_first, the_second)


def train(module, dtype, ways):
    """Steps of AdamW, each with gradients in one of the ways; all results, gradients and parameters."""
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    optimiser = torch.optim.AdamW(trained.values(), lr=1e-2)
    found = []
    for step, way in enumerate(ways):
        torch.manual_seed(step)
        optimiser.zero_grad()
        results = module(torch.randn(2 + step, WIDTH).to(dtype))
        way(results)
        for name, parameter in trained.items():
            # The second head has no gradient of the first loss.
            assert (parameter.grad is None) == (way is the_first and "heads.1" in name), name
        found += [one.detach().clone() for one in results.values()]
        found += [one.grad.clone() for one in trained.values() if one.grad is not None]
        optimiser.step()
    buffers = [one.clone() for name, one in module.named_buffers() if "norm" in name]
    return [*found, *(one.detach().clone() for one in trained.values()), *buffers]


@pytest.mark.parametrize(
    ("dtype", "budget", "engine"),
    nightly_but(
        lambda case: case[:2] == (torch.float32, "floor"),
        [
            (*way, engine)
            for way in ((torch.float32, "floor"), (torch.float32, "100%"), (torch.bfloat16, "60%"))
            for engine in ENGINES
        ],
    ),
)
def test_gradients_of_each_set(programs, dtype, engine, budget):
    program, ways = programs[dtype], [*WAYS, *reversed(WAYS)]
    expected = train(model(dtype), dtype, ways)
    amount = program.floor(arena="contiguous") if budget == "floor" else budget
    with program.load(amount, options=LoadOptions(engine=engine, poison=True, arena="contiguous")) as module:
        found = train(module, dtype, ways)
        assert len(found) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert module.stats.misses == 0


def test_the_first_set_is_in_turn_with_the_forward(programs):
    program = programs[torch.float32]
    traces = {trace.method: trace for trace in program.payload.traces}
    assert [*traces] == ["forward", "backward", "backward_1", "backward_2", "evaluate", "predict"]
    follows = {name: trace.follows for name, trace in traces.items() if trace.follows is not None}
    assert follows == {"forward": traces["backward"].graph, "backward": traces["forward"].graph}
    plan = program.plan("60%", arena="contiguous")
    verify_plan(program.payload.storages, program.payload.traces, plan)
    oracle.check_plan(program.payload.storages, program.payload.traces, plan)


def test_sets_that_were_not_compiled(tmp_path):
    x, named = torch.randn(4, WIDTH), "first, or first and second: compile"
    program = penstock.compile_training(
        model(), tmp_path / "m.penstock", example=(x,), trainable=["*down*", "*up*"], losses=SETS[:2]
    )
    with program.load("60%") as module:
        results = module(x)
        with pytest.raises(StreamError, match=f"have come to second, and .* for gradients from {named}"):
            results["second"].backward()
        with pytest.raises(StreamError, match=f"have come to first and extra, .* for gradients from {named}"):
            (results["first"] + module(x)["first"] + results["extra"].sum()).backward()
        plain = model()
        for one in (plain, module):
            one.zero_grad()
            torch.manual_seed(3)
            one(x)["first"].backward()
        for name, parameter in module.named_parameters():
            other = plain.get_parameter(name).grad
            assert (parameter.grad is None) == (other is None) == ("heads.1" in name)
            assert other is None or torch.equal(parameter.grad, other)  # type: ignore[arg-type]


def test_one_forward_for_all_sets():
    """It computes what the forward of one set computes, and draws from the generator as often."""
    exported = export(model(), (torch.randn(4, WIDTH),))
    trained = [fqn for fqn in exported.graph_signature.parameters if "down" in fqn or "up" in fqn]
    alone = [divide(exported, trained, one) for one in SETS]
    joined = divide(exported, trained, SETS)
    assert len(joined.backwards) == 3
    calls = [
        Counter(str(node.target) for node in one.graph.nodes if node.op == "call_function")
        for one in (joined.forward, *(each.forward for each in alone))
    ]
    for target in ("aten.bernoulli.p", "aten.mm.default", "aten.native_batch_norm.default"):
        counts = [one[target] for one in calls]
        assert counts[0] == max(counts), target
        assert counts[0] == counts[2], target
    assert calls[0]["aten.mm.default"] == 15
    kept = [{*one.training.rungs[0].kept} for one in (joined, *alone)]
    assert len(kept[0]) <= len(kept[2]) + 1  # values that each set needs are returned once
    for one, other in zip(joined.backwards, alone, strict=True):
        assert len(list(one.graph.nodes)) == len(list(other.backwards[0].graph.nodes))


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ([["first"], ["third"]], "expected a list of results, which are first, second, extra, or a list of"),
        ([["first"], "second"], "or a list of such lists"),
        ("first", "or a list of such lists"),
        ([["first"], ["first"]], "two sets whose gradients come from first: leave one of them out"),
        ([["first"], []], "no result of the program depends on what is trained"),
    ],
)
def test_sets_that_are_refused(losses, sentence):
    exported = export(model(), (torch.randn(4, WIDTH),))
    with pytest.raises(PassError, match=sentence):
        divide(exported, ["trunk.0.up.weight"], losses)  # type: ignore[arg-type]


class Root(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.constant = torch.full((2,), value)


def traced(value, *targets):
    """A graph that calls some operators, one after another, on an input, a constant and a gradient."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangent")
    made = [graph.call_function(target, (x, 0.5)) for target in targets]  # type: ignore[arg-type]
    made.append(graph.call_function(torch.ops.aten.add.Tensor, (x, graph.get_attr("constant"))))
    made.append(graph.call_function(torch.ops.aten.mul.Tensor, (made[0], tangent)))
    graph.output(tuple(made))
    return fx.GraphModule(Root(value), graph)


def test_traces_are_aligned():
    aten = torch.ops.aten
    first = traced(1.0, aten.bernoulli.p, aten.bernoulli.p, aten.pow.Tensor_Scalar)
    other = traced(1.0, aten.pow.Tensor_Scalar, aten.bernoulli.p, aten.bernoulli.p)
    before = {node.name for node in first.graph.nodes}
    here = align(first, other, {"tangent"})
    first.graph.lint()
    added = [node.name for node in first.graph.nodes if node.name not in before]
    assert added == ["tangent_again", "mul_tensor_1"]
    draws = [one.name for node, one in here.items() if node.target is aten.bernoulli.p]
    assert draws == [node.name for node in first.graph.nodes if node.target is aten.bernoulli.p]
    (product,) = (one for node, one in here.items() if node.target is aten.mul.Tensor)
    assert [one.name for one in product.all_input_nodes] == ["pow_tensor_scalar", "tangent_again"]


def test_constants_of_traces_are_compared():
    first, other = (traced(value, torch.ops.aten.pow.Tensor_Scalar) for value in (1.0, 2.0))
    here = align(first, other, {"tangent"})
    sums = {one for node, one in here.items() if node.target is torch.ops.aten.add.Tensor}
    assert [one.args[1].target for one in sums] == ["constant_0"]  # type: ignore[union-attr]
    assert first.constant_0.tolist() == [2.0, 2.0]  # type: ignore[union-attr, operator]


def test_an_effect_that_only_one_trace_has():
    aten = torch.ops.aten
    first, other = traced(1.0, aten.bernoulli.p), traced(1.0, aten.bernoulli.p, aten.bernoulli.p)
    with pytest.raises(PassError, match=r"bernoulli.* has an effect, and the traces .* do not agree on it"):
        align(first, other, {"tangent"})
