"""Partitioners of other backends beside penstock's: what they took before is left to them."""

import logging
import warnings

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from torch import nn
from torch.export import export

from penstock.backends.executorch import PenstockPartitioner
from penstock.schedule.facts.errors import PassError
from tests.hunt import nightly_but


class Words(nn.Module):
    """XNNPACK takes the layers and leaves the table."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(100, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, words):
        return self.layers(self.table(words))


class Counting(nn.Module):
    """Writes a buffer between two layers: to a sum, or rows of it."""

    def __init__(self, *, rows):
        super().__init__()
        self.first, self.last, self.rows = nn.Linear(64, 64), nn.Linear(64, 64), rows
        self.register_buffer("kept", torch.zeros(4, 64))

    def forward(self, x):
        y = self.first(x)
        if self.rows:
            self.kept[torch.tensor([1])] = y[:1]
        else:
            self.kept.add_(y)
        return self.last(y + self.kept)


def delegates(model, given, partitioners):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edge = to_edge_transform_and_lower(export(model.eval(), (given,)), partitioner=list(partitioners))
        made = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=4096))
    return [one.id for one in made.executorch_program.execution_plan[0].delegates]


@pytest.mark.parametrize("kernels", nightly_but(["executorch"], ["executorch", "aotinductor"]))
def test_where_another_has_all_weights_penstock_says_so(kernels, caplog):
    partitioners = XnnpackPartitioner(), PenstockPartitioner(kernels=kernels, least=1)
    with caplog.at_level(logging.WARNING, "penstock"):
        assert delegates(nn.Linear(64, 64), torch.randn(4, 64), partitioners) == ["XnnpackBackend"]
    (said,) = [one.getMessage() for one in caplog.records if one.name.startswith("penstock")]
    assert said == (
        "penstock streams nothing of a program: XnnpackBackend took what reads weights before; name "
        "PenstockPartitioner first to have them streamed"
    )


def test_what_another_has_left_streams():
    partitioners = XnnpackPartitioner(), PenstockPartitioner(least=1)
    assert delegates(Words(), torch.arange(4), partitioners) == ["PenstockBackend", "XnnpackBackend"]


def test_a_compiled_method_is_not_without_what_another_has_taken():
    partitioners = XnnpackPartitioner(), PenstockPartitioner(kernels="aotinductor")
    with pytest.raises(PassError, match="XnnpackBackend took a part of the program before, and a compiled"):
        delegates(Words(), torch.arange(4), partitioners)


@pytest.mark.nightly
def test_what_penstock_took_first_is_not_anothers():
    partitioners = PenstockPartitioner(least=1), XnnpackPartitioner()
    assert set(delegates(Words(), torch.arange(4), partitioners)) == {"PenstockBackend"}


@pytest.mark.parametrize("rows", nightly_but([True], [False, True]))
def test_penstock_may_come_first_where_a_buffer_is_written(rows):
    partitioners = PenstockPartitioner(least=1), XnnpackPartitioner()
    with torch.no_grad():
        found = delegates(Counting(rows=rows), torch.randn(4, 64), partitioners)
    assert found.count("PenstockBackend") == 3


@pytest.mark.parametrize("rows", nightly_but([False], [False, True]))
def test_penstock_may_come_last_where_a_buffer_is_written(rows):
    model = nn.Sequential(nn.Embedding(100, 64), Counting(rows=rows))
    partitioners = XnnpackPartitioner(), PenstockPartitioner(least=1)
    with torch.no_grad():  # ExecuTorch alone needs it too
        found = delegates(model, torch.arange(4), partitioners)
    assert found[0] == "PenstockBackend"
    assert set(found) == {"PenstockBackend", "XnnpackBackend"}
