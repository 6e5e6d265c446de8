"""The in-memory passes as a pipeline or a partitioner backend uses them, and several methods at once."""

import io

import pytest
import torch
from torch import nn

from penstock.passes.annotate import annotate
from penstock.schedule.facts.errors import PassError, PlanError
from penstock.schedule.facts.hardware import PRESETS
from penstock.schedule.facts.model import Input, Symbol
from penstock.schedule.payload.codec import Payload
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export


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
    methods = {"look": Look(shared, state), "update": Update(shared, state)}
    return {name: torch.export.export(one, (torch.randn(2, 8),)) for name, one in methods.items()}


def test_methods_share_weights_and_what_one_writes_streams_in_none():
    payload = annotate(two_methods())
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
