"""Fake export: no memory, no GPU, and the graph that a machine with the devices would show."""

import json

import pytest
import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import penstock
from penstock.passes.building.fake_export import BUFFERS
from penstock.passes.building.placement import get_item, set_item


class Mlp(nn.Module):
    """Places its layers itself, and moves what goes from one to the other."""

    def __init__(self, fc1_device, fc2_device, width=8):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width, device=torch.device(fc1_device))
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width, device=torch.device(fc2_device))

    def forward(self, x):
        x = self.activation(self.fc1(x))
        x = x.to(self.fc2.weight.device)
        return self.fc2(x)


def devices_of(exported):
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    return {name: str(value.device) for name, value in values.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("asked", "first", "second"),
    [
        (("cpu", "cpu"), "cpu", "cpu"),
        (("cuda", "cuda"), "cuda:0", "cuda:0"),
        (("cpu", "cuda"), "cpu", "cuda:0"),
        (("cuda:0", "cuda:1"), "cuda:0", "cuda:1"),
    ],
)
def test_a_module_that_places_itself_shows_its_devices(asked, first, second):
    exported = penstock.fake_export(lambda: Mlp(*asked), (torch.randn(2, 8),))
    devices = devices_of(exported)
    for name in ("p_fc1_weight", "p_fc1_bias", "x", "linear", "gelu"):
        assert devices[name] == first
    for name in ("p_fc2_weight", "p_fc2_bias", "to", "linear_1"):
        assert devices[name] == second
    transfer = next(node for node in exported.graph.nodes if node.name == "to")
    assert torch.device(second) in (*transfer.args, *transfer.kwargs.values())


def test_programs_for_one_device_are_planned_and_those_for_several_refused_by_name():
    exported = penstock.fake_export(lambda: Mlp("cuda", "cuda"), (torch.randn(2, 8),))
    payload = penstock.annotate(exported)
    assert [weight.fqn for weight in payload.weights] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert [len(step.reads) for step in payload.traces[0].steps] == [2, 2]
    several = penstock.fake_export(lambda: Mlp("cuda:0", "cuda:1"), (torch.randn(2, 8),))
    with pytest.raises(penstock.PassError, match=r"cuda:0.*cuda:1.*export it for one device"):
        penstock.annotate(several)


def test_nothing_is_allocated_whatever_the_size():
    exported = penstock.fake_export(lambda: Mlp("cuda", "cuda", 1 << 20), {"x": torch.empty(1, 1 << 20)})
    assert sum(s.nbytes for s in penstock.annotate(exported).storages) > 16e12


class Odd(nn.Module):
    """Ties, views of one storage, buffers of all kinds, a device context, and a plain attribute."""

    def __init__(self):
        super().__init__()
        with torch.device("cuda"):
            self.embed = nn.Embedding(32, 16)
            self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        both = torch.zeros(2, 16, device="cuda")
        self.scale, self.shift = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.register_buffer("steps", torch.arange(16.0, device="cuda").reciprocal(), persistent=False)
        self.register_buffer("count", torch.zeros((), device="cuda"))
        self.mask = torch.ones(16, 16, device="cuda").tril().bool()

    def forward(self, tokens):
        x = self.embed(tokens) * self.steps + self.shift
        n = x.shape[1]
        x = x[..., :n, :] * self.scale[None, None, :]
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        x = x + torch.arange(n, device=x.device, dtype=x.dtype)[:, None]
        x[:, 0, ...] = 0.5
        x = x.masked_fill(~self.mask[:n, :16], self.count.to("cuda"))
        return self.head(x[:, -1:])


def test_ties_views_buffers_and_indexing_are_kept():
    exported = penstock.fake_export(Odd, (torch.zeros(2, 8, dtype=torch.int64),))
    assert set(devices_of(exported).values()) == {"cuda:0"}
    payload = penstock.annotate(exported)
    place = {weight.fqn: weight.parts[0].storage for weight in payload.weights}
    assert place["head.weight"] == place["embed.weight"] != place["scale"]
    assert place["scale"] == place["shift"]
    buffers = exported.graph_module.meta[BUFFERS]
    assert torch.equal(buffers["steps"], torch.arange(16.0).reciprocal())
    assert torch.equal(buffers["mask"], torch.ones(16, 16).tril().bool())
    assert "count" not in buffers


class Keeps(nn.Module):
    """Keeps a parameter where it is no attribute of a module: in containers, an object and a closure."""

    def __init__(self, view=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        weight = self.linear.weight.t() if view else self.linear.weight
        self.kept = {"in a tuple": (weight,)}
        self.factors = [torch.full((8,), 3.0)]
        self.called = lambda x: x @ weight

    def forward(self, x):
        return self.called(self.linear(x) @ self.kept["in a tuple"][0]) * self.factors[0]


def test_a_parameter_that_is_kept_in_a_list_or_a_closure_is_that_parameter():
    exported = penstock.fake_export(Keeps, (torch.randn(2, 8),))
    assert [weight.fqn for weight in penstock.annotate(exported).weights] == [
        "linear.weight", "linear.bias", "lifted_tensor_0",
    ]  # fmt: skip
    assert torch.equal(exported.constants["lifted_tensor_0"], torch.full((8,), 3.0))
    torch.manual_seed(0)
    model = Keeps()
    state = {name: value.detach() for name, value in model.state_dict().items()}
    exported._state_dict = {name: nn.Parameter(value) for name, value in state.items()}
    x = torch.randn(2, 8)
    assert torch.equal(exported.module()(x), model(x))


def test_a_view_of_a_parameter_that_is_kept_elsewhere_is_refused_with_its_line():
    with pytest.raises(
        penstock.PassError,
        match=r"a view, \[8, 8\], of .*test_fake_export.*in forward: .*: make the view in forward",
    ):
        penstock.fake_export(lambda: Keeps(view=True), (torch.randn(2, 8),))


def test_a_fake_tensor_mode_of_the_callers_changes_nothing():
    plain = penstock.fake_export(Odd, (torch.zeros(2, 8, dtype=torch.int64),))
    with FakeTensorMode() as mode:
        within = penstock.fake_export(Odd, (torch.zeros(2, 8, dtype=torch.int64),))
        assert detect_fake_mode(torch.empty(1)) is mode
    assert within.graph_module.code == plain.graph_module.code
    values = [one.graph_module.meta[BUFFERS]["steps"] for one in (within, plain)]
    assert type(values[0]) is torch.Tensor
    assert torch.equal(*values)


def test_the_graph_is_that_of_a_real_export():
    """On the CPU, where both can be had."""
    real = torch.export.export(Mlp("cpu", "cpu").eval(), (torch.randn(2, 8),), strict=False)
    fake = penstock.fake_export(lambda: Mlp("cpu", "cpu"), (torch.randn(2, 8),))
    assert [str(node.target) for node in fake.graph.nodes] == [str(node.target) for node in real.graph.nodes]


def test_a_transformers_model_is_exported_for_a_gpu():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    inputs = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "use_cache": False}
    exported = penstock.fake_export(lambda: LlamaForCausalLM(config), inputs, "cuda")
    assert set(devices_of(exported).values()) == {"cuda:0"}
    expected = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    assert torch.equal(exported.graph_module.meta[BUFFERS]["model.rotary_emb.inv_freq"], expected)


def test_patterns_place_what_the_constructor_does_not():
    build = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # noqa: E731
    inputs = (torch.randn(1, 4),)
    devices = devices_of(penstock.fake_export(build, inputs, {"*": "cuda:1"}))
    assert set(devices.values()) == {"cuda:1"}
    for placement, message in (
        ({"2.*": "cuda"}, r"the placement pattern '2\.\*' matches nothing; there are 0\.weight"),
        ({"0.*": "cuda", "*.weight": "cpu"}, r"'0\.\*', '\*\.weight'\] both match 0\.weight"),
        ("tpu", "there is no device 'tpu'"),
        ("meta", "a program is not placed on 'meta'"),
    ):
        with pytest.raises(penstock.PassError, match=message):
            penstock.fake_export(build, inputs, placement)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1")

    def forward(self, x):
        return self.second(self.first(x))  # the line that is wrong


class Deciding(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # depends on data
            return functional.relu(x)
        return x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("build", "placement", "message"),
    [
        (Mixed, None, r"test_fake_export\.py:\d+, in forward: .*# the line that is wrong.*cuda:0"),
        (Deciding, None, r"test_fake_export\.py:\d+, in forward: .*# depends on data"),
        (Tied, {"first.*": "cuda:0", "second.*": "cuda:1"}, "place tied weights together"),
        (lambda: 3, None, "expected a function that returns a module, got int"),
    ],
)
def test_what_does_not_export_is_refused_with_the_line_that_causes_it(build, placement, message):
    with pytest.raises(penstock.PassError, match=message):
        penstock.fake_export(build, (torch.randn(1, 4),), placement)


class Capable(nn.Module):
    def __init__(self):
        super().__init__()
        self.recent = torch.cuda.get_device_capability() >= (8, 0)
        self.layer = nn.Linear(4, 4).cuda()

    def forward(self, x):
        return self.layer(x) if torch.cuda.get_device_capability("cuda")[0] and self.recent else x


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answer of a GPU that is there is its own")
def test_a_model_may_ask_what_a_gpu_that_is_not_here_can_do():
    exported = penstock.fake_export(Capable, (torch.zeros(1, 4),), "cuda")
    assert "linear" in devices_of(exported)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), r"example inputs \(0 by position\) that do not fit Tied\.forward\(x\): missing"),
        ({"y": torch.zeros(4)}, r"example inputs \(y\) that do not fit Tied\.forward\(x\): missing"),
        (torch.zeros(1, 4), r"gives Tensor as example inputs, expected a tuple"),
        (None, r"gives NoneType as example inputs, expected a tuple"),
    ],
)
def test_inputs_that_do_not_fit_are_named(inputs, message):
    with pytest.raises(penstock.PassError, match=message):
        penstock.fake_export(Tied, inputs)


def test_a_line_of_pythons_own_is_not_to_blame():
    class Parsing(nn.Module):
        def forward(self, x):
            return x + json.loads("nothing")

    with pytest.raises(penstock.PassError, match=r"test_fake_export\.py:\d+, in forward: .*json\.loads"):
        penstock.fake_export(Parsing, (torch.zeros(1),))


INDICES = (
    0,
    -1,
    slice(1, 3),
    slice(None, None, 2),
    ...,
    None,
    (..., 0),
    (0, ..., slice(1, None)),
    (None, slice(1, 2), None, 1),
    (slice(None), [0, 2]),
    (torch.tensor([0, 1]), slice(None), torch.tensor([2, 0])),
    (slice(None), torch.tensor([True, False, True])),
    torch.arange(24).reshape(2, 3, 4) % 3 == 0,
    (0, torch.tensor([1, 2])),
    (..., torch.tensor([[0, 1], [2, 3]])),
)


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_without_a_guard_is_indexing(index):
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(get_item(tensor, index), tensor[index])
    for value in (7.5, tensor[index] + 1):
        found, expected = tensor.clone(), tensor.clone()
        set_item(found, index, value)
        expected[index] = value
        assert torch.equal(found, expected)
