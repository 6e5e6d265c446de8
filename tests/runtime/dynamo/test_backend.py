"""torch.compile with the backend "penstock": pieces of one module, one budget, the same bits."""

import copy
import os
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("quiet")]
WIDTH = 128
BUDGET = {"budget": "50%", "resident_below": "4KiB"}


class Branching(nn.Module):
    """Two layers with a graph break between them, a tied weight, and a view of another."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.again.weight = self.up.weight
        self.mix = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        x = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        self.count.add_(1)
        x = self.down(x)
        if x.sum() > 0:  # another break, and a branch that only some calls take
            x = x @ self.mix[WIDTH:]
        return self.again(x)


def saved(module, folder):
    path = f"{folder}/model.safetensors"
    save_file({k: v for k, v in module.state_dict().items() if k != "again.weight"}, path)
    return path


@pytest.mark.usefixtures("compiler")
def test_pieces_share_one_budget_and_compute_the_same(tmp_path, said):
    torch.manual_seed(0)
    module = Branching().eval()
    inputs = [torch.randn(4, WIDTH), torch.randn(4, WIDTH), torch.randn(9, WIDTH), torch.randn(4, WIDTH)]
    expected = [torch.compile(module)(x) for x in inputs]
    torch._dynamo.reset()
    module.count.zero_()
    before = sum(p.untyped_storage().nbytes() for p in module.parameters())
    record = penstock.offload(module, saved(module, tmp_path))
    assert record.nbytes == before
    assert "given back" in said()
    assert all(p.untyped_storage().nbytes() == 0 for p in module.parameters())
    assert module.again.weight is module.up.weight
    streamed = torch.compile(module, backend="penstock", options=BUDGET)
    for x, output in zip(inputs, expected, strict=True):
        assert torch.equal(streamed(x), output)
    assert module.count == len(inputs)
    session = record.sessions[0]
    assert record.stats.peak_bytes <= session.budget < before
    assert record.stats.bytes_moved > 0
    assert record.stats.misses == 0
    assert len(session.plan.traces) >= 3
    record.close()
    assert not any(thread.name.startswith("penstock-reader") for thread in threading.enumerate())
    assert torch.equal(streamed(inputs[0]), expected[0])  # a call takes what it needs again
    record.close()


@pytest.mark.usefixtures("compiler")
def test_meta_parameters_take_the_values_of_the_files(tmp_path):
    torch.manual_seed(1)
    real = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).eval()
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).eval()
    assert penstock.offload(empty, saved(real, tmp_path)).nbytes == 0
    x = torch.randn(3, WIDTH)
    streamed = torch.compile(empty, backend="penstock", options={"budget": "60%", "resident_below": 0})
    torch.testing.assert_close(streamed(x), real(x))


@pytest.mark.parametrize("options", [{}, {"budget": "1KiB"}])
def test_a_budget_that_cannot_be_is_refused(tmp_path, options):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    penstock.offload(module, saved(module, tmp_path))
    with pytest.raises(Exception, match=r"needs a budget|below the floor"):
        torch.compile(module, backend="penstock", options=options)(torch.ones(1, WIDTH))


def test_parameters_that_are_still_in_memory_are_refused_with_advice():
    with pytest.raises(Exception, match=r"call penstock\.offload"):
        torch.compile(nn.Linear(4, 4), backend="penstock", options={"budget": "50%"})(torch.ones(1, 4))


def test_gradients_are_refused(tmp_path):
    module = nn.Linear(WIDTH, WIDTH)
    penstock.offload(module, saved(module, tmp_path))
    streamed = torch.compile(module, backend="penstock", options={"budget": "100%"})
    with torch.enable_grad(), pytest.raises(Exception, match="gradients through streamed weights"):
        streamed(torch.ones(1, WIDTH, requires_grad=True))


def test_files_with_other_values_leave_the_module_as_it_was(tmp_path):
    module = nn.Linear(4, 4)
    path = saved(nn.Linear(4, 4), tmp_path)
    with pytest.raises(penstock.SourceError, match="other values for parameter weight than the module"):
        penstock.offload(module, path)
    assert module.weight.untyped_storage().nbytes() == 64
    assert module.weight.requires_grad


def test_a_module_is_offloaded_once(tmp_path):
    module = nn.Linear(4, 4)
    path = saved(module, tmp_path)
    penstock.offload(module, path)
    with pytest.raises(penstock.PassError, match="was offloaded before"):
        penstock.offload(module, path)


class Blocks(nn.Module):
    """Equal layers, for which Dynamo compiles one piece."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.usefixtures("compiler")
def test_equal_layers_share_code_and_not_weights(tmp_path, regional):
    torch.manual_seed(4)
    module = Blocks().eval()
    x = torch.randn(4, WIDTH)
    expected = module(x)
    record = penstock.offload(module, saved(module, tmp_path))
    if regional:
        for layer in module.layers:
            layer.compile(backend="penstock", options=BUDGET)
        streamed = module
    else:
        streamed = torch.compile(module, backend="penstock", options=BUDGET)
    for _ in range(3):
        torch.testing.assert_close(streamed(x), expected)
    assert record.stats.peak_bytes <= record.sessions[0].budget
    record.close()


class Escaping(nn.Module):
    """Hands a view of a weight over a graph break."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        w = self.a.t()
        y = x @ self.a
        torch._dynamo.graph_break()
        return y @ w


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        self.a.mul_(2)
        return x @ self.a


class SyntheticBase(nn.Module):
    """Two views of one buffer, one of them written: AOTAutograd passes their base instead."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("kv", torch.zeros(2, 3, WIDTH))
        self.k, self.v = self.kv[0], self.kv[:1]

    def forward(self, x):
        self.k.copy_(x @ self.a)
        return self.k + self.v


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Escaping, "is returned, or aliased by what is"),
        (Writing, "is written by the compiled graph"),
        (SyntheticBase, "the compiler was given other inputs"),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_what_cannot_be_streamed_is_refused_by_name(tmp_path, kind, message):
    module = kind().eval()
    penstock.offload(module, saved(module, tmp_path))
    streamed = torch.compile(module, backend="penstock", options={"budget": "100%", "resident_below": 0})
    with pytest.raises(Exception, match=message):
        streamed(torch.randn(3, WIDTH))


@pytest.mark.parametrize(
    "use", [copy.deepcopy, nn.Module.state_dict, nn.Module.half, lambda m: m(torch.ones(1, 4))]
)
def test_uses_outside_compiled_code_are_refused(tmp_path, use):
    module = nn.Sequential(nn.Linear(4, 4))
    penstock.offload(module, saved(module, tmp_path))
    with pytest.raises(penstock.StreamError, match="parameters of this Linear are offloaded"):
        use(module)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.lstm(self.linear(x))[0]


@pytest.mark.usefixtures("compiler")
def test_recurrent_layers_stay_in_memory(tmp_path):
    module = Recurrent().eval()
    x = torch.randn(3, WIDTH)
    expected = module(x)
    record = penstock.offload(module, saved(module, tmp_path))
    assert record.nbytes == (WIDTH + 1) * WIDTH * 4
    streamed = torch.compile(module, backend="penstock", options={"budget": "100%"})
    torch.testing.assert_close(streamed(x), expected)
    record.close()


@pytest.mark.usefixtures("compiler")
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path):
    module, x = nn.Linear(WIDTH, WIDTH).eval(), torch.randn(2, WIDTH)
    expected = torch.compile(module)(x)
    torch._dynamo.reset()
    penstock.offload(module, saved(module, tmp_path))
    streamed = torch.compile(module, backend="penstock", options={"budget": "100%"})
    streamed(x)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            streamed(x)
        except penstock.StreamError as error:
            status = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(streamed(x), expected)
