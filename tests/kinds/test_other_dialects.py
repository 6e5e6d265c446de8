"""Programs that call no operators of ATen: ExecuTorch's edge dialect, Python functions, other operators."""

import operator
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock
from penstock.backends.fx import FxBackend
from tests.passes.pass_runs import decompose


@contextmanager
def edge_dialect():
    """ExecuTorch's lowering, without its own warnings; skips the test where it is not installed."""
    pytest.importorskip("executorch", reason="executorch is not installed: pip install '.[executorch]'")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        import executorch.exir

        yield executorch.exir


X = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        return self.layers(x)


class Shared(nn.Module):
    """A tied weight, a weight that is read through a view, rows of a table, and a cache that is written."""

    def __init__(self):
        super().__init__()
        self.first, self.tied = nn.Linear(64, 64), nn.Linear(64, 64)
        self.tied.weight = self.first.weight
        self.seen = nn.Parameter(torch.randn(128, 64))
        self.table = nn.Embedding(100, 64)
        self.register_buffer("cache", torch.zeros(4, 64))

    def forward(self, x, at):
        x = self.tied(self.first(x).relu()) + self.table(at)
        self.cache[at] = x
        return x @ self.seen[:64].t() + self.cache.sum(0)


AT = torch.tensor([1, 2])


def to_edge(model, inputs, **options):
    with edge_dialect() as exir:
        return exir.to_edge(torch.export.export(model.eval(), inputs, **options))


def kinds(payload):
    return {weight.fqn: payload.storages[weight.parts[0].storage].kind for weight in payload.weights}


def reads(payload):
    """For each step the FQNs that it reads, its work, and its reads by units."""
    names = payload.storage_names()
    return [
        ([names[s] for s in step.reads], step.read_work, [one.operator for one in step.sparse])
        for step in payload.traces[0].steps
    ]


def of_aten(edge):
    """The program in the edge dialect with the operators that stand behind it."""
    for node in edge.graph.nodes:
        if node.op == "call_function":
            node.target = getattr(node.target, "_op", node.target)
    return edge


@pytest.mark.parametrize(("model", "inputs"), [(Mlp, (X,)), (Shared, (X, AT))])
def test_an_edge_program_has_the_facts_of_its_operators(model, inputs):
    edge = to_edge(model(), inputs).exported_program()
    payload = penstock.annotate(edge)
    steps = reads(payload)
    assert (kinds(payload), steps) == (kinds(expected := penstock.annotate(of_aten(edge))), reads(expected))


def test_an_edge_program_has_the_steps_of_the_program_before():
    with edge_dialect() as exir:
        exported = torch.export.export(Mlp().eval(), (X,))
        stays = exir.EdgeCompileConfig(_check_ir_validity=False, preserve_ops=[torch.ops.aten.linear.default])
        edge = exir.to_edge_transform_and_lower(exported, compile_config=stays).exported_program()
    assert reads(penstock.annotate(edge)) == reads(penstock.annotate(exported))


def test_caches_ties_and_views_keep_their_kinds():
    payload = penstock.annotate(to_edge(Shared(), (X, AT)).exported_program())
    found = kinds(payload)
    assert found.pop("cache") == "mutable"
    assert set(found.values()) == {"streamable"}
    read_by_rows = [fqns for fqns, _, sparse in reads(payload) if sparse]
    assert read_by_rows == [["table.weight"]]


def test_sizes_of_an_edge_program_may_be_dynamic():
    rows = torch.export.Dim("rows", min=2, max=8)
    edge = to_edge(Mlp(), (X,), dynamic_shapes=({0: rows},)).exported_program()
    assert set(kinds(penstock.annotate(edge)).values()) == {"streamable"}


def test_outputs_of_the_last_dialect_are_no_weights():
    with edge_dialect():
        manager = to_edge(Shared(), (X, AT))
        before = penstock.annotate(manager.exported_program())
        last = manager.to_executorch().exported_program()  # calls `addmm(..., out=alloc(...))`
    payload = penstock.annotate(last)
    assert kinds(payload) == kinds(before)
    linears = [[one for one in reads(payload) if "tied.bias" in one[0]] for payload in (payload, before)]
    assert linears[0] == linears[1]


def lower_whole(name, preprocess, *, with_weights):
    """Lower all of `Mlp` to a backend of ExecuTorch, which is given its weights or takes them as inputs."""
    with edge_dialect() as exir:
        from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
        from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult

        def process(edge_program, compile_specs):
            return PreprocessResult(processed_bytes=preprocess(edge_program))

        class Everything(Partitioner):
            backend = type(name, (BackendDetails,), {"preprocess": staticmethod(process)})

            def partition(self, exported_program):
                for node in exported_program.graph.nodes:
                    if node.op == "call_function" or (with_weights and node.name.startswith("p_")):
                        node.meta["delegation_tag"] = "all"
                tags = {"all": DelegationSpec(name, [])}
                return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

        exported = torch.export.export(Mlp().eval(), (X,))
        return exir.to_edge_transform_and_lower(exported, partitioner=[Everything()])


def test_a_backend_annotates_what_it_is_given():
    seen = []

    def annotate(edge_program):
        payload = penstock.annotate(edge_program)
        seen.append((payload, penstock.insert_probes(edge_program.graph_module, payload)))
        return payload.to_bytes()

    lower_whole("Annotating", annotate, with_weights=True)
    ((payload, probed),) = seen
    assert set(kinds(payload).values()) == {"streamable"}
    called = [str(node.target) for node in probed.graph.nodes]
    assert called.count("penstock.acquire.default") == len(payload.traces[0].steps) == 4
    assert any("EdgeOpOverload" in name for name in called)


def test_weights_that_a_delegate_is_given_stream():
    edge = lower_whole("Taking", lambda _: b"", with_weights=False)
    payload = penstock.annotate(edge.exported_program())
    assert set(kinds(payload).values()) == {"streamable"}
    assert len(payload.traces[0].steps) == 1


def test_an_edge_graph_runs_over_streamed_weights(tmp_path):
    edge = to_edge(Mlp(), (X,)).exported_program()
    with edge_dialect():
        expected = edge.module()(X)
    backend = FxBackend(tmp_path)
    lowered = backend.lower(backend.annotate(edge)["forward"])
    assert any("EdgeOpOverload" in str(node.target) for node in lowered.graph.nodes)
    with backend.load(backend.payload(), "80%") as weights:
        (output,) = weights.bind(lowered)(X)
        assert torch.equal(output, expected)
        assert weights.stats.bytes_moved > 0


def test_an_edge_program_is_compiled(tmp_path):
    edge = to_edge(Mlp(), (X,)).exported_program()
    with edge_dialect():
        expected = edge.module()(X)
        with penstock.compile(edge, tmp_path / "artifact").load("80%") as streamed:
            assert torch.equal(streamed(X), expected)


def fused(x, weight, bias):
    return torch.relu(x @ weight.t() + bias)


def uncounted(x, weight, bias):
    return torch.from_numpy(x.numpy() @ weight.numpy().T + bias.numpy())


class Fused(HigherOrderOperator):
    def __init__(self):
        super().__init__("fused_by_a_test")

    def __call__(self, *operands):
        return super().__call__(*operands)


OPERATOR, WITHOUT_KERNEL = Fused(), HigherOrderOperator.__new__(Fused)
HigherOrderOperator.__init__(WITHOUT_KERNEL, "unknown_to_torch")


@OPERATOR.py_impl(FakeTensorMode)
def _run_fake(mode, x, weight, bias):
    with mode:
        return torch.nn.functional.linear(x, weight, bias)


def replaced(model, target, arguments=lambda args: args):
    """The program of a model whose first `linear` calls something else."""
    exported = torch.export.export(model.eval(), (X,))
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.target is torch.ops.aten.linear.default:
                node.target, node.args = target, arguments(node.args)
                if isinstance(target, str):
                    node.op = "call_method"
                module.recompile()
                return exported
    raise AssertionError


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (fused, "fused"),
        (uncounted, "uncounted"),
        (OPERATOR, "fused_by_a_test"),
        (WITHOUT_KERNEL, "unknown_to_torch"),
    ],
)
def test_a_weight_that_an_unknown_callable_takes_is_refused_by_name(target, name):
    with pytest.raises(penstock.PassError, match=rf"'layers\.0\.bias', 'layers\.0\.weight' to .*{name}"):
        penstock.annotate(replaced(Mlp(), target))


def test_an_unknown_callable_in_control_flow_is_refused():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.layer, lambda x: x * 1, (x,))

    with pytest.raises(penstock.PassError, match=r"passes 'layer\.bias', 'layer\.weight' to .*fused"):
        penstock.annotate(replaced(Chosen(), fused))


def test_an_unknown_callable_that_a_pass_puts_in_is_refused(tmp_path):
    backend = FxBackend(tmp_path)
    graph = backend.annotate(torch.export.export(Mlp().eval(), (X,)))["forward"]
    node = next(one for one in graph.graph.nodes if one.target is torch.ops.aten.linear.default)
    node.target = fused
    with pytest.raises(penstock.PassError, match=r"'layers\.0\.weight' to .*fused"):
        backend.lower(graph)


def test_a_callable_without_weights_is_nobodys_business():
    class Activated(Mlp):
        def forward(self, x):
            return super().forward(x).tanh()

    exported = torch.export.export(Activated().eval(), (X,))
    node = next(one for one in exported.graph.nodes if one.target is torch.ops.aten.tanh.default)
    node.target = lambda x: torch.from_numpy(x.numpy())
    assert set(kinds(penstock.annotate(exported)).values()) == {"streamable"}


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (torch.nn.functional.linear, lambda args: args),
        (torch.ops.aten.linear, lambda args: args),
        ("matmul", lambda args: args[:2]),
    ],
)
def test_functions_of_torch_are_followed_as_they_run(target, arguments):
    payload = penstock.annotate(replaced(Mlp(), target, arguments))
    assert set(kinds(payload).values()) == {"streamable"}
    fqns, work, _ = reads(payload)[0]
    assert "layers.0.weight" in fqns
    assert work.flops == 2 * 2 * 64 * 64


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (operator.iadd, lambda args: (args[1], 1)),
        (torch.relu_, lambda args: args[1:2]),
        ("add_", lambda args: (args[1], 1)),
        (torch.nn.functional.relu, lambda args: (args[1], True)),
    ],
)
def test_what_a_function_of_torch_writes_is_seen(target, arguments):
    found = kinds(penstock.annotate(replaced(Mlp(), target, arguments)))
    assert found.pop("layers.0.weight") == "mutable"
    assert set(found.values()) == {"streamable"}


def test_an_operator_that_is_wrapped_writes_what_its_schema_says():
    @torch.library.custom_op("penstock_dialects::put", mutates_args=("state",))
    def put(state: torch.Tensor, weight: torch.Tensor) -> None:
        state.add_(weight.sum())

    put.register_fake(lambda state, weight: None)

    class Putting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64))
            self.register_buffer("state", torch.zeros(64))

        def forward(self, x):
            put(self.state, self.weight)
            return x + self.state

    exported = decompose(torch.export.export(Putting(), (X,)), {})
    assert any("auto_functionalized" in str(node.target) for node in exported.graph.nodes)
    assert kinds(penstock.annotate(exported)) == {"weight": "streamable", "state": "mutable"}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x):
        return self.norm(x)


def _flagged(flag):
    rows = torch.export.Dim("rows", min=2, max=8)
    exported = torch.export.export(Normed().eval(), (X,), dynamic_shapes=({0: rows},))
    (norm,) = (node for node in exported.graph.nodes if node.target is torch.ops.aten.batch_norm.default)
    if flag == "computed":
        with exported.graph.inserting_before(norm):
            size = exported.graph.call_function(torch.ops.aten.sym_size.int, (norm.args[0], 0))
            flag = exported.graph.call_function(operator.gt, (size, 4))
    norm.args = (*norm.args[:5], flag, *norm.args[6:])
    exported.graph_module.recompile()
    return exported


@pytest.mark.parametrize(
    ("flag", "kind"),
    [(True, "mutable"), (1, "mutable"), ("computed", "mutable"), (False, "streamable"), (0, "streamable")],
)
def test_running_statistics_are_written_where_a_flag_may_say_so(flag, kind):
    found = kinds(penstock.annotate(_flagged(flag)))
    assert found["norm.running_mean"] == found["norm.running_var"] == kind
    assert found["norm.weight"] == "streamable"


def test_instance_norm_writes_statistics_of_the_input_alone():
    def kind_of(uses_input):
        norm = nn.InstanceNorm1d(4, track_running_stats=True).train(uses_input)
        exported = torch.export.export(norm, (torch.randn(2, 4, 8),))
        return kinds(penstock.annotate(exported))["running_mean"]

    assert (kind_of(True), kind_of(False)) == ("mutable", "streamable")
