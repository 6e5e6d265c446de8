"""Moving programs between devices; meta stands in for a device that is not there."""

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.passes.graph.nodes import exported_device
from penstock.schedule.facts.errors import PassError
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export, retarget


class Constants(nn.Module):
    """Makes constants in every way, in a branch and under autocast too."""

    def forward(self, x):
        steps = torch.arange(x.shape[-1], device="cpu") + torch.zeros(4) + torch.full((4,), 2.0)
        ones = torch.ones_like(x, device="cpu").to(device="cpu", dtype=torch.float32)
        x = torch.cond(x.sum() > 0, lambda x: x + torch.arange(4.0), lambda x: x - torch.ones(4), (x,))
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.t()
        return x * steps + ones, y


def exported_constants():
    return torch.export.export(Constants(), (torch.randn(3, 4),))


def devices_in(graph_module):
    leaves = []
    for module in graph_module.modules():
        for node in module.graph.nodes:
            leaves += torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return {leaf for leaf in leaves if isinstance(leaf, torch.device) or leaf in {"cpu", "meta", "cuda"}}


def test_every_device_in_the_graph_changes():
    exported = exported_constants()
    before = devices_in(exported.graph_module)
    moved = retarget(exported.graph_module, "cuda:1")
    assert before == {torch.device("cpu"), "cpu"}
    assert devices_in(moved) == {torch.device("cuda:1"), "cuda"}
    assert devices_in(exported.graph_module) == before


def test_a_moved_program_runs_on_the_other_device():
    _, exported = export(CASES["Dynamic"])
    moved = retarget(exported.graph_module, "meta")
    weights = [value.detach().to("meta") for value in exported.state_dict.values()]
    inputs = [torch.randn(4, 6, 8, device="meta"), torch.randn(6, 8, device="meta")]
    (result,) = moved(*weights, *inputs)
    assert result.device.type == "meta"
    assert result.shape == (4, 6, 8)


def test_the_same_device_gives_an_equal_copy():
    exported = exported_constants()
    same = retarget(exported.graph_module, torch.device("cpu"))
    assert same is not exported.graph_module
    assert same.code == exported.graph_module.code
    x = torch.randn(3, 4)
    assert all(torch.equal(*pair) for pair in zip(same(x), Constants()(x), strict=True))


def test_the_accelerator_is_the_device_that_was_exported_for():
    assert exported_device(exported_constants().graph_module) == torch.device("cpu")
    mixed = retarget(exported_constants().graph_module, "cuda")
    assert exported_device(mixed) == torch.device("cuda:0")
    # The placeholders' fakes still lie on the CPU: an explicit transfer, which stays.
    node = next(node for node in mixed.graph.nodes if "arange" in node.name)
    node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    back = retarget(mixed, "cuda:1")
    assert devices_in(back) == {torch.device("cuda:1"), torch.device("cpu"), "cuda"}


def test_two_accelerators_are_refused():
    moved = retarget(exported_constants().graph_module, "cuda:0")
    node = next(node for node in moved.graph.nodes if "arange" in node.name)
    node.kwargs = {**node.kwargs, "device": torch.device("cuda:1")}
    with pytest.raises(PassError, match=r"\['cuda:0', 'cuda:1'\], expected one besides the CPU"):
        retarget(moved, "cpu")


def test_operators_of_one_device_cannot_move():
    class Attention(nn.Module):
        def forward(self, q):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    exported = torch.export.export(Attention(), (torch.randn(1, 2, 4, 8),))
    assert retarget(exported.graph_module, "cpu").code == exported.graph_module.code
    with pytest.raises(PassError, match=r"flash_attention_for_cpu\.default, which exists on a CPU only"):
        retarget(exported.graph_module, "cuda")


@pytest.mark.parametrize("overload", ["device", "dtype_layout"])
def test_a_transfer_stays_a_copy_where_two_devices_become_one(overload):
    """Else its result would share memory with a weight that export saw copied."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    cpu = torch.device("cpu")
    if overload == "device":
        moved = graph.call_function(torch.ops.aten.to.device, (x, cpu, torch.float32))
    else:
        moved = graph.call_function(torch.ops.aten.to.dtype_layout, (x,), {"device": cpu})
    graph.output(moved)
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, device="cuda")
        moved.meta["val"] = torch.empty(4)
    lowered = retarget(fx.GraphModule({}, graph), "cpu")
    value = torch.ones(4)
    assert lowered(value).data_ptr() != value.data_ptr()
