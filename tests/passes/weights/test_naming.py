"""Inputs of a graph are the weights that its own method reads, whatever the others read."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import penstock
from penstock.passes.graph.nodes import copy_graph_module, placeholders_of
from penstock.passes.weights.lifted import weights_among


def two_methods():
    """Methods that read a weight each, and the graph of the first one."""
    x = torch.ones(2, 8)
    models = {name: nn.Sequential(OrderedDict({name: nn.Linear(8, 8, bias=False)})) for name in "ab"}
    exported = {name: torch.export.export(model, (x,)) for name, model in models.items()}
    return penstock.annotate(exported), exported["a"].graph_module


def test_a_graph_has_the_weights_of_its_own_method():
    payload, graph_module = two_methods()
    assert [len(trace.steps) for trace in payload.traces] == [1, 1]
    assert [weight.fqn for weight in weights_among(graph_module, payload, "a").values()] == ["a.weight"]


def test_a_graph_that_has_lost_one_is_refused():
    payload, graph_module = two_methods()
    renamed = copy_graph_module(graph_module)
    for number, node in enumerate(placeholders_of(renamed.graph)):
        node.name = f"arg{number}_1"
    with pytest.raises(
        penstock.PassError,
        match=r"is the weight 'a\.weight' that method 'a' reads \(the inputs are arg0_1, arg1_1\)",
    ):
        weights_among(renamed, payload, "a")
