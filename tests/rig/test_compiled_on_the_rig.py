"""Inductor on an accelerator: what torch compiles for the rig streams there; the rest is refused by name."""

import gc
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.files.source import Source
from tests.rig import inductor, machine

pytestmark = pytest.mark.usefixtures("quiet")

WIDTH = 64
pytestmark = pytest.mark.usefixtures("quiet")
BUDGET = {"budget": "50%", "resident_below": None, **inductor.OPTIONS}


class Branching(nn.Module):
    """Layers with a graph break between them, a tied weight, a buffer, and a parameter read by a view."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.layers[0].weight
        self.mix = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        return self.again(x @ self.mix[WIDTH:]) * self.scale


class Apart(nn.Module):
    """Computes with a tensor that it makes on the CPU."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x + torch.ones(WIDTH).to(x.device))


def saved(module, folder):
    path = folder / "model.safetensors"
    save_file({k: v for k, v in module.state_dict().items() if k != "again.weight"}, path)
    return path


def compiled(module):
    return torch.compile(module, backend="penstock", options=dict(BUDGET))


@pytest.mark.parametrize("guarded", [False, True])
def test_a_compiled_module_streams_to_the_rig(order, tmp_path, guarded):
    torch.manual_seed(0)
    module = Branching().requires_grad_(False)
    path, values = saved(module, tmp_path), [torch.randn(3, WIDTH).to("rig") for _ in range(3)]
    resident = Branching().requires_grad_(False)
    resident.load_state_dict(module.state_dict())
    resident.to("rig")
    expected = [resident(value) for value in values]
    allocated = torch.accelerator.memory_allocated()
    with inductor.registered(guarded=guarded):
        record = penstock.offload(module, path, device="rig")
        assert record.device == "rig:0"
        assert {p.device for p in module.parameters()} == {torch.device("rig:0")} == {module.scale.device}
        assert module.again.weight is module.layers[0].weight
        assert torch.accelerator.memory_allocated() <= allocated + 512  # the buffer
        streamed = compiled(module)
        assert all(torch.equal(streamed(value), want) for value, want in zip(values, expected, strict=True))
        stats = record.stats
        budget = sum(storage.nbytes for storage in record.storages) // 2
        assert stats.budget == budget
        assert 0 < stats.peak_bytes <= budget
        assert stats.misses == 0
        plan = record.sessions[0].plan
        assert stats.bytes_moved >= 2 * plan.streamed_bytes > 0
        assert plan.hardware.name == "rig:0"
        record.close()


def test_a_guard_of_the_device_is_in_the_wrapper(late, tmp_path):
    module = Branching().requires_grad_(False).to("rig")
    with inductor.registered(guarded=True):
        options = {**inductor.OPTIONS, "fx_graph_cache": False}
        run = torch.compile(module.layers[0], options=options)
        found = torch._inductor.utils.run_and_get_code(run, torch.randn(3, WIDTH).to("rig"))[1]
    assert "\n        with torch.accelerator.device_index(0):\n            torch.accelerator.set" in found[0]


def test_tensors_on_two_devices_are_named(late, tmp_path):
    module = Apart().requires_grad_(False)
    with inductor.registered(guarded=False):
        penstock.offload(module, saved(module, tmp_path), device="rig")
        with pytest.raises(Exception, match=words_of_mixed("the graph", "value 'ones'")) as raised:
            compiled(module)(torch.randn(3, WIDTH).to("rig"))
        assert_caused_by_pass_error(raised.value)


def words_of_mixed(what, second):
    return (
        rf"{what} has tensors on two devices, .* on rig:0 and {second} on cpu, and Inductor compiles for "
        r"one: make all of them on rig:0, or penstock.compile it with lowering='eager'"
    )


def assert_caused_by_pass_error(error):
    while error is not None and not isinstance(error, penstock.PassError):
        error = error.__cause__ or getattr(error, "inner_exception", None)
    assert error is not None


def test_a_device_that_inductor_has_no_code_for_is_refused_and_the_module_is_as_it_was(late, tmp_path):
    module = Branching().requires_grad_(False)
    path, before = saved(module, tmp_path), module.state_dict()
    no_code = "the module is for rig:0, for which Inductor has no code generator in torch "
    with pytest.raises(penstock.PassError, match=no_code):
        penstock.offload(module, path, device="rig")
    with pytest.raises(penstock.StreamError, match="there is no device 'cuda' here"):
        penstock.offload(module, path, device="cuda")
    with pytest.raises(penstock.StreamError, match=r"on devices of torch's, and not on 'sim:t4'"):
        penstock.offload(module, path, device="sim:t4")
    module.register_buffer("empty", torch.zeros(3, device="meta"))
    with (
        inductor.registered(guarded=False),
        pytest.raises(penstock.PassError, match="buffer 'empty' is on the meta"),
    ):
        penstock.offload(module, path, device="rig")
    assert all(
        value is module.state_dict()[name] or value.equal(module.state_dict()[name])
        for name, value in before.items()
    )


class Recurrent(nn.Module):
    """A layer that streams between two tables that stay, in front of two recurrent layers that stay."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.randn(WIDTH, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("second", torch.randn(WIDTH, WIDTH))
        self.one, self.other = nn.GRU(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        return self.other(self.one(self.layer(x @ self.first) @ self.second)[0])[0]


def test_a_device_without_room_leaves_the_module_and_itself_as_they_were(tmp_path):
    module = Recurrent()
    module.one.weight_hh_l0.grad = torch.ones(3 * WIDTH, WIDTH)
    path, values = saved(module, tmp_path), torch.randn(3, WIDTH)
    expected, before, nbytes, said = module(values), holdings(module), 4 * WIDTH**2, list[str]()
    machine.load()
    gc.collect()
    others = torch.accelerator.memory_allocated()  # by other tests
    while not said or said[-1]:
        memory = others + len(said) * nbytes // 2
        with machine.ordered("late", memory=memory), inductor.registered(guarded=False):
            allocated, error = torch.accelerator.memory_allocated(), None
            try:
                penstock.offload(module, path, device="rig")
            except penstock.StreamError as raised:
                error = raised  # with the frames that it came through
                assert torch.accelerator.memory_allocated() == allocated
        said.append("" if error is None else str(error))
        if error:
            assert holdings(module) == before
            assert module(values).equal(expected)
    words = (
        "rig:0 is out of memory: parameter 'layer.weight', 16.00 KiB that are given back at once, do not fit"
    )
    assert said[1].startswith(f"{words}, with 8.00 KiB free of ")
    assert said[1].endswith(": free more of it, and offload the module again, which is as it was")
    for kib in (16, 32, 48, 64, 128, 192, 240):  # two halves of a layer take 48 each, as does a gradient
        assert "the module's buffers and recurrent layers do not fit" in said[kib // 8]
    assert {value.device.type for value in (*module.parameters(), *module.buffers())} == {"rig"}
    assert module.one.weight_hh_l0.grad.device.type == "rig"


class Flattened(nn.GRU):
    """Moves as on CUDA, where parameters stay the objects they are, and finds no memory to flatten them."""

    def _apply(self, fn, recurse=True):
        for value in self.parameters():
            value.data = fn(value).cpu()
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_recurrent_layers_that_do_not_fit_get_the_memory_back_that_they_had(late, tmp_path):
    module = Recurrent()
    module.other = Flattened(WIDTH, WIDTH)
    path, before = saved(module, tmp_path), holdings(module)
    words = "rig:0 is out of memory: the module's buffers and recurrent layers do not fit"
    with inductor.registered(guarded=False), pytest.raises(penstock.StreamError, match=words):
        penstock.offload(module, path, device="rig")
    assert holdings(module) == before
    with torch.device("meta"):
        module.one = nn.GRU(WIDTH, WIDTH)
    words = "parameter 'one.weight_ih_l0' is on the meta device and has no values for cpu: make it real"
    with pytest.raises(penstock.PassError, match=words):
        penstock.offload(module, path)
    assert module.other._flat_weights[0] is module.other.weight_ih_l0


def holdings(module):
    """What a module holds: its tensors, where their values and gradients lie, and what its parts list."""
    held = []
    for one in module.modules():
        for name, value in (*one._parameters.items(), *one._buffers.items()):
            grad = None if value.grad is None else (id(value.grad), value.grad.data_ptr())
            held.append((name, id(value), value.device, value.data_ptr(), grad))
        held.append([id(value) for value in getattr(one, "_flat_weights", ())])
        held.append((sorted(vars(one)), len(one._forward_pre_hooks)))
    return held


def test_aotinductor_is_refused_by_name_before_a_byte_is_read(late, tmp_path, monkeypatch):
    def read(*_):
        raise AssertionError("a byte was read")

    monkeypatch.setattr(Source, "read_into", read)
    module = nn.Linear(WIDTH, WIDTH).requires_grad_(False).to("rig")
    exported = export(module, (torch.randn(3, WIDTH).to("rig"),))
    words = (
        "method 'forward' is for rig:0, and code of AOTInductor runs on cpu, cuda, xpu, mps only: "
        "penstock.compile it with lowering='eager', which runs on every device that torch knows"
    )
    with inductor.registered(guarded=False), pytest.raises(penstock.PassError, match=f"^{re.escape(words)}"):
        penstock.compile(exported, tmp_path / "m.penstock", lowering="inductor")
    mixed = export(Apart().requires_grad_(False).to("rig"), (torch.randn(3, WIDTH).to("rig"),))
    with pytest.raises(penstock.PassError, match=words_of_mixed("method 'forward'", "value 'ones'")):
        penstock.compile(mixed, tmp_path / "m.penstock", lowering="inductor")
    assert list(tmp_path.iterdir()) == []
