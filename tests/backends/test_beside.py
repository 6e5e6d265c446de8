"""Another library's torch.compile backend beside penstock: OpenVINO's, and functions that watch."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import penstock
from penstock.backends.beside import beside
from tests.hunt import nightly_but

WIDTH, LAYERS = 64, 3
FLOAT32 = {"config": {"INFERENCE_PRECISION_HINT": "f32"}}
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("quiet")]


class Attention(nn.Module):
    """A layer of attention: what reads no weight of it is a region of several nodes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        return x + torch.tanh(self.out(mixed.transpose(1, 2).reshape(x.shape)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        for layer in self.layers:
            x = layer(x)
        return x * 2 + 1


@pytest.fixture
def encoder(tmp_path):
    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(1, 5, WIDTH)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    return model, x, str(tmp_path / "model.safetensors")


def streamed(encoder, other, budget, **options):
    """Outputs of three passes, and what was counted."""
    model, x, path = encoder
    torch._dynamo.reset()
    module = copy.deepcopy(model)
    record = penstock.offload(module, path)
    given = {"budget": budget, "resident_below": "1KiB", **options}
    compiled = torch.compile(module, backend=beside(other), options=given, fullgraph=True)
    outputs = [compiled(one) for one in (x, x + 1, x)]
    stats = record.stats
    record.close()
    assert module.calls == 3
    return outputs, stats


def test_openvino_computes_between_the_reads(encoder):
    beside("openvino")  # which imports it, and undoes what that does to Dynamo
    from openvino.frontend.pytorch.torchdynamo import execute

    execute.clear_caches()
    expected = copy.deepcopy(encoder[0])(encoder[1])
    resident, _ = streamed(encoder, "openvino", "100%", **FLOAT32)
    outputs, stats = streamed(encoder, "openvino", "45%", **FLOAT32)
    assert all(torch.equal(got, kept) for got, kept in zip(outputs, resident, strict=True))
    torch.testing.assert_close(outputs[0], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])  # the next call has not overwritten it
    assert stats.misses == 0
    assert stats.bytes_moved > 0
    assert stats.peak_bytes <= stats.budget
    assert len(execute.compiled_cache) >= 2 * LAYERS
    regions = [one for part in execute.partitioned_modules.values() for one in part.children()]
    assert len(regions) == len(execute.compiled_cache)
    assert not any(region.perm_fallback for region in regions)


@pytest.mark.parametrize("other", nightly_but(["specialising"], ["openvino", "specialising"]))
def test_regions_of_dynamic_sizes_are_compiled_for_each(encoder, other):
    """Both compilers take the sizes of the first inputs for those of all."""
    model, _, path = encoder
    compiled = []

    def specialising(graph_module, inputs):
        compiled.append(graph_module)
        return make_fx(graph_module)(*inputs)

    module, counts = copy.deepcopy(model), []
    record = penstock.offload(module, path)
    given = FLOAT32 if other == "openvino" else {}
    backend = beside(other if other == "openvino" else specialising)
    options = {"budget": "45%", "resident_below": "1KiB", **given}
    run = torch.compile(module, backend=backend, options=options, dynamic=True, fullgraph=True)
    for rows in (5, 7, 5, 9):
        inputs = torch.randn(1, rows, WIDTH)
        torch.testing.assert_close(run(inputs), model(inputs), rtol=1e-4, atol=1e-4)
        counts.append(len(compiled))
    assert record.stats.misses == 0
    record.close()
    assert counts == [times * counts[0] for times in (1, 2, 2, 3)]


def test_the_other_compiler_gets_no_weight_that_streams(encoder):
    model, x, _ = encoder
    seen = []

    def watch(graph_module, inputs):
        seen.append((graph_module, inputs))
        return graph_module.forward

    outputs, stats = streamed(encoder, watch, "45%")
    assert all(torch.equal(got, model(one)) for got, one in zip(outputs, (x, x + 1, x), strict=True))
    assert stats.misses == 0
    assert seen
    weights = {tuple(p.shape) for p in model.parameters() if p.numel() * 4 >= 1024}
    weights |= {shape[::-1] for shape in weights}
    for graph_module, inputs in seen:
        assert not any(tuple(one.shape) in weights for one in inputs)
        assert not any(node.op == "get_attr" for node in graph_module.graph.nodes)
        assert sum(node.op == "call_function" for node in graph_module.graph.nodes) > 1


def test_a_graph_without_weights_is_the_others_alone():
    seen = []

    def watch(graph_module, inputs, options):
        seen.append(options)
        return graph_module.forward

    compiled = torch.compile(torch.tanh, backend=beside(watch), options={"budget": "1MiB", "device": "CPU"})
    assert torch.equal(compiled(torch.ones(3)), torch.tanh(torch.ones(3)))
    assert seen == [{"device": "CPU"}]


def test_a_backend_that_is_not_there_and_a_missing_budget_are_refused(encoder):
    with pytest.raises(
        penstock.PassError, match=r"no installed library has the torch\.compile backend 'openvin'"
    ):
        beside("openvin")
    with pytest.raises(Exception, match="'penstock beside openvino' needs a budget"):
        torch.compile(encoder[0], backend=beside("openvino"), options={})(encoder[1])


def test_weights_inside_of_dynamos_graph_are_refused(tmp_path):
    module = nn.Sequential(nn.Linear(4, 4))
    save_file(dict(module.named_parameters()), tmp_path / "linear.safetensors")
    penstock.offload(module, tmp_path / "linear.safetensors")
    graph = fx.Graph(module)
    graph.output((graph.call_function(torch.add, (graph.get_attr("0.weight"), graph.placeholder("x"))),))
    inside = fx.GraphModule(module, graph)
    for backend in (torch._dynamo.lookup_backend("penstock"), beside("eager")):
        with pytest.raises(penstock.PassError, match=r"'0\.weight' inside its graph.*nn_modules = True"):
            backend(inside, [torch.ones(4, 4)], options={"budget": "50%"})
