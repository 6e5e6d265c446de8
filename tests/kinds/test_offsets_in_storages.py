"""as_strided with an offset, which counts from where the storage of a weight begins."""

import pytest
import torch
from torch import nn

import penstock
from penstock import LoadOptions

WIDTH = 64


class Strided(nn.Module):
    """Reads weights, views of weights and a buffer by offsets in their storages, behind another weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.both = nn.Parameter(torch.randn(2 * WIDTH, WIDTH), requires_grad=False)
        self.lower = nn.Parameter(self.both.detach()[WIDTH:], requires_grad=False)
        self.alone = nn.Parameter(torch.randn(2, WIDTH, WIDTH)[1], requires_grad=False)
        self.register_buffer("state", torch.zeros(3 * WIDTH))

    def forward(self, x):
        x = self.first(x)
        x = x @ self.both.as_strided((WIDTH, WIDTH), (1, WIDTH), 3)
        x = x @ self.lower.as_strided((WIDTH, WIDTH), (WIDTH, 1), WIDTH)
        x = x @ self.alone.t().as_strided((WIDTH, WIDTH), (1, WIDTH), WIDTH * WIDTH // 2)
        self.state.as_strided((WIDTH,), (1,), 5).add_(x.mean(0))
        return x / WIDTH + self.state[:WIDTH]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("strided") / "m.penstock"
    return penstock.compile(torch.export.export(Strided().eval(), (torch.randn(5, WIDTH),)), path)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("place", ["sim", "paged", "contiguous"])
def test_the_bytes_are_those_of_the_module(place, share, program):
    x, reference = torch.randn(5, WIDTH), Strided().eval()  # a copy would have a storage for each parameter
    where = {"device": "sim", "hardware": "laptop"} if place == "sim" else {"arena": place}
    floor = program.floor(where.get("device", "cpu"), where.get("arena"))
    plan = program.plan(max(floor, int(program.weight_bytes * share)), **where)
    with (
        program.load(
            plan=plan, device=where.get("device", "cpu"), options=LoadOptions(poison=True)
        ) as module,
        torch.no_grad(),
    ):
        for _ in range(3):
            assert torch.equal(module(x), reference(x))


def test_a_view_that_outlives_a_module_on_a_device_has_its_memory(program):
    """Not the weights any longer, but nobody else's bytes."""
    module = program.load(budget="50%", device="sim", options=LoadOptions(poison=True))
    kept = dict(module._weights.tensors)
    module.close()
    del module
    taken = [torch.full((WIDTH, WIDTH), 7.0) for _ in range(64)]
    for tensor in kept.values():
        assert not (tensor == 7.0).any()
    assert taken
