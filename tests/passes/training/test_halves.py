"""Forward and backward as two programs: values equal autograd's to the bit, and no weight is kept."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn import functional

from penstock.passes.annotate import annotate, annotate_with_values
from penstock.passes.lowering.archive import encoded_methods
from penstock.passes.probes import STORE
from penstock.passes.training.facts import RUNGS
from penstock.passes.training.halves import divide
from penstock.schedule.facts.errors import PassError
from tests.hunt import nightly_but
from tests.training_models import DECODER, NORMED

aten = torch.ops.aten


class Resized(nn.Module):
    """Interpolations in every mode, which torch defines twice."""

    def __init__(self):
        super().__init__()
        self.up, self.base = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3)

    def forward(self, x):
        x = self.up(x)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            x = functional.interpolate(self.base(x), scale_factor=2, mode=mode)
        return x.square().mean()


class Recurrent(nn.Module):
    """A frozen LSTM and a GRU behind a trained layer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.lstm, self.gru = nn.LSTM(8, 16, num_layers=2, dropout=0.2), nn.GRU(16, 8, bidirectional=True)

    def forward(self, x):
        return self.gru(self.lstm(self.up(x))[0])[0].square().mean()


class Moving(nn.Module):
    """Reads a buffer that it writes to afterwards, so that the backward needs what the buffer was."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x):
        loss = (self.up(x) * self.scale.clone()).square().mean()
        self.scale.add_(1)
        return loss


class Normed(nn.Module):
    """Batch norm of frozen statistics, a constant, and a weight of two names whose view is read."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16).eval()
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.two.weight = self.one.weight
        self.shift = torch.arange(16.0)

    def forward(self, x):
        x = self.norm(self.up(x)) + self.shift
        for row in self.one.weight.t().split(8):
            x = x + torch.tanh(self.two(x)) * row.sum()
        return x.sin().sum()


class Packed(nn.Module):
    """Products with weights of one byte an element, which each product unpacks."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.register_buffer("data", torch.randint(-127, 127, (2, 32, 32), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(2, 32, 1))

    def forward(self, x):
        for data, scale in zip(self.data, self.scale, strict=True):
            x = torch.tanh(functional.linear(self.up(x), data.to(x.dtype) * scale))
        return x.square().mean()


MODELS = {
    "packed": (Packed, (4, 32)),
    "resized": (Resized, (2, 3, 10, 10)),
    "recurrent": (Recurrent, (4, 2, 8)),
    "moving": (Moving, (4, 16)),
    "normed": (Normed, (4, 16)),
}


def trained(exported):
    return [fqn for fqn in exported.graph_signature.parameters if {"up", "down"} & set(fqn.split("."))]


def run(program, leaves):
    """The results of a program's graph, without what it writes back."""
    signature = program.graph_signature
    held = {**program.state_dict, **program.constants}
    lifted = [held[spec.target].detach() for spec in signature.input_specs if spec.target is not None]
    outputs = program.graph_module(*lifted, *leaves)
    return outputs[len(outputs) - len(signature.user_outputs) :]


def call(halves, module, inputs, number=0):
    """The first result and the gradients of the trained parameters, by way of the two programs of a rung."""
    facts = halves.training
    rung = facts.rungs[number]
    (backward,) = rung.backwards
    forward = halves.programs[rung.forward]
    leaves = [*inputs, *(module.get_parameter(fqn).detach() for fqn in facts.parameters)]
    with torch.enable_grad():
        outputs = run(forward, leaves)
    results, values = outputs[: len(facts.results)], outputs[len(facts.results) :]
    weights = {value.untyped_storage().data_ptr() for value in forward.state_dict.values()}
    kept_memory = {one.untyped_storage().data_ptr() for one in values if isinstance(one, torch.Tensor)}
    assert weights.isdisjoint(kept_memory), "a weight was kept"
    kept = [values[-1 - leaf] if leaf < 0 else leaves[leaf] for leaf in backward.kept]
    with torch.no_grad():
        tangents = [torch.ones_like(results[k]) for k in backward.tangents]
        found = run(halves.programs[backward.method], [*kept, *tangents])
    names = {leaf: fqn for leaf, fqn in enumerate(facts.parameters, len(inputs))}
    return results[0], {names[leaf]: one for leaf, one in zip(backward.gradients, found, strict=True)}


@pytest.mark.filterwarnings("ignore:The tensor attributes self")
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_autograd(name):
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    module, x = kind(), torch.randn(shape)
    halves = divide(exported := export(module, (x,), strict=False), trained(exported), rungs=RUNGS)
    torch.manual_seed(1)
    expected = exported.module()(x)
    module.zero_grad()
    torch.manual_seed(1)
    plain = kind()
    plain.load_state_dict({**module.state_dict()})
    if name == "moving":
        plain.scale.fill_(2.0)
        exported.state_dict["scale"].fill_(2.0)
    plain.train(name != "normed")
    torch.manual_seed(1)
    loss = plain(x)
    loss.backward()
    for number in range(len(halves.training.rungs)):
        if name == "moving":
            exported.state_dict["scale"].fill_(2.0)
        torch.manual_seed(1)
        result, gradients = call(halves, module, (x,), number)
        assert torch.equal(result, loss)
        assert torch.equal(result, expected)
        assert set(gradients) == set(trained(exported))
        for fqn, gradient in gradients.items():
            assert gradient.any()
            assert torch.equal(gradient, plain.get_parameter(fqn).grad), fqn


@pytest.mark.filterwarnings("ignore:The tensor attributes self")
@pytest.mark.parametrize(
    ("name", "spill"),
    nightly_but(
        {("moving", False), ("normed", True), ("packed", False), ("recurrent", True)},
        itertools.product((*MODELS, "decoder"), (False, True)),
    ),
)
def test_graphs_that_need_no_propagation_have_the_values_that_it_gives(name, spill):
    if name == "decoder":
        length = Dim("length", min=2, max=512)
        sizes = {"dynamic_shapes": ({1: length}, {1: length})}
        exported = export(DECODER.model(), DECODER.inputs(), **sizes, strict=False)
    else:
        kind, shape = MODELS[name]
        exported = export(kind(), (torch.randn(shape),), strict=False)
    halves = divide(exported, trained(exported), rungs=RUNGS[: 1 if spill else None], spill=spill)
    stored = any(node.target is STORE for one in halves.programs.values() for node in one.graph.nodes)
    assert len(halves.propagated) == len(halves.programs) - stored
    found = annotate_with_values(halves.programs, propagated=halves.propagated)
    expected = annotate_with_values(halves.programs)
    assert found.payload == expected.payload
    assert encoded_methods(found) == encoded_methods(expected)


@pytest.fixture(scope="module")
def decoder():
    length = Dim("length", min=2, max=64)
    module = DECODER.model()
    exported = export(module, DECODER.inputs(), dynamic_shapes=({1: length}, {1: length}), strict=False)
    return module, divide(exported, trained(exported))


def products(program):
    return (node.name for node in program.graph.nodes if node.target in (aten.mm.default, aten.addmm.default))


def test_the_backward_computes_no_product_of_the_forward_again(decoder):
    """Metadata assertions, left in place, made it compute three products again, to the same bits."""
    blocks, per_block = 3, 3 + 3 + 3 + 1  # packed in three views, two adapted layers of three, one down
    assert len(list(products(decoder[1].forward))) == blocks * per_block + 1
    # One for each frozen product, four for each adapter. In the first block nothing in front of the
    # attention's adapter is trained: neither the packed weight nor that adapter's input has a gradient.
    assert len(list(products(decoder[1].backwards[0]))) == blocks * (3 + 5 + 5 + 1) + 1 - 3 - 2


# Nothing trained lies before these, of which the tied table is read at both ends of the forward.
UNREAD = {"decoder": {"embed.weight", "blocks.0.packed", "blocks.0.out.base.weight"}, "normed": set()}


@pytest.mark.parametrize(("name", "case", "read_again"), [("decoder", DECODER, 5), ("normed", NORMED, 0)])
def test_reads_of_backwards_are_those_of_the_forward_reversed(name, case, read_again):
    """What a rung computes again it reads once more, before it reads the weight for gradients."""
    model = case.model()
    wanted = [fqn for fqn, one in model.named_parameters() if one.requires_grad]
    halves = divide(export(model, case.inputs(), strict=False), wanted, rungs=RUNGS)
    again = {}
    for rung in halves.training.rungs:
        orders = {}
        payload = annotate({method: halves.programs[method] for method in rung.methods})
        names = payload.storage_names()
        weights = {s: names[s] for s, one in enumerate(payload.storages) if one.nbytes > 2000}
        for trace in payload.traces:
            reads = [weights[s] for step in trace.steps for s in step.reads if s in weights]
            orders[trace.method] = [fqn for fqn, _ in itertools.groupby(reads)]
        forward, backward = (orders[method] for method in rung.methods)
        last = [*dict.fromkeys(reversed(backward))][::-1]
        known = UNREAD[name]
        assert [fqn for fqn in last if fqn not in known] == [
            fqn for fqn in reversed(forward) if fqn not in known
        ]
        assert max(Counter(backward).values()) <= 2
        again[rung.name] = len(backward) - len(last)
    assert again == {"keep": 0, "layers": read_again}


def test_weights_are_unpacked_in_both_directions():
    module = Packed()
    halves = divide(exported := export(module, (torch.randn(4, 32),), strict=False), trained(exported))
    assert {"data", "scale"} <= {spec.target for spec in halves.backwards[0].graph_signature.input_specs}
    kept = halves.forward.graph.output_node().args[0][len(halves.training.results) :]
    sizes = [node.meta["val"].nbytes for node in kept]
    assert max(sizes) < module.data.nbytes // 2
    order = [node.target for node in halves.backwards[0].graph.nodes]
    unpacked = [
        k for k, target in enumerate(order) if target is aten.to.dtype or target is aten._to_copy.default
    ]
    multiplied = [k for k, target in enumerate(order) if target is aten.mm.default]
    assert unpacked[0] < multiplied[0] < unpacked[1]  # each when it is needed


@torch.library.custom_op("penstock_tests::noisy", mutates_args=())
def noisy(weight: torch.Tensor) -> torch.Tensor:
    """Draws random numbers, of which its tags say nothing."""
    return weight + torch.rand_like(weight)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, gradient: gradient)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return functional.linear(self.up(x).tanh(), noisy(self.frozen.weight)).square().mean()


def test_what_an_unknown_operator_makes_of_frozen_weights_is_not_made_again():
    torch.manual_seed(0)
    module, x = Noisy(), torch.randn(3, 8)
    exported = export(module, (x,), strict=False)
    torch.manual_seed(3)
    module(x).backward()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    _, gradients = call(divide(exported, trained(exported)), module, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    for fqn, gradient in gradients.items():
        assert torch.equal(gradient, module.get_parameter(fqn).grad), fqn


def test_sizes_stay_symbolic(decoder):
    module, halves = decoder
    tokens = torch.randint(0, 96, (2, 37))
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(3)
    module(tokens, tokens)[0].backward()
    torch.manual_seed(3)
    _, gradients = call(halves, module, (tokens, tokens))
    for fqn, gradient in gradients.items():
        assert torch.equal(gradient, module.get_parameter(fqn).grad), fqn
    numbers = [
        node for node in halves.backwards[0].graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)
    ]
    assert len([node for node in numbers if node.op == "placeholder"]) <= 2  # and not 36


def test_an_operation_without_a_gradient():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x):
            return self.up(x).detach().sum()

    exported = export(Cut(), (torch.ones(2, 4),), strict=False)
    with pytest.raises(PassError, match="no result of the program depends on what is trained"):
        divide(exported, ["up.weight"])
