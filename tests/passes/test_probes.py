import copy
import importlib
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.passes import probes
from penstock.passes.annotate import annotate
from penstock.passes.graph.nodes import copy_graph_module
from penstock.passes.probes import STREAMER, insert_probes, streaming, streaming_steps, without_probes
from penstock.schedule.facts.errors import PassError, PayloadError, StreamError
from penstock.schedule.facts.model import (
    Arena,
    Drop,
    Hardware,
    Range,
    Schedule,
    Step,
    Storage,
    Trace,
    Transfer,
)
from penstock.schedule.plan import Plan
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import decompose, export

acquire, release = torch.ops.penstock.acquire.default, torch.ops.penstock.release.default


class Recorder:
    def __init__(self):
        self.log = []

    def acquire(self, graph, step):
        self.log.append(("acquire", graph, step))

    def release(self, graph, step):
        self.log.append(("release", graph, step))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made_in", [torch.enable_grad, torch.inference_mode])
def test_operators_reach_the_streamer_in_every_grad_mode(mode, made_in):
    with made_in():
        weight = torch.randn(3)
    recorder = Recorder()
    with mode(), streaming(recorder):
        acquire([weight], 2, 5)
        release([weight, torch.randn(2)], 2, 6)
        release([], 2, 7)
    assert recorder.log == [("acquire", 2, 5), ("release", 2, 6), ("release", 2, 7)]


@pytest.mark.parametrize("probe", [acquire, release])
def test_probes_count_as_writes(probe):
    weight = torch.randn(3, 3)
    before = weight._version
    x = torch.randn(3, requires_grad=True)
    with streaming(Recorder()):
        loss = (weight @ x).sum()
        probe([weight], 0, 0)
    assert weight._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("probe", [acquire, release])
def test_probes_count_as_writes_beside_tensors_that_count_none(probe, refused, monkeypatch):
    real = torch.autograd.graph.increment_version

    def increment(tensors):
        if any(tensor.is_inference() for tensor in tensors):
            raise RuntimeError("Inference tensors do not track version counter")
        real(tensors)

    if refused:  # as some versions of torch do
        monkeypatch.setattr(torch.autograd.graph, "increment_version", increment)
    weight = torch.randn(3)
    with torch.inference_mode():
        other = torch.randn(3)
    before = weight._version
    with streaming(Recorder()):
        probe([weight, other], 0, 0)
    assert weight._version == before + 1


def test_probes_outside_a_call_are_refused():
    assert STREAMER.get() is None
    with pytest.raises(StreamError, match="outside a streamed module"):
        acquire([torch.randn(1)], 0, 0)


def test_a_value_is_stored_within_its_step_or_where_no_step_is():
    slot, recorder = torch.zeros(3), Recorder()
    with streaming(recorder):
        torch.ops.penstock.store(slot, torch.ones(3), 4, 0)
    assert recorder.log == [("acquire", 4, 0), ("release", 4, 0)]
    assert slot.tolist() == [1, 1, 1]
    with pytest.raises(StreamError, match="outside a streamed module"):
        torch.ops.penstock.store(slot, torch.zeros(3), 4, 0)
    assert slot.tolist() == [1, 1, 1]
    torch.ops.penstock.store(slot, torch.zeros(3), 4, -1)
    assert slot.tolist() == [0, 0, 0]


def test_a_streamer_is_called_only_within_its_block():
    outer, inner = Recorder(), Recorder()
    with streaming(outer):
        with pytest.raises(ZeroDivisionError), streaming(inner):
            1 / 0  # noqa: B018
        acquire([torch.randn(1)], 0, 7)
    assert (outer.log, inner.log) == ([("acquire", 0, 7)], [])
    with pytest.raises(StreamError, match="outside a streamed module"):
        acquire([torch.randn(1)], 0, 0)


def test_an_error_of_the_streamer_comes_through():
    class Broken:
        def acquire(self, graph, step):
            raise StreamError("the disk is gone")

    with streaming(Broken()), pytest.raises(StreamError, match="the disk is gone"):
        acquire([torch.randn(1)], 0, 0)


def test_fake_and_meta_tensors_need_no_streamer():
    with FakeTensorMode():
        assert acquire([torch.empty(3)], 0, 0) is None
    recorder = Recorder()
    with streaming(recorder):
        release([torch.empty(3, device="meta")], 0, 1)


class Probed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.randn(4, 4))

    def forward(self, x):
        acquire([self.w], 0, 0)
        y = x @ self.w.t()
        release([self.w], 0, 0)
        return y


def test_functionalisation_orders_the_reads_between_the_probes():
    model = Probed()
    exported = torch.export.export(model, (torch.randn(2, 4),))
    ops = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert ops[0] == "penstock.acquire.default"
    assert ops[-1] == "penstock.release.default"
    decomposed = decompose(exported, {})
    assert set(decomposed.graph_signature.buffers_to_mutate.values()) == {"w"}
    assert str(decomposed.graph).count("auto_functionalized") >= 2


def test_aot_autograd_keeps_the_probes():
    recorder = Recorder()
    model = Probed()
    x = torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), streaming(recorder):
        assert torch.equal(compiled(x), x @ model.w.t())
    assert recorder.log == [("acquire", 0, 0), ("release", 0, 0)]


@pytest.fixture
def first_import():
    """What the module held before a test imports it again, for the tests after it."""
    before = dict(vars(probes))
    yield
    vars(probes).update(before)


@pytest.mark.usefixtures("first_import")
def test_a_second_import_keeps_the_operators():
    recorder = Recorder()
    importlib.reload(probes)
    assert torch.ops.penstock.acquire.default is acquire
    with streaming(recorder):
        acquire([torch.randn(1)], 0, 0)
    assert recorder.log == [("acquire", 0, 0)]


def calls_of(graph_module):
    return [
        (node.target.__name__.split(".")[0] if "penstock" in str(node.target) else node.name, node.args)
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    ]


def test_probes_surround_every_reading_node_and_leave_the_input_alone():
    _, exported = export(CASES["Reused"])
    before = str(exported.graph)
    probed = insert_probes(exported.graph_module, annotate(exported))
    assert str(exported.graph) == before
    calls = calls_of(probed)
    names = [name for name, _ in calls]
    linears = [["acquire", name, "release"] for name in ("linear", "linear_1", "linear_2")]
    assert names == [*linears[0], "tanh", *linears[1], "tanh_1", *linears[2]]
    weights = [[str(node) for node in args[0]] for name, args in calls if name == "acquire"]
    assert weights == [["p_a_bias", "p_a_weight"], ["p_b_bias", "p_b_weight"], ["p_a_bias", "p_a_weight"]]
    assert [args[1:] for name, args in calls if name == "release"] == [(0, 0), (0, 1), (0, 2)]
    assert probed.code.count("penstock.acquire") == probed.code.count("penstock.release") == 3


def test_a_graph_that_was_not_annotated_is_refused():
    _, exported = export(CASES["Reused"])
    _, other = export(CASES["Convolution"])
    with pytest.raises(PassError, match="the graph has no node"):
        insert_probes(other.graph_module, annotate(exported))


def test_what_is_no_graph_is_refused():
    _, exported = export(CASES["Reused"])
    with pytest.raises(PassError, match="expected the graph of an exported program, got ExportedProgram"):
        insert_probes(exported, annotate(exported))


def test_a_copy_whose_input_was_renamed_has_the_same_probes():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    exported = torch.export.export(model, (torch.randn(2, 8),))
    copied = torch.fx.GraphModule(exported.graph_module, copy.deepcopy(exported.graph_module.graph))
    names = [
        [n.name for n in module.graph.nodes if n.op == "placeholder"]
        for module in (exported.graph_module, copied)
    ]
    assert names[0] != names[1]  # `input` is a function of Python's
    payload = annotate(exported)
    probed = [calls_of(insert_probes(graph, payload)) for graph in (exported.graph_module, copied)]
    assert [name for name, _ in probed[0]] == [
        "acquire",
        "linear",
        "release",
        "acquire",
        "linear_1",
        "release",
    ]
    assert str(probed[0]).replace("(input,", "(input_1,") == str(probed[1])


def test_weights_of_another_shape_are_refused():
    _, exported = export(CASES["Reused"])
    wider = copy_graph_module(exported.graph_module)
    next(iter(wider.graph.nodes)).meta["val"] = torch.empty(12, 8, device="meta")
    with pytest.raises(PayloadError, match=r"'a\.weight' is float32 of shape \[12, 8\]"):
        insert_probes(wider, annotate(exported))


def test_probes_leave_a_graph_as_they_came():
    _, exported = export(CASES["Reused"])
    bare = exported.graph_module
    probed = insert_probes(bare, annotate(exported))
    before = str(probed.graph)
    again = without_probes(probed)
    assert str(again.graph) == str(copy_graph_module(bare).graph)
    assert "penstock" not in again.code
    assert str(probed.graph) == before
    assert without_probes(bare) is bare


def test_one_of_several_methods_must_be_named():
    _, exported = export(CASES["Reused"])
    payload = annotate({"prefill": exported, "decode": exported})
    with pytest.raises(PassError, match=r"methods \['prefill', 'decode'\], got method=None"):
        insert_probes(exported.graph_module, payload)
    with pytest.raises(PassError, match="got method='x'"):
        insert_probes(exported.graph_module, payload, method="x")
    probed = insert_probes(exported.graph_module, payload, method="decode")
    assert {args[1] for name, args in calls_of(probed) if name == "acquire"} == {1}


STORAGES = (Storage(100, "streamable"), Storage(100, "streamable"), Storage(100, "streamable"))
HARDWARE = Hardware("test", 1e9, 1e9, 1e9, 0)


def plan_of(reads, resident, transfers, drops, outside=()):
    steps = tuple(Step(f"s{k}", read, 0, 0) for k, read in enumerate(reads))
    trace = Trace("forward", 0, "", steps, 0, 0, "modelled")
    schedule = Schedule(0, transfers, drops, 0)
    arena = Arena("paged", "anonymous", 100, (0, 100, 200), (Range(0, 300),))
    return Plan(300, arena, 300, outside, (), resident, resident, "overlap", (schedule,), (trace,), HARDWARE)


def test_resident_steps_get_no_probes_unless_the_schedule_acts_there():
    reads = ((0,), (1,), (2,), (0,))
    streamed = plan_of(
        reads, (Range(0, 50), Range(50, 200)), (Transfer(200, 300, 2, -1),), (Drop(200, 300, 2),)
    )
    assert streaming_steps(streamed, 0, STORAGES) == [2, 3]  # step 3: the transfer starts after it
    in_part = plan_of(reads, (Range(0, 150),), (), (), outside=(2,))
    assert streaming_steps(in_part, 0, STORAGES) == [1]
    starts = plan_of(((1,), (2,)), (Range(0, 200),), (Transfer(200, 300, 1, 0),), (Drop(200, 300, 1),))
    assert streaming_steps(starts, 0, STORAGES) == [0, 1]  # step 0: the transfer starts after it
    between = plan_of(reads[:1] * 3, (Range(100, 300),), (Transfer(0, 100, 0, -1),), (Drop(0, 100, 2),))
    assert streaming_steps(between, 0, STORAGES) == [0, 1, 2]  # step 1 reads what is there for now
    with pytest.raises(PassError, match="no schedule for graph 7"):
        streaming_steps(streamed, 7, STORAGES)
    for missing in ({"schedules": ()}, {"traces": ()}):
        with pytest.raises(PassError, match="no schedule for graph 0"):
            streaming_steps(replace(streamed, **missing), 0, STORAGES)


def test_insertion_with_a_plan_follows_it():
    _, exported = export(CASES["Unused"])
    payload = annotate(exported)
    count = len(payload.storages)
    arena = Arena("paged", "anonymous", 1, tuple(range(count)), ())
    schedule = Schedule(0, (), (), 0)
    everything = tuple(range(count))
    plan = Plan(0, arena, 0, everything, (), (), (), "overlap", (schedule,), payload.traces, HARDWARE)
    assert "penstock" not in str(insert_probes(exported.graph_module, payload, plan=plan).graph)


def test_steps_after_which_the_method_that_follows_starts_copies_get_probes():
    """The backward's copy may start once the forward has ended, and what it brought leaves late."""
    backward = plan_of(
        ((1,), (2,), (0,)), (Range(0, 200),), (Transfer(200, 300, 1, -1),), (Drop(200, 300, 2),)
    )
    forward = plan_of(((0,), (1,), (1,), (0,)), (Range(0, 200),), (), ())
    schedules = (*forward.schedules, replace(backward.schedules[0], graph=1))
    traces = (replace(forward.traces[0], follows=1), replace(backward.traces[0], graph=1, follows=0))
    both = replace(forward, schedules=schedules, traces=traces)
    assert streaming_steps(both, 0, STORAGES) == [3]
    assert streaming_steps(both, 1, STORAGES) == [1, 2]
