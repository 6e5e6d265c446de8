"""Buffers that programs write, in every way that makes it hard: each is one state of the loaded program."""

import pytest
import torch
from executorch.exir import to_edge
from torch import nn

import penstock
from penstock.backends.executorch import PenstockPartitioner
from tests.backends.executorch.delegating import Delegates, Outer
from tests.hunt import nightly_but

pytestmark = pytest.mark.filterwarnings("ignore")  # ExecuTorch's own


class States(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("a", torch.ones(2, 64))
        self.register_buffer("b", torch.full((2, 64), 0.5))

    def read(self, x):
        return self.linear(x) + self.a - 2 * self.b


class Last(States):
    """Keeps its input, as it is."""

    def forward(self, x):
        y = self.read(x)
        self.a.copy_(x)
        return y


class Swapped(States):
    def forward(self, x):
        y, before = self.read(x), self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(before)
        return y


class Shifted(States):
    """A queue of inputs."""

    def forward(self, x):
        y = self.read(x)
        self.b.copy_(self.a)
        self.a.copy_(x)
        return y


class Returned(States):
    def forward(self, x):
        self.a.add_(x)
        return self.read(x), self.a


class Cleared(States):
    """Writes what is computed from nothing."""

    def forward(self, x):
        y = self.read(x)
        self.a.zero_()
        return y


@pytest.mark.parametrize(
    "kind", nightly_but([Swapped, Returned], [Last, Swapped, Shifted, Returned, Cleared])
)
def test_each_state_is_penstocks(lower, kind):
    torch.manual_seed(0)
    model = kind().eval()
    lowered = lower(torch.export.export(model, (torch.randn(2, 64),)))
    assert not lowered.edge.exported_program().graph_signature.buffers_to_mutate
    delegates = Delegates(lowered.exported)
    for _ in range(3):
        x = torch.randn(2, 64)
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(Outer(lowered.edge, delegates)(x), expected, rtol=1e-4, atol=1e-4)


class Encoder(nn.Module):
    """Writes all of a buffer, and never reads it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("keys", torch.zeros(2, 64))

    def forward(self, x):
        y = self.linear(x)
        self.keys.copy_(y)
        return torch.tanh(y)


class Decoder(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.linear = encoder.linear
        self.register_buffer("keys", encoder.keys)

    def forward(self, x):
        return self.linear(x) + self.keys


@pytest.mark.parametrize("order", ["encode decode", "decode encode"])
def test_a_method_reads_what_another_writes_without_reading_it(lower, order):
    encoder, x = Encoder().eval(), torch.randn(2, 64)
    models = {"encode": encoder, "decode": Decoder(encoder)}
    lowered = lower({name: torch.export.export(models[name], (x,)) for name in order.split()})
    delegates = Delegates(lowered.exported)
    Outer(lowered.edge, delegates, "encode")(x)
    found = Outer(lowered.edge, delegates, "decode")(x)
    torch.testing.assert_close(found, 2 * encoder.linear(x), rtol=1e-4, atol=1e-4)


class Alike(States):
    def forward(self, x):
        y = self.read(x)
        z = torch.relu(y)
        self.a.copy_(z)
        self.b.copy_(z)
        return y


def test_what_torch_cannot_make_functional_is_refused():
    exported = torch.export.export(Alike().eval(), (torch.randn(2, 64),))
    with pytest.raises(penstock.PassError, match=r"two buffers, or returns it too, give each a clone\(\) of"):
        PenstockPartitioner().transform_for_pre_decomposition(exported)


@pytest.mark.parametrize("kind", nightly_but([Last], [Last, Returned]))
def test_without_the_transform_such_a_state_stays_with_executorch(caplog, kind):
    """`to_edge` asks no partitioner, and a partitioner may add no node."""
    exported = torch.export.export(kind().eval(), (torch.randn(2, 64),))
    edge = to_edge(exported).to_backend(PenstockPartitioner(least=256))
    assert set(edge.exported_program().graph_signature.buffers_to_mutate.values()) == {"a"}
    assert "buffer 'a' stays with ExecuTorch, which keeps one for each method" in caplog.text
