"""What is stored of a method to run it is what the exported program holds, node by node."""

import json
import math
import zipfile
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from penstock.passes.activations import Activations
from penstock.passes.annotate import annotate_with_values
from penstock.passes.calls.stored_graph import decode_graph, decode_value, encode_graph, encode_value
from penstock.passes.graph.dry_run import dry_run
from penstock.passes.graph.nodes import move_graph, nested_modules
from penstock.passes.graph.propagation import fake_inputs, storages_of
from penstock.passes.lowering import archive, eager
from penstock.passes.lowering.archive import PROGRAM, encoded_methods
from penstock.passes.lowering.method_code import VERSION, decode_method, encode_method, method_code
from penstock.passes.probes import streaming
from penstock.passes.weights.usage import follow_weights
from penstock.schedule.facts.errors import PassError, PayloadError
from penstock.schedule.payload.codec import ProgramFile
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export, prepare, retarget, same_bits, weights_of


def rows(graph):
    """Each node as text, without what only a tracer knows."""
    return [(n.op, n.name, n.target, repr(n.args), repr(n.kwargs)) for n in graph.nodes]


def all_rows(made):
    inner = [module for body in made.bodies.values() for module in nested_modules(body)]
    return [rows(made.graph), *(rows(module.graph) for module in inner)]


@pytest.mark.parametrize("name", CASES)
def test_every_method_comes_back_node_by_node(name):
    annotated = annotate_with_values(export(CASES[name])[1])
    exported = annotated.programs["forward"]
    activations = Activations.of(exported, annotated.propagated["forward"])
    expected, got = method_code(exported), decode_method(encode_method(exported, activations))
    assert all_rows(got.graph())[0] == rows(exported.graph)
    assert all_rows(got.graph()) == all_rows(expected.graph())
    assert got.weights == expected.weights
    assert got.signature == expected.signature
    assert got.activations() == activations
    assert activations.peak() == expected.activations().peak()


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 1.0, -0.0, 0.1, math.inf, -math.inf, "x", [1, [2.5, None]], (1, (2,), [3])),
        *(slice(1, None, (2,)), {"a": (1,), 2: []}, torch.float8_e4m3fn, torch.device("cuda", 1)),
        *(torch.strided, torch.channels_last, torch.ops.aten.add.Tensor, torch.ops.higher_order.cond),
    ],
    ids=str,
)
def test_values_come_back_with_their_types(value):
    assert repr(decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))) == repr(value)


def test_no_number_comes_back():
    assert math.isnan(decode_value(encode_value(math.nan)))


class Moves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.ones(4, device=x.device)
        return self.linear(x * mask).to("cpu") + torch.arange(4)


def test_a_stored_graph_moves_to_a_device_as_the_program_does():
    exported = torch.export.export(Moves(), (torch.randn(2, 4),))
    there = retarget(exported.graph_module, "cuda:1")
    for node in there.graph.nodes:  # as if it had been exported there
        if isinstance(node.meta.get("val"), torch.Tensor) and node.name != "to":
            node.meta["val"] = node.meta["val"].to("meta")
    stored = json.loads(json.dumps(encode_graph(there)))
    graph, bodies = decode_graph(stored)
    assert move_graph(graph, bodies.values(), torch.device("cuda:1"), "cpu")
    copied = fx.GraphModule(bodies, graph)
    assert copied.code.count("torch.ops.aten.to.") == 1
    assert copied.code == retargeted(there).code


def retargeted(graph_module):
    copied = fx.GraphModule(graph_module, graph_module.graph)
    assert move_graph(copied.graph, (), torch.device("cuda:1"), "cpu")
    copied.recompile()
    return copied


class Normed(nn.Module):
    def forward(self, x):
        return nn.functional.layer_norm(x, (4,))


class Turned(nn.Module):
    """Multiplies by a complex number, which JSON does not have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.mul(torch.complex(self.linear(x), x), 1 + 2j)


def test_a_program_that_has_no_json_runs_from_its_export():
    model, x = Turned(), torch.randn(2, 4)
    exported = torch.export.export(model, (x,))
    assert encode_method(exported, Activations.of(exported)) is None
    with pytest.raises(PayloadError, match=r"method 'forward' has no form as data.*trust=True \(--trust\)"):
        prepare(exported)
    lowered, streamer = prepare(exported, trust=True)
    program = eager.instantiate(lowered, streamer.tensors(), lowered.payload.methods[0], [0])
    with torch.no_grad(), streaming(streamer):
        assert same_bits(program(x), model(x))


def test_json_of_another_version_is_refused(tmp_path):
    exported = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    annotated = annotate_with_values(exported)
    payload = replace(annotated.payload, program=ProgramFile(PROGRAM, "0" * 64))
    eager.save(annotated, tmp_path)
    with zipfile.ZipFile(tmp_path / PROGRAM) as archive:
        assert archive.namelist() == ["forward.json"]  # and nothing that is code
        stored = json.loads(archive.read("forward.json"))
    with zipfile.ZipFile(tmp_path / PROGRAM, "w") as archive:
        archive.writestr(
            "forward.json", json.dumps({**stored, "version": VERSION + 1, "graph": "of the future"})
        )
    with pytest.raises(PayloadError, match=r"expected JSON of version .*: compile again"):
        eager.load(tmp_path, payload)


def test_what_is_no_stored_graph_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("inner", (x,)))
    with pytest.raises(PassError, match="node inner is a call_module: it has no JSON"):
        encode_graph(fx.GraphModule({"inner": nn.ReLU()}, graph))
    end = ["output", "output", "output", [None], {}]
    with pytest.raises(PassError, match=r"there is no operator nobody\.has\.this: import the library that"):
        decode_graph({"nodes": [["call_function", "a", "nobody.has.this", [], {}], end], "bodies": {}})
    twice = [["placeholder", "x", target, [], {}] for target in ("x", "y")]
    with pytest.raises(PassError, match="the graph has two nodes 'x'"):
        decode_graph({"nodes": [*twice, end], "bodies": {}})
    with pytest.raises(PassError, match="of type object has no JSON"):
        encode_value(object())
    with pytest.raises(PassError, match="is no operator that has a name"):
        encode_graph(fx.symbolic_trace(Normed()))


# A stored graph, followed from its operators and arguments alone, uses weights as the program did.


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
