"""A stored graph, followed from its operators and arguments alone, uses weights as the program did."""

import json

import pytest
import torch

from penstock.passes.annotate import annotate_with_values
from penstock.passes.graph.dry_run import dry_run
from penstock.passes.graph.propagation import fake_inputs, storages_of
from penstock.passes.lowering import archive
from penstock.passes.lowering.archive import encoded_methods
from penstock.passes.lowering.method_code import decode_method
from penstock.passes.weights.usage import follow_weights
from penstock.schedule.facts.errors import PassError
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export, weights_of


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, "raw") for name in CASES] + [(name, "decomposed") for name in ("Cache", "Scan", "Views")],
)
def test_the_flow_of_a_stored_graph_is_that_of_its_program(name, way):
    case = CASES[name]
    _, exported = export(case, decomposed=way == "decomposed")
    annotated = annotate_with_values(exported)
    (code,) = encoded_methods(annotated).values()
    if not isinstance(code, bytes):
        assert name == "WithoutGrad"
        return
    _, expected = follow_weights(annotated.programs["forward"].graph_module, weights_of(exported))
    got, *_ = archive._followed(annotated.payload, decode_method(code))
    assert got == expected
    archive.check_uses(annotated.payload, annotated.payload.methods[0], decode_method(code))


class Repeated(torch.nn.Module):
    """Layers that are alike, one of which reads its weight through a view that the others do not make."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(8, 8) for _ in range(3))

    def forward(self, x):
        x = (x.t() @ self.weights[0]).t()  # a view of what is no weight, of the sizes of a weight
        x = x @ self.weights[1].t()
        late = self.weights[2].t()
        return x.relu() @ late.relu()


def test_a_view_of_a_weight_is_no_view_of_something_that_is_alike():
    exported = torch.export.export(Repeated(), (torch.ones(8, 8),))
    annotated = annotate_with_values(exported)
    (code,) = encoded_methods(annotated).values()
    flow, *_ = archive._followed(annotated.payload, decode_method(code))
    numbers = {weight.fqn: weight.parts[0].storage for weight in annotated.payload.weights}
    assert flow.reads == {
        "matmul": (numbers["weights.0"],),
        "matmul_1": (numbers["weights.1"],),
        "relu_1": (numbers["weights.2"],),
    }


def test_sizes_that_change_in_place_are_those_of_one_value():
    class Turned(torch.nn.Module):
        def forward(self, x):
            one, other = x + 1, x + 1
            one.unsqueeze_(0)
            return one, other * 2

    exported = torch.export.export(Turned(), (torch.ones(2, 3),))
    assert json.loads(encoded_methods(annotate_with_values(exported))["forward"])["graph"]["nodes"][3][2] == (
        "aten.unsqueeze_.default"
    )
    dry_run(exported.graph, fake_inputs(exported.graph_module), frozenset())
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if node.op == "call_function"}
    assert values["unsqueeze_"].shape == (1, 2, 3)
    assert values["mul"].shape == (2, 3)
    assert storages_of(values["add"]) != storages_of(values["add_1"])


class OfTransposed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.t().view(2, 2, 8))


def test_inputs_lie_as_they_lay_at_the_export():
    exported = torch.export.export(OfTransposed(), (torch.ones(4, 8).t(),))
    annotated = annotate_with_values(exported)
    (code,) = encoded_methods(annotated).values()
    decoded = decode_method(code)
    assert decoded.strides == {0: (1, 8)}
    archive.check_uses(annotated.payload, annotated.payload.methods[0], decoded)


@pytest.mark.parametrize("strides", [7, [7], [[0]], [[0, 7]], [["0", [1]]], [[0, [1.5]]], [[0, [True]]]])
def test_strides_that_are_none(strides):
    annotated = annotate_with_values(torch.export.export(Repeated(), (torch.ones(8, 8),)))
    stored = json.loads(encoded_methods(annotated)["forward"]) | {"strides": strides}
    with pytest.raises(PassError, match="is no stride of an input"):
        decode_method(json.dumps(stored).encode())
