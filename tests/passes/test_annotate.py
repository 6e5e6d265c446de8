"""The in-memory passes as a pipeline or a partitioner backend uses them, and several methods at once."""

import io

import pytest
import torch
from torch import fx, nn

from penstock.passes.annotate import annotate, annotate_with_values
from penstock.passes.lowering import eager
from penstock.passes.pipeline import Pipeline
from penstock.passes.probes import insert_probes, streaming
from penstock.schedule.facts.errors import PassError, PlanError
from penstock.schedule.facts.hardware import PRESETS
from penstock.schedule.facts.model import Input, Symbol
from penstock.schedule.payload.codec import Payload
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import PoisoningStreamer, export, prepare, same_bits


def test_methods_record_leaves_and_symbols():
    _, exported = export(CASES["Nested"])
    (method,) = annotate(exported).methods
    assert method.inputs == (
        Input("x", "float32", (3, 8)),
        Input("extra_pair_0", "float32", (8,)),
        Input("extra_pair_1", "int", value="2"),
        Input("extra_flag", "bool", value="True"),
        Input("scale", "float32", (3, 1)),
        Input("mode", "str", value="'relu'"),
        Input("nothing", "NoneType", value="None"),
    )
    _, exported = export(CASES["Dynamic"])
    (method,) = annotate(exported).methods
    (batch, length, _), (again, _) = (leaf.shape for leaf in method.inputs)
    assert length == again
    assert [symbol.name for symbol in method.symbols] == [batch, length] == ["batch", "length"]
    assert method.symbols[0] == Symbol(batch, 1, 64, 4)
    assert (method.symbols[1].upper, method.symbols[1].example) == (None, 6)


def test_every_model_survives_the_payload():
    for name in ("Cache", "Dtypes", "Dynamic", "Nested", "NoWeights", "OneStorage"):
        payload = annotate(export(CASES[name])[1])
        assert Payload.from_bytes(payload.to_bytes()) == payload


class Look(nn.Module):
    """Reads a state that `Update` writes."""

    def __init__(self, shared, state):
        super().__init__()
        self.shared = shared
        self.register_buffer("state", state)

    def forward(self, x):
        return self.shared(x) * self.state


class Update(Look):
    def __init__(self, shared, state):
        super().__init__(shared, state)
        self.extra = nn.Linear(8, 8)

    def forward(self, x):
        self.state.add_(self.extra(self.shared(x)).sum(0))
        return self.state + 1


def two_methods():
    shared, state = nn.Linear(8, 8), torch.zeros(8)
    look, update = Look(shared, state), Update(shared, state)
    args = (torch.randn(2, 8),)
    return (
        look,
        update,
        {"look": torch.export.export(look, args), "update": torch.export.export(update, args)},
    )


def test_methods_share_weights_and_what_one_writes_streams_in_none():
    _, _, programs = two_methods()
    payload = annotate(programs)
    kinds = {w.fqn: payload.storages[w.parts[0].storage].kind for w in payload.weights}
    assert kinds == {
        "shared.weight": "streamable",
        "shared.bias": "streamable",
        "state": "mutable",
        "extra.weight": "streamable",
        "extra.bias": "streamable",
    }
    assert [(m.name, m.graph) for m in payload.methods] == [("look", 0), ("update", 1)]
    assert [[step.reads for step in trace.steps] for trace in payload.traces] == [[(0, 1)], [(0, 1), (3, 4)]]
    assert payload.traces[0].tail_work.nbytes > 0  # the product with the state is no step


def test_methods_share_a_state_when_they_run():
    look, update, programs = two_methods()
    lowered, streamer = prepare(programs)
    bound = {
        m.name: eager.instantiate(
            lowered, streamer.tensors(), m, range(len(lowered.payload.traces[m.graph].steps))
        )
        for m in lowered.payload.methods
    }
    for _ in range(2):
        x = torch.randn(2, 8)
        with torch.no_grad(), streaming(streamer):
            assert same_bits(bound["update"](x), update(x))
            assert same_bits(bound["look"](x), look(x))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 says so of its own
def test_methods_that_were_saved_apart_share_equal_weights():
    shared = nn.Linear(8, 8)
    exported = torch.export.export(Look(shared, torch.ones(8)), (torch.randn(2, 8),))
    other = torch.export.export(Look(shared, torch.ones(8)), (torch.randn(4, 8),))
    copies = {}
    for name, program in (("one", exported), ("other", other)):
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        copies[name] = torch.export.load(file)
    assert len(annotate(copies).storages) == 3


def test_one_name_for_two_weights_is_refused():
    def program():
        return torch.export.export(nn.Linear(8, 8), (torch.randn(2, 8),))

    with pytest.raises(PassError, match="two methods have weights called 'weight'"):
        annotate({"one": program(), "other": program()})
    with pytest.raises(PassError, match="no method to annotate"):
        annotate({})


def fuse_nothing(graph_module):
    """A pass of the backend's own, which rebuilds the graph."""
    graph_module = fx.GraphModule(graph_module, graph_module.graph)
    graph_module.graph.lint()
    return graph_module


class Backend:
    """A partitioner's backend: preprocesses a program into a blob, executes the blob, touches no disk."""

    def preprocess(self, exported):
        annotated = annotate_with_values(exported)
        blob = annotated.payload.to_bytes()
        payload = Payload.from_bytes(blob)
        pipeline = Pipeline((fuse_nothing, lambda module: insert_probes(module, payload)))
        return blob, pipeline(exported.graph_module), PoisoningStreamer(annotated)

    def execute(self, blob, graph_module, streamer, args):
        payload = Payload.from_bytes(blob)
        tensors = streamer.tensors()
        with torch.no_grad(), streaming(streamer):
            return graph_module(*(tensors[w.fqn] for w in payload.weights), *args)


@pytest.mark.parametrize("name", ["Views", "TiedEmbedding", "OneStorage", "Branches"])
def test_a_partitioner_backend_works_in_memory(name, monkeypatch):
    model, exported = export(CASES[name])
    monkeypatch.setattr("builtins.open", None)
    backend = Backend()
    blob, graph_module, streamer = backend.preprocess(exported)
    args = CASES[name].args()
    (got,) = backend.execute(blob, graph_module, streamer, args)
    with torch.no_grad():
        assert same_bits(got, model(*args))
    assert len(streamer.log) == 2 * len(streamer.payload.traces[0].steps)


def test_dynamic_sizes_stay_dynamic():
    """The fake kernel of `complex` compares sizes: that may not become a guard of the user's program."""

    class Complex(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return torch.complex(y, y)

    batch = torch.export.Dim("batch", min=1, max=16)
    exported = torch.export.export(Complex(), (torch.randn(2, 8),), dynamic_shapes=({0: batch},))
    payload = annotate(exported)
    (x,) = (node for node in exported.graph.nodes if node.name == "x")
    assert not isinstance(x.meta["val"].shape[0], int)
    assert not x.meta["val"].shape[0].node.shape_env.guards
    assert (payload.methods[0].symbols[0].lower, payload.methods[0].symbols[0].upper) == (1, 16)


class Caches(nn.Module):
    """Two caches, of one memory if `tied`, which `forward` writes."""

    def __init__(self, *, tied):
        super().__init__()
        self.register_buffer("k", torch.zeros(4))
        self.register_buffer("v", self.k if tied else torch.zeros(4))

    def forward(self, x):
        self.k.add_(x)
        return self.k + self.v


def test_caches_of_programs_loaded_apart_are_one_by_name():
    apart = {name: torch.export.export(Caches(tied=False), (torch.ones(4),)) for name in ("a", "b")}
    payload = annotate(apart)
    assert [storage.kind for storage in payload.storages].count("mutable") == 1
    assert len({weight.parts[0].storage for weight in payload.weights}) == 2


def test_caches_that_are_tied_in_one_method_only_are_refused():
    programs = {
        "a": torch.export.export(Caches(tied=True), (torch.ones(4),)),
        "b": torch.export.export(Caches(tied=False), (torch.ones(4),)),
    }
    with pytest.raises(PassError, match="shares its memory with another in one method"):
        annotate(programs)


def test_hardware_is_a_preset_by_its_name_and_anything_else_is_refused():
    _, exported = export(CASES["Nested"])
    assert annotate(exported, hardware="t4") == annotate(exported, hardware=PRESETS["t4"])
    assert annotate(exported, hardware="t4").traces != annotate(exported).traces
    with pytest.raises(PlanError, match="there is no hardware 'RTX4090': did you mean 'rtx4090'"):
        annotate(exported, hardware="RTX4090")
    with pytest.raises(PlanError, match="hardware is 3, expected a Hardware or a name"):
        annotate(exported, hardware=3)
