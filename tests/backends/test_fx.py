"""Graphs of any compiler: facts, partitions, and probes that follow what its passes have done."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.fx.passes.infra.pass_manager import PassManager
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils import _pytree as pytree

import penstock
from penstock.backends.fx import FxBackend, annotated_partitions, lower, reobserve, torch_pass, with_facts
from penstock.passes.annotate import annotate_with_values
from penstock.passes.graph.nodes import copy_graph_module, placeholders_of
from penstock.passes.probes import streaming
from penstock.passes.weights.lifted import facts_of
from penstock.schedule.facts.errors import PassError, PayloadError
from tests.backends.backend_models import arguments, decoder, layers
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import PoisoningStreamer, decompose, export, same_bits


class Everything(OperatorSupportBase):
    """Takes every operator, as a compiler with kernels for all of them does."""

    def is_node_supported(self, submodules, node):
        return node.op == "call_function"


def assert_same(annotated, lowered, plain, exported):
    """Every weight is garbage outside of its reads; the results are those of the graph without probes."""
    args, kwargs = exported.example_inputs
    leaves = pytree.tree_leaves((args, kwargs))
    streamer = PoisoningStreamer(annotated)
    resident = tuple(replace(storage, kind="mutable") for storage in annotated.payload.storages)
    clean = PoisoningStreamer(
        replace(annotated, payload=replace(annotated.payload, storages=resident))
    ).tensors()
    values = arguments(lowered, annotated.payload, "forward", streamer.tensors(), copy.deepcopy(leaves))
    expected_values = arguments(plain, annotated.payload, "forward", clean, copy.deepcopy(leaves))
    torch.manual_seed(1)
    with torch.no_grad():
        expected = plain(*expected_values)
        torch.manual_seed(1)
        with streaming(streamer):
            got = lowered(*values)
    assert same_bits(got, expected)


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_graph_reads_between_its_probes(name):
    _, exported = export(CASES[name])
    annotated = annotate_with_values(exported)
    lowered, payload = lower(exported.graph_module, annotated.payload)
    assert_same(replace(annotated, payload=payload), lowered, exported.graph_module, exported)
    again, unchanged = lower(lowered, payload)
    assert again.code == lowered.code
    assert unchanged == payload


@pytest.mark.parametrize("name", CASES)
def test_aliases_are_followed_after_functionalisation(name):
    _, exported = export(CASES[name])
    annotated = annotate_with_values(exported)
    functional = decompose(exported, None)
    lowered, payload = lower(functional.graph_module, annotated.payload)
    assert_same(replace(annotated, payload=payload), lowered, functional.graph_module, functional)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"NoWeights"}))
def test_the_schedule_is_that_of_the_fused_graph(name):
    _, exported = export(CASES[name])
    annotated = annotate_with_values(exported)
    graph = with_facts(annotated.programs["forward"].graph_module, annotated.payload)
    fused, steps = fuse(graph, annotated.payload)
    lowered, payload = lower(fused, annotated.payload)
    assert len(payload.traces[0].steps) == steps
    assert_same(replace(annotated, payload=payload), lowered, exported.graph_module, exported)


def fuse(graph, payload):
    """The graph with a module for each region, and how many steps that leaves."""
    regions = annotated_partitions(graph, payload)
    fuse_by_partitions(graph, [dict.fromkeys(one.nodes) for one in regions])
    graph.recompile()
    return graph, len(regions)


def test_facts_are_plain_values_that_name_weights_and_reads(tmp_path):
    _, exported, _ = layers()
    graph = FxBackend(tmp_path).annotate(exported)["forward"]
    facts = {node.name: facts_of(node) for node in graph.graph.nodes}
    assert facts["p_layers_1_weight"] == {"weight": "layers.1.weight"}
    reads = ["layers.1.weight", "layers.1.bias"]
    assert facts["linear_1"] == {"step": 1, "reads": reads, "nbytes": 4 * (64 * 64 + 64)}
    assert facts["tanh"] == {}
    assert not any(facts_of(node) for node in exported.graph.nodes)  # the caller's graph is as it was
    assert not any(tmp_path.iterdir())


def test_facts_survive_passes_that_rename_every_input():
    _, exported, _ = layers()
    annotated = annotate_with_values(exported)
    graph = with_facts(exported.graph_module, annotated.payload)
    for number, node in enumerate(placeholders_of(graph.graph)):
        node.name = f"arg{number}_1"
    lowered, payload = lower(graph, annotated.payload)
    assert [step.name for step in payload.traces[0].steps][:2] == ["linear", "linear_1"]
    assert sum(node.op == "placeholder" and "weight" in facts_of(node) for node in lowered.graph.nodes) == 12


def test_inputs_of_equal_labels_are_told_apart():
    class Alike(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a_b = torch.nn.Parameter(torch.randn(8, 8))
            self.a = torch.nn.Module()
            self.a.b = torch.nn.Parameter(torch.randn(8, 8))
            self.A = torch.nn.Module()
            self.A.register_parameter("b_1", torch.nn.Parameter(torch.randn(8, 8)))
            self.a.B = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return x @ self.a_b @ self.a.b @ self.A.b_1 @ self.a.B

    exported = torch.export.export(Alike(), (torch.randn(2, 8),))
    payload = penstock.annotate(exported)
    by_name = {
        n.name: facts_of(n).get("weight") for n in with_facts(exported.graph_module, payload).graph.nodes
    }
    signature = exported.graph_signature.inputs_to_parameters
    assert {name: by_name[name] for name in signature} == signature


def test_a_region_knows_its_steps_weights_and_bytes():
    _, exported, _ = layers()
    annotated = annotate_with_values(exported)
    regions = annotated_partitions(exported.graph_module, annotated.payload)
    assert [one.steps for one in regions] == [(k,) for k in range(6)]
    assert regions[2].weights == ("layers.2.weight", "layers.2.bias")
    assert [facts_of(node)["partition"] for one in regions for node in one.nodes] == list(range(6))
    (whole,) = annotated_partitions(exported.graph_module, annotated.payload, supported=Everything())
    assert whole.steps == tuple(range(6))
    assert whole.nbytes == sum(storage.nbytes for storage in annotated.payload.storages)


def test_passes_run_in_torchs_pass_manager_until_nothing_changes(tmp_path):
    _, exported, _ = layers()
    backend = FxBackend(tmp_path)
    graph = backend.annotate(exported)["forward"]
    manager = PassManager([torch_pass(backend.lower)], steps=5)
    once = torch_pass(backend.lower)(graph)
    result = manager(graph)
    assert (once.modified, result.modified) == (True, True)
    assert result.graph_module.code == once.graph_module.code
    assert not manager(result.graph_module).modified


def test_passes_run_in_a_pipeline_of_penstocks(tmp_path):
    _, exported, _ = layers()
    backend = FxBackend(tmp_path)

    @penstock.declare(ensures=("regions",))
    def with_regions(graph):
        return fuse(copy_graph_module(graph), backend.facts)[0]

    @penstock.declare(requires=("regions",), ensures=("probes",))
    def mark(graph):
        return backend.lower(graph)

    lowered = penstock.Pipeline((mark, with_regions))(backend.annotate(exported)["forward"])
    assert sum(node.op == "call_module" for node in lowered.graph.nodes) == 6


def test_a_pass_behind_the_lowering_is_followed_when_it_is_lowered_again():
    _, exported, _ = layers()
    payload = penstock.annotate(exported)
    lowered, payload = lower(exported.graph_module, payload)
    changed = copy_graph_module(lowered)
    first = next(node for node in changed.graph.nodes if node.name == "linear")
    with changed.graph.inserting_before(changed.graph.output_node()):
        late = changed.graph.call_function(torch.ops.aten.linear.default, first.args)
        late.meta["val"] = first.meta["val"]
    changed.graph.output_node().args = ((late,),)
    changed.recompile()
    again, observed = lower(changed, payload)
    assert observed.traces[0].steps[-1].reads == observed.traces[0].steps[0].reads
    assert len(observed.traces[0].steps) == len(payload.traces[0].steps) + 1
    assert sum("acquire" in str(node.target) for node in again.graph.nodes) == len(observed.traces[0].steps)


def test_a_graph_whose_weights_have_lost_their_names_is_refused():
    _, exported, _ = layers()
    payload = penstock.annotate(exported)
    graph = copy_graph_module(exported.graph_module)
    for number, node in enumerate(placeholders_of(graph.graph)):
        node.name = f"arg{number}_1"
    with pytest.raises(
        PassError, match=r"no input of the graph is the weight 'layers\.0\.weight'.*annotate the"
    ):
        annotated_partitions(graph, payload)
    with pytest.raises(PassError, match="no input of the graph is the weight"):
        lower(graph, payload)


def test_a_graph_from_elsewhere_is_given_names_once():
    _, exported, _ = layers()
    annotated = annotate_with_values(exported)
    graph = copy_graph_module(exported.graph_module)
    fqns = list(exported.graph_signature.inputs_to_parameters.values())
    for number, node in enumerate(placeholders_of(graph.graph)):
        node.name = f"arg{number}_1"
    names = {f"arg{number}_1": fqn for number, fqn in enumerate(fqns)}
    lowered, payload = lower(with_facts(graph, annotated.payload, names=names), annotated.payload)
    assert_same(replace(annotated, payload=payload), lowered, exported.graph_module, exported)


def test_partitions_without_weights_are_refused():
    class Pointwise(OperatorSupportBase):
        def is_node_supported(self, submodules, node):
            return node.target in (torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor)

    _, exported, _ = layers()
    payload = penstock.annotate(exported)
    with pytest.raises(PassError, match=r"none of the \d partitions of method 'forward' reads a weight"):
        annotated_partitions(exported.graph_module, payload, supported=Pointwise())
    _, bare = export(CASES["NoWeights"])
    with pytest.raises(PassError, match="none of the 0 partitions"):
        annotated_partitions(bare.graph_module, penstock.annotate(bare))


def test_a_payload_of_another_model_is_refused():
    _, exported, _ = layers()
    _, other = export(CASES["Reused"])
    graph = with_facts(exported.graph_module, penstock.annotate(exported))
    with pytest.raises(PayloadError, match=r"'layers\.0\.weight', which the payload does not have"):
        annotated_partitions(graph, penstock.annotate(other))
    payload = penstock.annotate(exported)
    larger = replace(payload.weights[0], parts=(replace(payload.weights[0].parts[0], shape=(9, 9)),))
    wider = replace(payload, weights=(larger, *payload.weights[1:]))
    with pytest.raises(
        PayloadError, match=r"is float32 of shape \[64, 64\], and the payload's is float32 of shape"
    ):
        reobserve(graph, wider)


def test_graphs_that_cannot_be_seen_through_are_refused():
    _, exported, _ = layers()
    payload = penstock.annotate(exported)
    graph, _ = fuse(copy_graph_module(exported.graph_module), payload)
    graph.fused_0 = torch.nn.Linear(64, 64)
    with pytest.raises(PassError, match=r"'fused_0' calls a module that is no graph.*lower the graph before"):
        lower(graph, payload)
    written = copy_graph_module(exported.graph_module)
    first = placeholders_of(written.graph)[0]
    with written.graph.inserting_before(written.graph.output_node()):
        written.graph.call_function(torch.ops.aten.zero_.default, (first,))
    with pytest.raises(PassError, match=r"'layers\.0\.weight' is written by the graph"):
        lower(written, payload)
    _, region = export(CASES["WithoutGrad"])
    with pytest.raises(PassError, match="regions of another grad mode: take the graph that annotate"):
        annotated_partitions(region.graph_module, penstock.annotate(region))


def test_a_backend_is_asked_in_order(tmp_path):
    with pytest.raises(PassError, match="call annotate"):
        FxBackend(tmp_path).payload()
    _, programs = decoder()
    backend = FxBackend(tmp_path)
    graphs = backend.annotate(programs)
    with pytest.raises(PassError, match="name one of them with method="):
        annotated_partitions(graphs["decode"], backend.facts)
    with pytest.raises(PassError, match="there is no method 'x'"):
        backend.lower(graphs["decode"], "x")
