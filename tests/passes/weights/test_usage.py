"""Which node reads what: mostly that views read nothing, and that what they lead to does."""

from collections import OrderedDict
from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import penstock
from penstock.passes.building.fake_export import with_computed_buffers
from penstock.passes.graph.nodes import copy_graph_module, placeholders_of
from penstock.passes.graph.propagation import storages_of
from penstock.passes.lowering import eager
from penstock.passes.probes import streaming
from penstock.passes.weights.lifted import weights_among
from penstock.passes.weights.usage import find_usage, follow, is_view
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import decompose, export, prepare, same_bits, weights_of


def reads_of(exported):
    """For every node that reads, in order, the operator's name and the first FQN of each storage."""
    weights = weights_of(exported)
    usage = find_usage(exported, weights)
    names: dict[int, str] = {}
    for weight in weights.held.values():
        names.setdefault(weight.parts[0].storage, weight.fqn)
    nodes = {node.name: str(node.target) for node in usage.graph_module.graph.nodes}
    kinds = {names[s]: kind for s, kind in enumerate(usage.kinds)}
    return [(nodes[node], [names[s] for s in reads]) for node, reads in usage.reads.items()], kinds


@pytest.mark.parametrize("decomposed", [False, True])
def test_reads_are_the_kernels_behind_the_views(decomposed):
    _, exported = export(CASES["Views"], decomposed=decomposed)
    reads, _ = reads_of(exported)
    assert [names for _, names in reads] == [["w"], ["w"], ["w"], ["v"]]
    # Decomposing turns the dropout, which is an alias in eval mode, into a copy until torch 2.14.
    expected = ["aten.matmul.default"] * 4
    if "aten.clone.default" in {str(node.target) for node in exported.graph.nodes}:
        assert decomposed
        expected[1] = "aten.clone.default"
    assert [op for op, _ in reads] == expected


def test_a_permute_before_a_product_is_followed():
    class Permuted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)

    exported = decompose(torch.export.export(Permuted(), (torch.randn(2, 4),)), None)
    assert "aten.permute.default" in {str(node.target) for node in exported.graph.nodes}
    assert reads_of(exported)[0] == [("aten.addmm.default", ["linear.weight", "linear.bias"])]


@pytest.mark.parametrize(
    ("name", "op", "passed"),
    [
        ("Branches", "cond", {"a.weight", "a.bias", "b.weight", "b.bias"}),
        ("Loop", "while_loop", {"a.weight", "a.bias"}),
        ("Scan", "scan", {"a.weight", "a.bias"}),
        ("WithoutGrad", "wrap_with_set_grad_enabled", {"a.weight", "a.bias", "scale"}),
    ],
)
def test_control_flow_reads_everything_it_is_given(name, op, passed):
    _, exported = export(CASES[name])
    reads, kinds = reads_of(exported)
    assert passed <= {name for target, names in reads if target == op for name in names}
    assert all(kinds[name] == "streamable" for name in passed)


def test_metadata_is_no_read():
    class Sizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            torch._check(self.w.shape[0] == 4)
            return x + self.w.numel() + self.w.to(torch.float32).stride(0)

    exported = torch.export.export(Sizes(), (torch.randn(4),))
    assert reads_of(exported)[0] == []


def test_a_comparison_reads_what_it_compares_whatever_else_it_takes():
    graph = torch.fx.Graph()
    weight, tolerance = graph.placeholder("weight"), graph.placeholder("tolerance")
    weight.meta["val"], tolerance.meta["val"] = torch.zeros(4, device="meta"), 0.5
    close = graph.call_function(torch.ops.aten.allclose.default, (weight, weight, tolerance))
    close.meta["val"] = True
    size = graph.call_function(torch.ops.aten.sym_size.int, (weight, 0))
    size.meta["val"] = 4
    assert not is_view(close)
    assert is_view(size)
    assert not is_view(graph.call_module("fused", (weight,)))


def test_what_a_branch_writes_or_hands_out_does_not_stream():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.w = nn.Parameter(torch.randn(4))
            self.v = nn.Parameter(torch.randn(4))

        def forward(self, x):
            with torch.no_grad():
                self.count.add_(1)
                view = self.w.view(2, 2)
                y = self.v * 2
            return x + y, view

    with torch.enable_grad():
        exported = torch.export.export(Inside(), (torch.randn(4),))
    assert "wrap_with_set_grad_enabled" in str(exported.graph)
    assert reads_of(exported)[1] == {"count": "mutable", "w": "returned", "v": "streamable"}


def does_not_decompose(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("torch is at its end")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", fail)


@pytest.mark.parametrize("name", CASES)
def test_the_kinds_of_weights_need_no_decomposition(name, monkeypatch):
    _, exported = export(CASES[name])
    does_not_decompose(monkeypatch)
    kinds = reads_of(exported)[1]
    expected = {fqn: "streamable" for fqn in kinds} | dict(CASES[name].kinds)
    assert kinds == expected


def test_a_program_for_a_gpu_whose_computed_buffers_lie_on_the_cpu_writes_its_cache():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
            self.register_buffer("cache", torch.zeros(4))
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x):
            self.cache.add_(x * self.frequencies.to(device=x.device, dtype=torch.float32))
            return self.cache * self.w

    exported = with_computed_buffers(penstock.fake_export(Rotary, (torch.ones(4),), placement="cuda:0"))
    assert exported.constants["frequencies"].device.type == "cpu"
    kinds = reads_of(exported)[1]
    assert kinds == {"w": "streamable", "cache": "mutable", "frequencies": "streamable"}


def test_a_write_to_one_of_two_tied_caches_leaves_the_weights_streaming():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(4))
            self.register_buffer("v", self.k)
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x):
            self.k.add_(x)
            return self.v * self.w

    kinds = reads_of(torch.export.export(Tied(), (torch.ones(4),)))[1]
    assert kinds == {"k": "mutable", "w": "streamable"}


def test_the_program_is_left_as_it_was():
    _, exported = export(CASES["Cache"])
    before = [(node.name, id(node.meta.get("val"))) for node in exported.graph.nodes]
    values = {name: value.clone() for name, value in exported.state_dict.items()}
    reads_of(exported)
    assert [(node.name, id(node.meta.get("val"))) for node in exported.graph.nodes] == before
    assert all(torch.equal(values[name], value) for name, value in exported.state_dict.items())


class Late(nn.Module):
    """Reads `w`, through what may be a copy of it, behind a step that reads something else."""

    def __init__(self, view):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8))
        self.other = nn.Parameter(torch.randn(8))
        self.view = view

    def forward(self, x, n):
        size = n.item()
        torch._check(size >= 1)
        torch._check(size <= 8)
        view = self.view(self.w[:, :size])
        y = x + self.other
        return view.sum() * y


@pytest.fixture
def tail():
    """An operator that returns a view, as its schema says, with a fake that does not."""
    library = torch.library.Library("penstock_test", "FRAGMENT")
    library.define("tail(Tensor(a) x) -> Tensor(a)")
    library.impl("tail", lambda x: x[1:], "CompositeExplicitAutograd")
    torch.library.register_fake("penstock_test::tail", lambda x: x[1:].clone(), lib=library)
    yield torch.ops.penstock_test.tail
    library._destroy()


@pytest.mark.parametrize("name", ["contiguous", "reshape", "tail"])
def test_what_may_be_a_view_is_followed(name, tail):
    views = {"contiguous": torch.Tensor.contiguous, "reshape": lambda x: x.reshape(-1), "tail": tail}
    model = Late(views[name])
    exported = torch.export.export(model, (torch.randn(8), torch.tensor(3)))
    lowered, streamer = prepare(exported, trust=True)  # as an operator of nobody's library runs
    steps = lowered.payload.traces[0].steps
    program = eager.instantiate(lowered, streamer.tensors(), lowered.payload.methods[0], range(len(steps)))
    for size in (3, 8):  # all of the weight is contiguous
        args = (torch.randn(8), torch.tensor(size))
        with torch.no_grad(), streaming(streamer):
            assert same_bits(program(*args), model(*args))


class Kept(nn.Module):
    """Hands `operator` its two weights, and returns the result, or twice the result."""

    def __init__(self, operator, *, returned):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.v = nn.Parameter(torch.randn(4))
        self.operator, self.returned = operator, returned

    def forward(self, x):
        result = self.operator(self.w, self.v, x)
        return (result if self.returned else result * 2), x * self.v

    def kinds(self, *args):
        with torch.no_grad():
            return reads_of(torch.export.export(self, args))[1]


def test_what_a_custom_operator_may_return_of_a_weight_does_not_stream_where_it_leaves_the_program(tail):
    kinds = {
        returned: Kept(lambda w, v, x: tail(w), returned=returned).kinds(torch.randn(4))
        for returned in (False, True)
    }
    assert kinds == {
        False: {"w": "streamable", "v": "streamable"},
        True: {"w": "returned", "v": "streamable"},
    }


def test_either_of_two_weights_that_a_custom_operator_may_return_stays(tail, either):
    """Whoever reads the result reads one of them, and nobody can tell which."""
    kinds = Kept(lambda w, v, x: either(w, v), returned=False).kinds(torch.randn(4))
    assert kinds == {"w": "returned", "v": "returned"}


@pytest.fixture
def either(tail):
    """An operator that returns one of its inputs, as its schema says, with a fake that does not."""
    library = torch.library.Library("penstock_test", "FRAGMENT")
    library.define("either(Tensor(a) x, Tensor(a) y) -> Tensor(a)")
    library.impl("either", lambda x, y: x if x.sum() > 0 else y, "CompositeExplicitAutograd")
    torch.library.register_fake("penstock_test::either", lambda x, y: x.clone(), lib=library)
    yield torch.ops.penstock_test.either
    library._destroy()


def test_a_weight_that_a_loop_of_no_rounds_hands_out_does_not_stream():
    def loop(w, v, x):
        count = x.sum().to(torch.int64)
        return while_loop(lambda i, y: i < count, lambda i, y: (i + 1, y + v), (torch.tensor(0), w))[1]

    def scanned(w, v, x):
        return scan(lambda carry, one: (carry + one + v, carry * 2), w, x.expand(3, 4))[0]

    for operator in (loop, scanned):
        kinds = Kept(operator, returned=True).kinds(torch.ones(4))
        assert (kinds["w"], kinds["v"]) == ("returned", "streamable")


def test_a_higher_order_operator_without_a_body_may_write():
    _, exported = export(CASES["WithoutGrad"])
    weights = weights_of(exported)
    for node in exported.graph.nodes:
        if str(node.target) == "wrap_with_set_grad_enabled":
            node.args = tuple(arg for arg in node.args if getattr(arg, "op", "") != "get_attr")
    aliases = {}
    for node in exported.graph.nodes:
        if node.name in weights.held:
            aliases[storages_of(node.meta["val"])[0]] = weights.storage_of(node.name)
    flow = follow(exported.graph, aliases)
    names = {w.fqn for w in weights.held.values() if w.parts[0].storage in flow.written}
    assert names == {"a.weight", "a.bias", "scale"}


def test_a_function_without_a_schema_is_not_run_and_refused():
    def runs_on_buffers_only(x, weight):
        return x.get_size()

    exported = torch.export.export(nn.Linear(4, 4, bias=False), (torch.ones(2, 4),))
    graph = exported.graph_module.graph
    (linear,) = (node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(linear):
        kernel = graph.call_function(wraps(runs_on_buffers_only)(partial(runs_on_buffers_only)), linear.args)
    kernel.meta["val"] = linear.meta["val"]
    linear.replace_all_uses_with(kernel)
    graph.erase_node(linear)
    with pytest.raises(penstock.PassError, match=r"passes 'weight' to .*runs_on_buffers_only, which has no"):
        find_usage(exported, weights_of(exported))


# Inputs of a graph are the weights that its own method reads, whatever the others read.


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
