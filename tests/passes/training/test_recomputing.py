"""What the backward computes again: products only where layers are."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from penstock.passes.activations import Activations
from penstock.passes.annotate import annotate
from penstock.passes.training.facts import RUNGS
from penstock.passes.training.halves import divide
from tests.passes.training.test_halves import products, trained
from tests.training_models import DECODER, WIDTH, Decoder


@pytest.fixture(scope="module")
def decoder():
    """The decoder for batches of any length, which are as large as those of its weights."""
    length = Dim("length", min=2, max=512)
    module = DECODER.model()
    tokens = torch.randint(0, 96, (2, 100))
    exported = export(module, (tokens, tokens), dynamic_shapes=({1: length}, {1: length}), strict=False)
    return divide(exported, trained(exported), rungs=RUNGS)


def backward_of(halves, name):
    rung = halves.training.rung(name)
    assert rung is not None
    return halves.programs[rung.backwards[0].method]


def held(halves, name):
    rung = halves.training.rung(name)
    assert rung is not None
    return Activations.of(halves.programs[rung.backwards[0].method], held=rung.made(rung.backwards[0].method))


def test_layers_keep_what_goes_from_one_to_the_next_and_what_is_random(decoder):
    value = 2 * 100 * WIDTH * 4
    masks, between = 3 * 2, 3 * 2 - 1  # one value goes between any two of three attentions and three others
    assert held(decoder, "layers").held_bytes() == (masks + between) * value


def test_bytes_are_counted_at_any_size(decoder):
    for name in RUNGS:
        one = held(decoder, name)
        (symbol,) = {symbol for size in one.sizes for symbol in size.symbols}
        exported, fixed = one.held_bytes(), one.held[0]
        assert one.held_bytes({symbol: 300}) - fixed == 3 * (exported - fixed)


def test_layers_compute_products_twice_where_a_gradient_needs_them(decoder):
    counts = [len(list(products(backward_of(decoder, name)))) for name in RUNGS]
    # In each block three views of one weight, the gate with its adapter, and what the other adapter's second
    # product is of; behind the last value that is kept, the last product of the block, and the head.
    assert counts[1] == counts[0] + 3 * (3 + 3 + 1) + 2


def test_weights_are_read_once_more_where_layers_are_computed_again(decoder):
    payload = annotate(dict(decoder.programs))
    names = payload.storage_names()
    reads = {
        trace.method: Counter(names[s] for step in trace.steps for s in step.reads)
        for trace in payload.traces
    }
    once, forward = reads["backward"], reads["forward"]
    large = {name for name, one in zip(names, payload.storages, strict=True) if one.nbytes > 32 << 10}
    more = {name for name in large if name.endswith(("packed", "gate.base.weight"))}
    more |= {"blocks.2.back.weight"}
    for name in large - {"embed.weight"}:
        assert reads["backward_layers"][name] == once[name] + (forward[name] if name in more else 0), name
    assert reads["backward_layers"]["embed.weight"] == once["embed.weight"] + 2  # as table, and as head


def test_a_rung_that_saves_nothing_is_left_out():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return self.up(x).sum()

    exported = export(One(), (torch.ones(2, 8),), strict=False)
    halves = divide(exported, trained(exported), rungs=RUNGS)
    assert [rung.name for rung in halves.training.rungs] == ["keep"]


def test_no_weight_needs_a_value():
    import penstock

    exported = penstock.fake_export(Decoder, DECODER.inputs())
    assert len(divide(exported, trained(exported), rungs=RUNGS).programs) == 2 * len(RUNGS)
