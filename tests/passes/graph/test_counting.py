"""What an operator computes is counted once for each kind of its arguments."""

import pytest
import torch
from torch import nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.modules import module as of_modules

from penstock.passes.graph import propagation
from penstock.passes.graph.propagation import FLOPS, fake_inputs, propagate, storages_of

ROWS = torch.export.Dim("rows", min=2, max=64)


def counted(exported):
    graph_module = exported.graph_module
    propagated = propagate(graph_module, fake_inputs(graph_module))
    return [node.meta.get(FLOPS) for node in propagated.graph.nodes]


def test_modules_of_other_threads_see_no_hook_while_operators_are_counted(monkeypatch):
    exported = torch.export.export(nn.Linear(8, 8).eval(), (torch.ones(5, 8),))
    hooks = []

    class Counter(propagation._Counter):
        def __enter__(self):
            entered = super().__enter__()
            hooks.append({**of_modules._global_forward_hooks, **of_modules._global_forward_pre_hooks})
            return entered

    monkeypatch.setattr(propagation, "_Counter", Counter)
    assert counted(exported)
    assert hooks
    assert not any(hooks)


def test_arguments_are_alike_only_where_the_work_is():
    facts = propagation.facts_of
    one = torch.ones(2, 3)
    assert facts((one, 1)) == facts((torch.zeros(2, 3), 1))
    for other in (
        (one, 2),
        (one, 1.0),
        (one, True),
        (one.T, 1),
        (one.half(), 1),
        ([one], 1),
        (one, {"a": 1}),
    ):
        assert facts(other) != facts((one, 1))
    assert facts(object()) != facts(object())
    turned = torch.ones(2, dtype=torch.complex64)
    assert facts(turned) != facts(turned.conj())


@pytest.mark.parametrize("dynamic", [None, {"input": {0: ROWS}}])
def test_layers_that_repeat_run_once_and_alias_as_if_all_ran(monkeypatch, dynamic):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout()

        def forward(self, x):
            return self.dropout(self.linear(x)).view(-1, 2, 4).transpose(1, 2).contiguous().view(-1, 8)

    model = nn.Sequential(*(Layer() for _ in range(4))).eval()
    graph_module = torch.export.export(model, (torch.ones(6, 8),), dynamic_shapes=dynamic).graph_module
    ran = []
    run_node = FakeTensorProp.run_node

    def counting(self, n):
        ran.append(n.op)
        return run_node(self, n)

    def shared():
        values = [n.meta.get("val") for n in propagate(graph_module, fake_inputs(graph_module)).graph.nodes]
        storages = [storages_of(value) for value in values]
        return [[storages.index(one)] if one else [] for one in storages]

    monkeypatch.setattr(FakeTensorProp, "run_node", counting)
    quick, few = shared(), ran.count("call_function")
    ran.clear()
    monkeypatch.setattr(propagation._CountingProp, "_recorded", lambda self, n: None)
    assert shared() == quick
    assert few < 0.7 * ran.count("call_function")  # export records the result of dropout as no alias


def test_a_value_recorded_for_two_nodes_is_not_an_alias():
    exported = torch.export.export(nn.Sequential(nn.GELU(), nn.GELU(), nn.GELU()), (torch.ones(5),))
    first, *others = (node for node in exported.graph.nodes if node.op == "call_function")
    for node in others:
        node.args, node.meta["val"] = first.args, first.meta["val"]
    propagated = propagate(exported.graph_module, fake_inputs(exported.graph_module))
    made = [storages_of(n.meta["val"]) for n in propagated.graph.nodes if n.op == "call_function"]
    assert len({storage for (storage,) in made}) == 3


def test_recorded_values_keep_their_sizes_where_the_graph_changes_one_in_place():
    class Model(nn.Module):
        def forward(self, x):
            return torch.relu(x), torch.relu(x).unsqueeze_(0)

    exported = torch.export.export(Model(), (torch.ones(5),))
    nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    before = [node.meta["val"].shape for node in nodes]
    for _ in range(2):
        propagate(exported.graph_module, fake_inputs(exported.graph_module))
    assert [node.meta["val"].shape for node in nodes] == before
