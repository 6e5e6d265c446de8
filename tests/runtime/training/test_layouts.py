"""Values that are not contiguous: drawn and written in the layout in which eager PyTorch does it."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.passes.graph import dry_run
from penstock.schedule.facts.errors import PassError, StreamError
from tests.hunt import nightly_but
from tests.runtime.training.test_training import assert_equal, gradients

WAYS = {
    "joint": {},
    "segments": {"backward": "segments", "evaluate": False},
    "spill": {"spill": True, "evaluate": False},
}
"""What evaluates is the same program in each of them."""


class Around(nn.Module):
    """A trained and a frozen product around an operation."""

    def __init__(self, inner):
        super().__init__()
        self.trained, self.inner, self.frozen = nn.Linear(48, 48), inner, nn.Linear(48, 48)

    def forward(self, x):
        y = self.inner(self.trained(x))
        return self.frozen(y[0] if isinstance(y, tuple) else y).square().mean()


def _drawn_in_place(x):
    x = x.transpose(0, 1)
    return x * torch.empty_like(x).bernoulli_(0.3)


def _written_in_place(x):
    part = x.repeat(1, 1, 3)[..., 48:96]
    return (part * 1.5).tanh() + x.repeat(1, 1, 3).unsafe_split(48, -1)[1].add_(0.25).sigmoid_()


def _written_over(x):
    x = functional.elu(x * 2, inplace=True) * 1.5
    x[:, 0].copy_(x[:, 1] * 2)
    return x


def _encoder():
    return nn.TransformerEncoderLayer(48, 4, 64, dropout=0.1, batch_first=True)


OPERATIONS = {
    "dropout": lambda: lambda x: functional.dropout(x.transpose(0, 1), 0.3),
    "dropout of a slice": lambda: lambda x: functional.dropout(x[:, ::2], 0.3),
    "alpha dropout": lambda: lambda x: functional.alpha_dropout(x.transpose(0, 1), 0.3, training=True),
    "drawn in place": lambda: _drawn_in_place,
    "written in place": lambda: _written_in_place,
    "written over": lambda: _written_over,
    "encoder": _encoder,
    "gru": lambda: nn.GRU(48, 48, batch_first=True),
}


def _model(make):
    torch.manual_seed(0)
    model = Around(make())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("trained"))
    return model


def _step(model, x):
    torch.manual_seed(3)
    loss = model(x)
    loss.backward()
    return loss.detach()


def _compiled(model, path, **options):
    x = torch.randn(5, 7, 48, generator=torch.Generator().manual_seed(1))
    return penstock.compile_training(model, path, example=(x,), trainable=["trained.*"], **options), x


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
@pytest.mark.parametrize(
    ("operation", "way"),
    nightly_but(
        {
            ("dropout", "joint"),
            ("written in place", "joint"),
            ("drawn in place", "segments"),
            ("gru", "segments"),
            ("written over", "spill"),
            ("encoder", "spill"),
        },
        itertools.product(OPERATIONS, WAYS),
    ),
)
def test_gradients(operation, way, tmp_path):
    plain, model = _model(OPERATIONS[operation]), _model(OPERATIONS[operation])
    program, x = _compiled(model, tmp_path / "m.penstock", **WAYS[way])
    expected = _step(plain, x)
    with penstock.open(program.path).load("100%") as module:
        assert torch.equal(_step(module, x), expected)
        assert_equal(gradients(module), gradients(plain))


def test_a_stored_graph_declares_what_it_calls():
    operator = torch.ops.aten.exponential_.default
    assert dry_run.named("exponential_", "default") is dry_run.as_function(operator)
    assert dry_run.named("transpose_", "default") is None
    x = torch.randn(4, 6).t()[::2]
    torch.manual_seed(0)
    drawn = dry_run.as_function(operator)(x)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.empty_strided(x.shape, x.stride()).exponential_())
    assert drawn.stride() == x.stride()


@pytest.mark.parametrize("way", WAYS)
def test_random_slopes(way, tmp_path):
    def transposed(x):
        return functional.rrelu(x.transpose(0, 1), training=True)

    with pytest.raises(PassError, match="RReLU in training mode"):
        _compiled(_model(lambda: transposed), tmp_path / "m.penstock", **WAYS[way])


def test_random_slopes_by_segments(tmp_path):
    with pytest.raises(PassError, match="RReLU in training mode"):
        _compiled(_model(nn.RReLU), tmp_path / "m.penstock", backward="segments")


class Tokens(nn.Module):
    """Two inputs, of which one is of whole numbers, and both are flattened."""

    def __init__(self):
        super().__init__()
        self.trained, self.table = nn.Linear(8, 8), nn.Embedding(16, 8)

    def forward(self, x, tokens):
        y = functional.dropout(self.trained(x).flatten(0, 1), 0.5)
        return (y * self.table(tokens.flatten())).square().mean()


def test_inputs_that_lie_in_another_way(tmp_path):
    torch.manual_seed(0)
    model = Tokens()
    model.table.requires_grad_(False)
    x, tokens = torch.randn(3, 4, 8), torch.randint(16, (3, 9))
    program = penstock.compile_training(
        model, tmp_path / "m.penstock", example=(x, tokens[:, :4].contiguous()), trainable=["trained.*"]
    )
    with program.load("100%") as module:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                for ids in (tokens[:, :4].contiguous(), tokens[:, :4], tokens[:, 5:]):
                    torch.manual_seed(1)
                    found = module(x, ids)
                    torch.manual_seed(1)
                    assert torch.equal(found, model(x, ids.contiguous()))
        turned = torch.randn(4, 3, 8).transpose(0, 1)
        with pytest.raises(StreamError, match=r"input x has the strides \(8, 24, 1\), and was contiguous"):
            module(turned, tokens[:, :4])
        module(turned.contiguous(), tokens[:, :4]).backward()
    program = penstock.compile_training(
        model,
        tmp_path / "turned.penstock",
        example=(turned, tokens[:, :4].contiguous()),
        trainable=["trained.*"],
    )
    torch.manual_seed(1)
    expected = model(turned, tokens[:, :4].contiguous())
    with program.load("100%") as module:
        torch.manual_seed(1)
        assert torch.equal(module(turned, tokens[:, :4].contiguous()), expected)
        with pytest.raises(StreamError, match="lay in another order"):
            module(x, tokens[:, :4])
