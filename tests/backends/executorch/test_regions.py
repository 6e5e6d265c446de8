"""Which nodes go to which region, on graphs that make it hard."""

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import nn

from penstock.backends.executorch import PenstockPartitioner
from penstock.backends.executorch.code import text_of
from penstock.backends.executorch.regions import dim_order_of
from penstock.schedule.facts.model import Part
from tests.backends.executorch.delegating import Delegates, Outer

pytestmark = pytest.mark.filterwarnings("ignore")  # ExecuTorch's own


class Partitioned:
    """The programs of the regions of a model, as the backend gets them."""

    def __init__(self, model, *inputs):
        exported = torch.export.export(model.eval(), inputs)
        self.edge = to_edge_transform_and_lower(exported, partitioner=[PenstockPartitioner(least=256)])
        graph = self.edge.exported_program().graph_module
        self.regions = [
            getattr(graph, node.args[0].target).original_module
            for node in graph.graph.nodes
            if "executorch_call_delegate" in str(node.target)
        ]

    @property
    def operators(self):
        found = []
        for program in self.regions:
            called = [node for node in program.graph.nodes if node.op == "call_function"]
            found.append([str(node.target.__name__).removeprefix("aten.") for node in called])
        return found

    @property
    def weights(self):
        signature = [one.graph_signature for one in self.regions]
        return [[str(s.target) for s in one.input_specs if s.target is not None] for one in signature]


class Copies(nn.Module):
    """Reads a transposed weight, one that is computed from two weights, and one copy twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.randn(8, 1))

    def forward(self, x):
        scaled = (self.second * self.scale).t()
        y = (x @ self.first) @ scaled
        return torch.relu(y) @ scaled


def test_each_reader_computes_its_own_copy_of_a_weight():
    """No delegate hands it to another, in memory that no budget counts."""
    found = Partitioned(Copies(), torch.randn(2, 16))
    uses = [f"{name}_penstock_use_1" for name in ("second", "scale")]
    assert found.weights == [["first"], ["second", "scale"], uses]
    copied = ["mul.Tensor", "permute_copy.default", "mm.default"]
    assert found.operators == [["mm.default"], copied, copied]
    assert [len(one.graph_signature.user_outputs) for one in found.regions] == [1, 1, 1]


def test_copies_of_copies_are_computed_once_a_reader(lower):
    model, x = Twice().eval(), torch.randn(2, 16)
    lowered = lower(torch.export.export(model, (x,)), least=256)
    found = Outer(lowered.edge, Delegates(lowered.exported))(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
    assert [one.outputs for one in lowered.exported.regions] == [1, 1, 1]
    assert [len(one.appended) for one in lowered.exported.regions] == [2, 2, 2]
    assert len(lowered.exported.payload.storages) == 2


class Twice(nn.Module):
    """Reads a copy, and another that is computed from it on two ways."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        copy = self.weight.t() * self.other
        both = copy + copy.t()
        return torch.relu(x @ both) @ both + torch.tanh(x @ copy)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 16))

    def forward(self, x):
        first = self.weight[:1]
        return (x + first) * first


def test_a_small_copy_is_computed_once_and_passed_on():
    found = Partitioned(Rows(), torch.randn(2, 16))
    assert found.weights == [["weight"]]


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 256)

    def forward(self, x):
        return self.large(self.small(x))


def test_small_weights_stay_with_executorch():
    found = Partitioned(Sizes(), torch.randn(2, 4))
    assert found.weights == [["large.weight", "large.bias"]]
    found.edge.to_executorch()


class Branches(Twice):
    def forward(self, x):
        x = x @ self.other
        return torch.cond(x.sum() > 0, lambda v, w: v @ w, lambda v, w: v - w[0], (x, self.weight))


def test_weights_that_control_flow_reads_stay_with_executorch():
    found = Partitioned(Branches(), torch.randn(2, 16))
    assert found.weights == [["other"]]
    assert "weight" in found.edge.exported_program().state_dict


class Recurrent(nn.Module):
    """A state that is read, then written, then read again, with a weight in between."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16, bias=False)
        self.out = nn.Linear(16, 16, bias=False)
        self.register_buffer("memory", torch.ones(4, 16))

    def forward(self, x):
        before = x * self.memory
        self.memory.copy_(torch.tanh(self.mix(before)))
        return self.out(self.memory + x)


def test_a_state_is_in_one_region_with_all_between_its_uses():
    found = Partitioned(Recurrent(), torch.randn(4, 16))
    assert found.weights == [["mix.weight", "memory"], ["out.weight"]]
    assert found.operators[0][:3] == ["mul.Tensor", "linear.default", "tanh.default"]


@pytest.mark.usefixtures("executorch_python")
def test_states_are_written_once_a_call(lower):
    model, x = Recurrent().eval(), torch.randn(4, 16)
    lowered = lower(torch.export.export(model, (x,)), least=256)
    delegates = Delegates(lowered.exported)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(Outer(lowered.edge, delegates)(x), model(x), rtol=1e-5, atol=1e-5)


class Many(nn.Module):
    """Operators of several results, of random ones, and a weight with gaps."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm((4, 64))
        self.gaps = nn.Parameter(torch.randn(64, 128)[:, ::2])
        self.rows = nn.Embedding(64, 64)

    def forward(self, x, ids):
        return self.norm(self.rows(ids) + x) @ self.gaps


def test_results_are_taken_apart_inside_and_gaps_are_left():
    found = Partitioned(Many(), torch.randn(2, 4, 64), torch.zeros(2, 4, dtype=torch.long))
    assert found.weights == [["rows.weight"], ["norm.weight", "norm.bias"]]
    assert found.operators[1] == ["native_layer_norm.default", "getitem"]
    assert "gaps" in found.edge.exported_program().state_dict


@pytest.mark.parametrize(
    ("shape", "stride", "order"),
    [
        ((2, 3), (3, 1), (0, 1)),
        ((2, 3), (1, 2), (1, 0)),
        ((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3, 1)),
        ((1, 3), (1, 1), (0, 1)),
        ((), (), ()),
        ((2, 3), (4, 1), None),
        ((2, 3), (0, 1), None),
    ],
)
def test_orders_of_dimensions(shape, stride, order):
    assert dim_order_of(Part("", "float32", shape, stride, 0, 0)) == order


class Flip(nn.Module):
    """Writes the difference of two states to one of them."""

    def __init__(self, target):
        super().__init__()
        self.register_buffer("a", torch.randn(4))
        self.register_buffer("b", torch.randn(4))
        self.target = target

    def forward(self, x):
        difference = self.a - self.b
        self.get_buffer(self.target).copy_(difference)
        return x + difference


def test_regions_that_write_different_states_share_no_code():
    """Their nodes are equal; what tells them apart is where the outputs go."""
    a, b, again = (
        text_of(torch.export.export(Flip(target), (torch.zeros(4),)).run_decompositions({}))
        for target in ("a", "b", "a")
    )
    assert a == again
    assert a != b
