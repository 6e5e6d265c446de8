"""Programs that Inductor compiles for one device: stand-ins for weights on others, and refusals by name."""

import platform
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.device_interface import CudaInterface
from torch.export import export

import penstock
from penstock.passes.lowering import compiled as loaded_code
from penstock.passes.lowering import inductor
from penstock.passes.lowering import inductor as hollow
from penstock.passes.weights.lifted import Weights
from penstock.runtime.program import Program

pytestmark = pytest.mark.timeout(300)


class Equal(nn.Module):
    """Weights of one shape, one of them tied, a small one, and one that the program writes."""

    def __init__(self, device="cpu", other=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, device=device) for _ in range(3))
        self.again = nn.Linear(64, 64, bias=False, device=device)
        self.again.weight = self.layers[0].weight
        self.register_buffer("seen", torch.zeros(64, 64, device=other or device))

    def forward(self, x):
        self.seen.add_(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.again(x) + self.seen.to(x.device)[0]


def test_stand_ins_that_share_memory_are_told_apart(compiler, tmp_path, monkeypatch):
    """Other devices have no memory that costs nothing; here a CPU's stands for theirs."""
    torch.manual_seed(0)
    exported, values = export(Equal().requires_grad_(False), (torch.zeros(2, 64),)), torch.randn(2, 64)
    given = []

    def shared(weights, device):
        sizes = [storage.nbytes for storage in weights.storages]
        memory = torch.empty(max(sizes) + hollow.STEP * len(sizes), dtype=torch.uint8)
        given.append((memory.numel(), sum(sizes)))
        return memory

    programs = []
    for name in ("apart", "shared"):
        path = tmp_path / f"{name}.penstock"
        programs.append(penstock.compile(exported, path, lowering="inductor", resident_below=4096))
        monkeypatch.setattr(inductor, "shared_memory", shared)
    ((taken, whole),) = given
    assert taken < whole / 2
    one, other = (program.payload for program in programs)
    assert one.traces == other.traces
    assert one.probes == other.probes
    assert one.storages == other.storages
    outputs = []
    for program in programs:
        with torch.no_grad(), program.load(program.floor()) as module:
            outputs.append([module(values), module(values)])
            assert module.stats.bytes_moved > 0
    assert all(map(torch.equal, *outputs))
    assert not torch.equal(outputs[0][0], outputs[0][1])  # it writes a buffer


def test_the_memory_of_stand_ins_is_that_of_the_largest_weight():
    payload = penstock.annotate(export(Equal(), (torch.zeros(2, 64),)))
    weights = Weights({weight.fqn: weight for weight in payload.tensors}, payload.storages)
    assert hollow.shared_memory(weights, torch.device("cpu")) is None
    memory = hollow.shared_memory(weights, torch.device("meta"))
    assert memory is not None
    assert memory.device.type == "meta"
    assert memory.numel() == 64 * 64 * 4 + hollow.STEP * len(payload.storages)


def assert_refused(exported, folder, words):
    """Compiling for the program's device is refused with these words, and leaves nothing behind."""
    weights = {name: value for name, value in Equal().state_dict().items() if name != "again.weight"}
    save_file(weights, folder / "w.safetensors")
    with pytest.raises(penstock.PassError, match=f"^{re.escape(words)}"):
        penstock.compile(
            exported, folder / "m.penstock", lowering="inductor", weights=folder / "w.safetensors"
        )
    assert [path.name for path in folder.iterdir()] == ["w.safetensors"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_program_for_a_device_that_is_not_here_is_refused(tmp_path):
    exported = penstock.fake_export(lambda: Equal("cuda"), (torch.zeros(2, 64),))
    words = (
        "method 'forward' is for cuda:0, whose kernels Inductor compiles where that device is, and this "
        "machine has none of that kind: compile it on a machine that has it, or penstock.compile it with "
        "lowering='eager'"
    )
    assert_refused(exported, tmp_path, words)


def test_a_program_on_two_devices_is_refused_with_a_tensor_on_each(tmp_path):
    exported = penstock.fake_export(lambda: Equal("cuda", "cpu"), (torch.zeros(2, 64),))
    words = (
        "method 'forward' has tensors on two devices, value 'p_layers_0_weight' on cuda:0 and value 'b_seen' "
        "on cpu, and Inductor compiles for one: make all of them on cuda:0, or penstock.compile it with "
        "lowering='eager'"
    )
    assert_refused(exported, tmp_path, words)


def test_code_for_another_kind_of_gpu_is_refused(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        CudaInterface, "get_compute_capability", lambda index: asked.append(index) or 80 + (index or 0)
    )
    program = penstock.compile(export(nn.Linear(8, 8), (torch.zeros(1, 8),)), tmp_path / "m.penstock")
    stored = program.payload.program
    assert stored is not None
    here = f"{platform.system().lower()} {platform.machine()}"
    payload = replace(program.payload, program=replace(stored, machine=f"cuda {here} AVX512 AMX_TILE 86"))
    words = "compiled for a GPU of compute capability 86, and this one has 80: compile it here"
    with pytest.raises(penstock.PayloadError, match=words):
        loaded_code.load(program.path, payload, trust=True)
    with pytest.raises(penstock.PenstockError) as refused:  # of that kind: the code itself is not there
        loaded_code.load(program.path, payload, trust=True, index=6)
    assert "compute capability" not in str(refused.value)
    assert asked == [None, 6]


@pytest.mark.parametrize(
    ("machine", "device", "there"),
    [
        ("cpu linux x86_64", "cuda", "cuda"),
        ("cpu linux x86_64", "xpu:1", "xpu"),
        ("", "cuda:1", "cuda"),
        ("cuda linux x86_64 90", "cpu", "cpu"),
        ("cuda linux x86_64 90", "sim:t4", "cpu"),
        ("cuda linux x86_64 90", "xpu", "xpu"),
    ],
)
def test_code_for_another_device_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, machine, device, there
):
    def read(*_, **__):
        raise AssertionError("something was read")

    program = penstock.compile(export(nn.Linear(8, 8), (torch.zeros(1, 8),)), tmp_path / "m.penstock")
    stored = program.payload.program
    assert stored is not None
    payload = replace(program.payload, lowering="inductor", program=replace(stored, machine=machine))
    plan = program.plan("100%")
    monkeypatch.setattr(loaded_code, "load", read)
    monkeypatch.setattr("penstock.runtime.program.find_plan_to_load", read)
    monkeypatch.setattr("penstock.runtime.loading.open_source", read)
    words = (
        f"the program was compiled for {machine[:4].strip() or 'cpu'}, not for {device}: export and compile "
        f"it for {there}, or with lowering='eager', which runs on every device"
    )
    hows = ({"budget": "50%"}, {"plan": plan})
    for how in hows:
        with pytest.raises(penstock.StreamError, match=f"^{re.escape(words)}$"):
            Program(program.path, payload, trust=True).load(**how, device=device)
